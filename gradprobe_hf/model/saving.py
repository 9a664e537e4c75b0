"""Shards: a model that is not in one piece in memory, written as safetensors files, one shard in memory at a time.

`save_pretrained` would read a whole shard of up to 50 GB, and knows of offloaded weights only after `device_map`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from gradprobe_hf.model.families import block_of
from gradprobe_hf.model.fsdp import reshard, whole
from gradprobe_hf.model.parameters import aliases, offloaded_parameter

LARGEST_SHARD, SMALLEST_SHARD = 2**29, 2**26  # bytes
SHARDS = 8  # that a model of middling size is written in: so much of it is in memory at once


def shard_bytes(model: PreTrainedModel) -> int:
    return max(SMALLEST_SHARD, min(LARGEST_SHARD, sum(p.nbytes for p in model.parameters()) // SHARDS))


def save_in_shards(folder: Path, model: PreTrainedModel, writes: bool = True) -> None:
    """Write weights, configuration and generation configuration as `save_pretrained` would.

    Of a model that FSDP2 shards every process has to call this: one parameter after the other is gathered.

    Args:
        writes: False in the processes that only take part in the gathering.
    """
    if writes:
        with _nothing_gathered(model), _quiet():
            model.save_pretrained(folder, state_dict={}, is_main_process=True)  # everything but the weights
    reshard(model)
    files: list[tuple[Path, dict[str, int]]] = []
    for shard in _shards(model):
        if writes:
            path = folder / f"{len(files)}.partial"
            save_file(shard, path, metadata={"format": "pt"})
            files.append((path, {name: tensor.nbytes for name, tensor in shard.items()}))
        shard.clear()  # before the next one is read
    if writes:
        _name_files(folder, files)


def _shards(model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """Tensors under the names of the checkpoint format. Blocks are converted whole: a conversion (of the experts of a
    mixture, say) may need several of a block's tensors."""
    limit = shard_bytes(model)
    shard: dict[str, Tensor] = {}
    for _, names in groupby(_names(model), key=lambda name: block_of(model, name)):
        group = {name: _read(model, name) for name in names}
        shard |= {name: t.contiguous().cpu() for name, t in revert_weight_conversion(model, group).items()}
        del group
        if sum(tensor.nbytes for tensor in shard.values()) >= limit:
            yield shard
            shard = {}
    if shard:
        yield shard


def _names(model: PreTrainedModel) -> list[str]:
    """What a checkpoint holds: of tied weights one, the one that transformers ties the others to."""
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    dropped = set(tied) | {alias for alias, name in aliases(model).items() if name not in tied}
    dropped |= set(model._keys_to_ignore_on_save or ())
    dropped -= set(tied.values())
    return [name for name in model.state_dict() if name not in dropped]


def _read(model: PreTrainedModel, name: str) -> Tensor:
    tensor = model.get_parameter_or_buffer(name)
    if tensor.is_meta and (place := offloaded_parameter(model, name)) is not None:
        return place.read().to(tensor.dtype)
    return whole(tensor.detach())


def _name_files(folder: Path, files: list[tuple[Path, dict[str, int]]]) -> None:
    if len(files) == 1:
        files[0][0].rename(folder / SAFE_WEIGHTS_NAME)
        return
    stem, suffix = SAFE_WEIGHTS_NAME.rsplit(".", 1)
    weight_map: dict[str, str] = {}
    total = 0
    for number, (path, sizes) in enumerate(files, start=1):
        name = f"{stem}-{number:05d}-of-{len(files):05d}.{suffix}"
        path.rename(folder / name)
        weight_map |= dict.fromkeys(sizes, name)
        total += sum(sizes.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def _nothing_gathered(model: PreTrainedModel) -> Iterator[None]:
    """A model made with `distributed_config` would gather all of itself, whatever state it is told to save."""
    had = getattr(model.config, "distributed_config", None)
    try:
        if had is not None:
            model.config.distributed_config = None
        yield
    finally:
        if had is not None:
            model.config.distributed_config = had


@contextmanager
def _quiet() -> Iterator[None]:
    """Without a progress bar over no shards, and without the warning that the whole model will be read."""
    shown = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Attempting to save a model with offloaded modules")
            yield
    finally:
        if shown:
            enable_progress_bar()
