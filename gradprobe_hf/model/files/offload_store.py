"""The offload store: what Accelerate keeps on disk of an offloaded model, and how to change it all or not at all.

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
from functools import partial
from pathlib import Path

import torch
from accelerate.utils import OffloadedWeightsLoader
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from gradprobe_hf.model.parameters import aliases, is_on_disk, offloaded_parameter, parameter_bytes
from gradprobe_hf.runtime.interrupts import uninterrupted
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.runtime.scratch import remove_scratch, scratch_folder


class _Transaction:
    """Steps that undo what was done so far, and steps that clean up once nothing can fail any more."""

    def __init__(self) -> None:
        self.undo: list[Callable[[], None]] = []
        self.cleanup: list[Callable[[], None]] = []

    def __enter__(self) -> _Transaction:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        steps = self.cleanup if kind is None else self.undo[::-1]
        with uninterrupted():
            for step in steps:
                with suppress(OSError):  # one file that cannot be removed must not stop the others
                    step()


def replace_on_disk(
    model: nn.Module, changes: Mapping[str, Callable[[Tensor], Tensor]], processes: Processes | None = None
) -> None:
    """Change parameters that are stored on disk, all of them or none.

    Args:
        changes: parameter name -> a function from its stored values to the new ones.
        processes: which all change theirs, or none does; a collective then. Default: this one alone.

    Raises:
        OSError: no room, or no permission; the store is as it was.
    """
    with _Transaction() as transaction:
        write = partial(_change, model, changes, transaction)
        # None cleans up before all have written: of what one cannot, the others undo theirs.
        (processes or Processes()).in_all(write, patiently=True)


def _change(model: nn.Module, changes: Mapping[str, Callable[[Tensor], Tensor]], transaction: _Transaction) -> None:
    folders: dict[str, Path] = {}
    for name, change in changes.items():
        # The store has an entry for each name of a tied parameter.
        for alias in [name, *(other for other, canonical in aliases(model).items() if canonical == name)]:
            offloaded = offloaded_parameter(model, alias)
            assert offloaded is not None, "it is on disk"
            store, key = offloaded.store
            assert isinstance(store, OffloadedWeightsLoader)
            value = change(offloaded.read())
            try:
                if store.index[key].get("safetensors_file") is None:
                    _replace_file(store, key, value, transaction)
                else:
                    _redirect(store, key, value, _changes_folder(model, store, folders), transaction)
            except SafetensorError as error:
                raise OSError(f"the offload store cannot be written: {error}") from error


def check_store_room(
    model: nn.Module, parameters: set[str], checkpoint: str | Path | None = None, processes: int = 1
) -> None:
    """Raise OSError, before any work, if changed weights will not fit on the disk beside the stored ones.

    Args:
        checkpoint: where the whole model will be saved first, perhaps on the same disk.
        processes: how many there are, each of which writes its own; all on this disk, for all that is known.
    """
    needed: dict[Path, int] = {}
    for name in parameters:
        if is_on_disk(model, name) and (offloaded := offloaded_parameter(model, name)) is not None:
            folder = _store_folder(offloaded.store[0])
            needed[folder] = needed.get(folder, 0) + processes * model.get_parameter(name).nbytes
    for folder, nbytes in needed.items():
        if checkpoint is not None and _disk_of(folder) == _disk_of(Path(checkpoint)):
            nbytes += parameter_bytes(model)
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
    """The path, or the nearest folder above it that exists."""
    return next(parent for parent in (path, *path.parents) if parent.exists())


def _disk_of(path: Path) -> int:
    return existing_parent(path.absolute()).stat().st_dev


def _store_folder(store: object) -> Path:
    return Path(getattr(store, "save_folder", None) or tempfile.gettempdir())


def _replace_file(store: OffloadedWeightsLoader, key: str, value: Tensor, transaction: _Transaction) -> None:
    """Write a new `.dat` file, the bytes of the tensor (accelerate/utils/offload.py), and keep the old one."""
    path = Path(str(store.save_folder)) / f"{key}.dat"
    before = path.with_name(path.name + ".before")
    with uninterrupted():
        path.rename(before)
        transaction.undo.append(lambda: os.replace(before, path))
        transaction.cleanup.append(before.unlink)
    # Written, not mapped as accelerate does: on a full disk a write raises, where a mapping ends the process (SIGBUS).
    with open(path, "wb") as file:
        file.write(value.contiguous().cpu().flatten().view(torch.uint8).numpy().data)


def _changes_folder(model: nn.Module, store: OffloadedWeightsLoader, folders: dict[str, Path]) -> Path:
    """Our folder on the store's disk, made at its first use."""
    parent = _store_folder(store)
    if str(parent) not in folders:
        folders[str(parent)] = folder = scratch_folder("changes", parent)
        weakref.finalize(model, remove_scratch, folder)  # nothing but this model's index refers to its files
    return folders[str(parent)]


def _redirect(store: OffloadedWeightsLoader, key: str, value: Tensor, folder: Path, transaction: _Transaction) -> None:
    """Write a safetensors file of our own and point the store's index at it."""
    file = folder / f"{key}.safetensors"
    transaction.undo.append(lambda: file.unlink(missing_ok=True))
    save_file({key: value.contiguous().cpu()}, file)
    previous = store.index[key]
    store.index[key] = {
        "safetensors_file": str(file),
        "weight_name": key,
        "dtype": str(value.dtype).removeprefix("torch."),
    }
    transaction.undo.append(lambda: store.index.__setitem__(key, previous))
