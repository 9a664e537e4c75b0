"""The store: what Accelerate keeps on disk of an offloaded model, and how it is changed without losing anything.

accelerate's own `.dat` files (`disk_offload`, `dispatch_model`) are replaced one by one; the old ones stay beside them
until all are written. Safetensors files are never written to, because after `from_pretrained(device_map={"": "disk"})`
they are the user's checkpoint: changed weights go to files of ours, and the loader's index is pointed at them.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from accelerate.utils import OffloadedWeightsLoader
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from gradprobe_hf.model.parameters import aliases, is_on_disk, offloaded_parameter
from gradprobe_hf.runtime.interrupts import uninterrupted

PREFIX = "gradprobe-"  # of the folders that hold changed weights


def replace_on_disk(model: nn.Module, changes: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
    """Change parameters that are kept on disk, all of them or none.

    Args:
        changes: parameter name -> a function from its stored values to the new ones.

    Raises:
        OSError: no room, or no permission; the store is as it was.
    """
    undo: list[Callable[[], None]] = []
    done: list[Callable[[], None]] = []
    folders: dict[str, Path] = {}
    try:
        for name, change in changes.items():
            for alias in [name, *(other for other, canonical in aliases(model).items() if canonical == name)]:
                place = offloaded_parameter(model, alias)
                assert place is not None, "it is on disk"
                store, key = place.store
                assert isinstance(store, OffloadedWeightsLoader)
                value = change(place.read())
                if store.index[key].get("safetensors_file") is None:
                    _replace_file(store, key, value, undo, done)
                else:
                    _redirect(model, store, key, value, folders, undo)
    except BaseException as error:
        with uninterrupted():
            for step in reversed(undo):
                with suppress(OSError):
                    step()
        if isinstance(error, SafetensorError):
            raise OSError(f"the offload store cannot be written: {error}") from error
        raise
    with uninterrupted():  # nothing can take this back any more
        for step in done:
            with suppress(OSError):
                step()


def check_store_room(model: nn.Module, parameters: set[str], checkpoint: str | Path | None = None) -> None:
    """Raise OSError, before any work, where changed weights will not fit beside those that are on disk.

    Args:
        checkpoint: where the whole model will be saved before, maybe on the same disk.
    """
    needed: dict[Path, int] = {}
    for name in parameters:
        if is_on_disk(model, name) and (place := offloaded_parameter(model, name)) is not None:
            folder = _folder_of(place.store[0])
            needed[folder] = needed.get(folder, 0) + model.get_parameter(name).nbytes
    for folder, nbytes in needed.items():
        if checkpoint is not None and _disk_of(folder) == _disk_of(Path(checkpoint)):
            nbytes += sum(parameter.nbytes for parameter in model.parameters())
        free = shutil.disk_usage(folder).free
        if free < nbytes:
            raise OSError(
                errno.ENOSPC,
                f"what is saved, with the pruned weights of the offloaded model, needs {nbytes / 1e6:,.0f} MB on that "
                f"disk and {free / 1e6:,.0f} MB are free; choose another offload_folder (--offload-folder). Nothing "
                "was written",
                str(folder),
            )


def existing_parent(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    return next(parent for parent in (path, *path.parents) if parent.exists())


def _disk_of(path: Path) -> int:
    return existing_parent(path.absolute()).stat().st_dev


def _folder_of(store: object) -> Path:
    return Path(getattr(store, "save_folder", None) or tempfile.gettempdir())


def _replace_file(
    store: OffloadedWeightsLoader,
    key: str,
    value: Tensor,
    undo: list[Callable[[], None]],
    done: list[Callable[[], None]],
) -> None:
    """accelerate's `.dat` file is the tensor's bytes (accelerate/utils/offload.py); mapping it for writing, as
    accelerate does, would end the process on a full disk, where writing it raises."""
    path = Path(str(store.save_folder)) / f"{key}.dat"
    before = path.with_name(path.name + ".before")
    with uninterrupted():
        path.rename(before)
        undo.append(lambda: os.replace(before, path))
        done.append(before.unlink)
    with open(path, "wb") as file:
        file.write(value.contiguous().cpu().flatten().view(torch.uint8).numpy().data)


def _redirect(
    model: nn.Module,
    store: OffloadedWeightsLoader,
    key: str,
    value: Tensor,
    folders: dict[str, Path],
    undo: list[Callable[[], None]],
) -> None:
    parent = _folder_of(store)
    if str(parent) not in folders:
        folders[str(parent)] = folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        weakref.finalize(model, shutil.rmtree, folder, True)  # nobody else knows of these files
    file = folders[str(parent)] / f"{key}.safetensors"
    undo.append(lambda: file.unlink(missing_ok=True))
    save_file({key: value.contiguous().cpu()}, file)
    previous = store.index[key]
    store.index[key] = {
        "safetensors_file": str(file),
        "weight_name": key,
        "dtype": str(value.dtype).removeprefix("torch."),
    }
    undo.append(lambda: store.index.__setitem__(key, previous))
