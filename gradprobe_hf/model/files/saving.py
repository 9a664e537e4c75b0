"""Saving: a model that is not in memory as a whole, written as safetensors files, one file in memory at a time.

What is small enough is joined to one file in the end (`shard_files.py`).
`save_pretrained` would hold a file of up to 50 GB in memory, and finds offloaded weights only if `device_map` offloaded
them. The files below are the shards of a checkpoint; they have nothing to do with the shards of FSDP2.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from gradprobe_hf.model.families import block_of
from gradprobe_hf.model.files.shard_files import header_bytes, name_files
from gradprobe_hf.model.fsdp import gathered, is_sharded, reshard
from gradprobe_hf.model.parameters import aliases, listed_ties, offloaded_parameter, parameter_bytes

LARGEST_SHARD, SMALLEST_SHARD = 2**29, 2**26  # bytes
SHARDS = 8  # files that a model between the two limits is written in, hence the part of it that is in memory


def shard_bytes(model: PreTrainedModel) -> int:
    return max(SMALLEST_SHARD, min(LARGEST_SHARD, parameter_bytes(model) // SHARDS))


@dataclass(frozen=True)
class Smaller:
    """A model of which less is written than it has.

    Attributes:
        config: of what is written.
        name: a tensor's name -> its name there; None: it has no part in it.
        tensor: a tensor and its name -> what is written of it.
    """

    config: PreTrainedConfig
    name: Callable[[str], str | None]
    tensor: Callable[[str, Tensor], Tensor]


def save_in_shards(folder: Path, model: PreTrainedModel, writes: bool = True, smaller: Smaller | None = None) -> None:
    """Write weights, configuration and generation configuration as `save_pretrained` would.

    If FSDP2 shards the model, every process has to call this: parameters are gathered one after the other. What fails
    in the one that writes is raised behind the last of them, for which the others wait.

    Args:
        writes: False in the processes that only take part in the gathering.
        smaller: what to write in place of the whole model.
    """
    failures: list[BaseException] = []
    others_wait = is_sharded(model)

    def write(work: Callable[[], None]) -> None:
        if not writes or failures:
            return
        try:
            work()
        except BaseException as failure:
            if not others_wait:
                raise
            failures.append(failure)

    files: list[tuple[Path, dict[str, int]]] = []

    def save(shard: dict[str, Tensor]) -> None:
        path = folder / f"{len(files)}.partial"  # the name says how many files there are: known at the end
        save_file(shard, path, metadata={"format": "pt"})
        files.append((path, {name: tensor.nbytes for name, tensor in shard.items()}))

    write(lambda: _save_configuration(folder, model, smaller))
    reshard(model)
    for shard in _shards(model, smaller):
        write(partial(save, shard))
        shard.clear()  # the generator still holds it: two files would be in memory while the next is read
    write(lambda: name_files(folder, files))
    if failures:
        raise failures[0]


def _save_configuration(folder: Path, model: PreTrainedModel, smaller: Smaller | None) -> None:
    with _without_gathering(model), _configured(model, smaller), quiet():
        # An empty state dict: everything but the weights is written.
        model.save_pretrained(folder, state_dict={}, is_main_process=True)


def bytes_beside_parameters(model: PreTrainedModel) -> int:
    """The most that the files of a checkpoint have beside parameters: buffers that are saved, and headers."""
    names, buffers = _names(model), dict(model.named_buffers())
    stored = {name: torch.empty_like(model.get_parameter_or_buffer(name), device="meta") for name in names}
    total = sum(tensor.nbytes for tensor in stored.values())
    shapes = {name: tensor.shape for name, tensor in revert_weight_conversion(model, stored).items()}
    saved = sum(buffers[name].nbytes for name in names if name in buffers)
    return saved + header_bytes(shapes, total, files=1 + total // shard_bytes(model))


def _shards(model: PreTrainedModel, smaller: Smaller | None) -> Iterator[dict[str, Tensor]]:
    """The tensors of one file after the other, under the names of the checkpoint format."""
    # Converted block by block: transformers may make one tensor of the checkpoint from several of a block's, or several
    # from one (the experts of a mixture).
    limit = shard_bytes(model)
    shard: dict[str, Tensor] = {}
    for _, names in groupby(_names(model), key=lambda name: block_of(model, name)):
        group = dict(_stored(model, names, smaller))
        shard |= {name: t.contiguous().cpu() for name, t in revert_weight_conversion(model, group).items()}
        del group  # before the file is written
        if sum(tensor.nbytes for tensor in shard.values()) >= limit:
            yield shard
            shard = {}
    if shard:
        yield shard


def _names(model: PreTrainedModel) -> list[str]:
    """What a checkpoint holds: of tied weights the one that transformers ties the others to."""
    tied = listed_ties(model)
    dropped = set(tied) | {alias for alias, name in aliases(model).items() if name not in tied}
    dropped |= set(model._keys_to_ignore_on_save or ())
    dropped -= set(tied.values())
    return [name for name in model.state_dict() if name not in dropped]


def _stored(model: PreTrainedModel, names: Iterable[str], smaller: Smaller | None) -> Iterator[tuple[str, Tensor]]:
    """What is written of some tensors, under the names it has there."""
    for name in names:
        written = name if smaller is None else smaller.name(name)
        if written is not None:
            tensor = _stored_tensor(model, name)
            yield written, tensor if smaller is None else smaller.tensor(name, tensor)


def _stored_tensor(model: PreTrainedModel, name: str) -> Tensor:
    tensor = model.get_parameter_or_buffer(name)
    if tensor.is_meta and (offloaded := offloaded_parameter(model, name)) is not None:
        return offloaded.read().to(tensor.dtype)
    return gathered(tensor.detach())


@contextmanager
def _configured(model: PreTrainedModel, smaller: Smaller | None) -> Iterator[None]:
    """The configuration that is written, in place of the model's own."""
    original = model.config
    try:
        if smaller is not None:
            model.config = smaller.config
        yield
    finally:
        model.config = original


@contextmanager
def _without_gathering(model: PreTrainedModel) -> Iterator[None]:
    """Keep `save_pretrained` from gathering the model, which it does for a `distributed_config` in spite of the empty
    state dict."""
    original = getattr(model.config, "distributed_config", None)
    try:
        if original is not None:
            model.config.distributed_config = None
        yield
    finally:
        if original is not None:
            model.config.distributed_config = original


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bar of transformers where nothing is read or written, and no warning that an offloaded model will be
    read into memory: it is not."""
    shown = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Attempting to save a model with offloaded modules")
            yield
    finally:
        if shown:
            enable_progress_bar()
