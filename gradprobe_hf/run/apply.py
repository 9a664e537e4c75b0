"""Apply: write a pruning decision into the model at the very end, and take it back if anything after it fails.

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

from gradprobe_hf.model.files.offload_store import replace_on_disk
from gradprobe_hf.model.fsdp import reshard
from gradprobe_hf.model.parameters import WeightsView, aliases, is_on_disk, offloaded_parameter, unload_leftovers
from gradprobe_hf.model.passes.routing import routed
from gradprobe_hf.model.targets import Target
from gradprobe_hf.reconstruction.new_weights import NewWeights
from gradprobe_hf.runtime.interrupts import uninterrupted
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.runtime.row_chunks import row_chunks
from gradprobe_hf.selection.masked_values import SavedValues
from gradprobe_hf.selection.packed_masks import rows_of

Change = Callable[[Tensor], Tensor]
_LOST = "_gradprobe_lost_structures"  # an attribute of a model in memory that did


def mark_smaller(model: nn.Module) -> None:
    """Note that whole structures of a model are zero now, and gone in its files alone."""
    setattr(model, _LOST, True)


def is_smaller(model: nn.Module) -> bool:
    """Whether that was noted of it."""
    return getattr(model, _LOST, False)


def check_whole(model: nn.Module) -> None:
    """Raise ValueError for a model that has lost whole structures in memory: it would be taken for a dense one."""
    # Its zeros would go once more, or be trained, and its routers be written as they were before.
    if is_smaller(model):
        raise ValueError(
            f"this {type(model).__name__} has lost whole structures, and is smaller once it is saved: save the result "
            "(save_pretrained), and go on from the checkpoint."
        )


def check_still_zero(model: nn.Module, targets: Sequence[Target], masks: Mapping[str, Tensor]) -> None:
    """Raise ValueError where structures that are to be cut out of a model are zero no more: it was trained meanwhile.

    To cut them out would write another model than the one in memory.
    """
    if not getattr(model, _LOST, False):
        return
    for target in targets:
        if not is_on_disk(model, target.parameter):
            matrix = target.matrix(model)
            if bool(matrix.masked_select(masks[target.name].to(matrix.device)).any()):
                raise ValueError(
                    f"{target.name} is zero no more where whole structures went: the model was changed after it was "
                    "pruned, and without them it would be another. Save the result first, and train the checkpoint."
                )


@contextmanager
def applied(
    model: nn.Module,
    targets: Sequence[Target],
    masks: Mapping[str, Tensor],
    keep: bool = True,
    new_weights: NewWeights | None = None,
    routes: Mapping[str, Tensor] | None = None,
    processes: Processes | None = None,
) -> Iterator[None]:
    """Zero the masked weights, and write the new ones, for the body of the `with`.

    They stay if `keep` is set and the body returns; `new_weights` is then empty. If the body raises or is interrupted,
    every weight gets its original bits back: the originals of pruned weights in memory are kept until then, and new
    weights change places with what they replace.

    Args:
        routes: name of a router -> which of its experts go, bool `[experts]`: they are sent no token any more.
        processes: that all are in this call with `keep`: what one cannot keep, none does. Default: this one alone.

    Raises:
        OSError: the store of offloaded weights cannot be written; every weight has its original bits again.
    """
    unload_leftovers(model)
    new_weights = NewWeights() if new_weights is None else new_weights
    targets = [*targets, *new_weights.vectors]
    in_memory = [target for target in targets if not is_on_disk(model, target.parameter)]
    changes = _changes([target for target in targets if is_on_disk(model, target.parameter)], masks, new_weights)
    pending = new_weights.pending  # without those that a `with` around this one has written
    with (
        _exchanged(model, [target for target in in_memory if target.name in pending], new_weights, keep),
        _zeroed(model, [target for target in in_memory if target.name not in new_weights], masks, keep),
    ):
        with _read_through(model, changes), routed(model, routes or {}, keep):
            yield
        if keep:
            replace_on_disk(model, changes, processes)
    if keep:
        new_weights.clear()


@contextmanager
def replaced(model: nn.Module, parameters: NewWeights, keep: bool = True) -> Iterator[None]:
    """Whole parameters change places with new values for the body of the `with`; what `applied` is for masks.

    They stay if `keep` is set and the body returns; `parameters` is then empty.

    Args:
        parameters: parameter name -> its new values, of a model in memory.
    """
    mine, keeping = parameters.pending, False  # without those that a `with` around this one has written
    try:
        with torch.no_grad():
            for name in mine:
                parameters.install(name, model.get_parameter(name).data)
        yield
        keeping = keep
    finally:
        if not keeping:
            with uninterrupted(), torch.no_grad():
                for name in mine:
                    parameters.withdraw(name, model.get_parameter(name).data)
    if keep:
        parameters.clear()


@contextmanager
def _exchanged(model: nn.Module, targets: Sequence[Target], new_weights: NewWeights, keep: bool) -> Iterator[None]:
    reshard(model)  # as in `_zeroed`
    keeping = False
    try:
        with torch.no_grad():
            for target in targets:
                new_weights.install(target.name, target.matrix(model))
        yield
        keeping = keep
    finally:
        if not keeping:
            with uninterrupted(), torch.no_grad():
                for target in reversed(targets):
                    new_weights.withdraw(target.name, target.matrix(model))


@contextmanager
def _zeroed(model: nn.Module, targets: Sequence[Target], masks: Mapping[str, Tensor], keep: bool) -> Iterator[None]:
    reshard(model)  # a whole weight that is still there would hide what its shard is given
    originals = SavedValues({target.name: target.matrix(model) for target in targets}, masks)
    keeping = False
    try:
        with torch.no_grad():
            for target in targets:
                matrix = target.matrix(model)
                matrix.masked_fill_(masks[target.name].to(matrix.device), 0)
        yield
        keeping = keep
    finally:
        if not keeping:
            with uninterrupted(), torch.no_grad():
                reshard(model)
                originals.restore()


def _changes(targets: Sequence[Target], masks: Mapping[str, Tensor], new_weights: NewWeights) -> dict[str, Change]:
    """Parameter name -> what gives its new values; the slices of a fused parameter are one change."""
    by_parameter: dict[str, list[Target]] = {}
    for target in targets:
        by_parameter.setdefault(target.parameter, []).append(target)
    return {name: partial(_changed, same, masks, new_weights) for name, same in by_parameter.items()}


def _changed(targets: Sequence[Target], masks: Mapping[str, Tensor], new_weights: NewWeights, stored: Tensor) -> Tensor:
    changed = stored.detach().clone()
    for target in targets:
        matrix = target.view(changed)
        if target.name in new_weights:
            matrix.copy_(new_weights[target.name])
            continue
        for rows in row_chunks(target.shape):
            matrix[rows].masked_fill_(rows_of(masks, target.name, rows).to(matrix.device), 0)
    return changed


@contextmanager
def _read_through(model: nn.Module, changes: Mapping[str, Change]) -> Iterator[None]:
    """Whatever reads these parameters from Accelerate's hooks reads them changed."""
    names = {**{name: name for name in changes}, **{a: name for a, name in aliases(model).items() if name in changes}}
    with ExitStack() as undo:
        for alias, name in names.items():
            offloaded = offloaded_parameter(model, alias)
            assert offloaded is not None, "it is on disk"
            undo.callback(setattr, offloaded.hook, "weights_map", offloaded.hook.weights_map)
            offloaded.hook.weights_map = WeightsView(offloaded.hook.weights_map, {offloaded.key: changes[name]})
        yield
