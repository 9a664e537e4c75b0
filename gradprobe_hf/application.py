"""Application: zeros into the model, at the very end, and back again if anything after it fails.

Weights in memory (the model's own, or those `cpu_offload` keeps) are written in place. Weights on disk are masked as
they are read, and written to Accelerate's store only when all else has succeeded: so a checkpoint is saved, or a dry
run ends, without the model being written twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from gradprobe_hf.masks import rows_of
from gradprobe_hf.sharding import reshard
from gradprobe_hf.store import replace_on_disk
from gradprobe_hf.targets import Target
from gradprobe_hf.weights import WeightsView, aliases, is_on_disk, place_of, row_chunks

Change = Callable[[Tensor], Tensor]


@contextmanager
def masks_applied(
    model: nn.Module, targets: Sequence[Target], masks: Mapping[str, Tensor], keep: bool = True
) -> Iterator[None]:
    """Zero the masked weights for the body of the `with`.

    They stay zero afterwards if `keep` is set and the body returned. If it raised, or was interrupted, every weight
    has its original bits again: the originals of the pruned weights in memory are kept until then.

    Raises:
        OSError: the store of offloaded weights cannot be written; every weight has its original bits again.
    """
    in_memory = [target for target in targets if not is_on_disk(model, target.parameter)]
    changes = _changes([target for target in targets if is_on_disk(model, target.parameter)], masks)
    with _zeroed(model, in_memory, masks, keep):
        with _read_through(model, changes):
            yield
        if keep:
            replace_on_disk(model, changes)


@contextmanager
def _zeroed(model: nn.Module, targets: Sequence[Target], masks: Mapping[str, Tensor], keep: bool) -> Iterator[None]:
    originals: list[tuple[Target, Tensor]] = []
    keeping = False
    try:
        with torch.no_grad():
            reshard(model)  # a whole weight that is still there would hide what its shard is given
            for target in targets:
                weight, mask = target.matrix(model), masks[target.name]
                originals.append((target, weight.masked_select(mask)))  # before the write: nothing is lost
                weight.masked_fill_(mask, 0)
        yield
        keeping = keep
    finally:
        if not keeping:
            reshard(model)
            with torch.no_grad():
                while originals:  # each is let go as soon as it is back
                    target, values = originals.pop()
                    target.matrix(model).masked_scatter_(masks[target.name], values)


def _changes(targets: Sequence[Target], masks: Mapping[str, Tensor]) -> dict[str, Change]:
    """Parameter name -> what gives its values with zeros; the slices of a fused parameter are one change."""
    by_parameter: dict[str, list[Target]] = {}
    for target in targets:
        by_parameter.setdefault(target.parameter, []).append(target)
    return {name: partial(_with_zeros, same, masks) for name, same in by_parameter.items()}


def _with_zeros(targets: Sequence[Target], masks: Mapping[str, Tensor], stored: Tensor) -> Tensor:
    zeroed = stored.detach().clone()
    for target in targets:
        matrix = target.view(zeroed)
        for rows in row_chunks(target.shape):
            matrix[rows].masked_fill_(rows_of(masks, target.name, rows).to(matrix.device), 0)
    return zeroed


@contextmanager
def _read_through(model: nn.Module, changes: Mapping[str, Change]) -> Iterator[None]:
    """Whatever reads these parameters from Accelerate's hooks reads them changed."""
    names = {**{name: name for name in changes}, **{a: name for a, name in aliases(model).items() if name in changes}}
    with ExitStack() as undo:
        for alias, name in names.items():
            place = place_of(model, alias)
            assert place is not None, "it is on disk"
            undo.callback(setattr, place.hook, "weights_map", place.hook.weights_map)
            place.hook.weights_map = WeightsView(place.hook.weights_map, {place.key: changes[name]})
        yield
