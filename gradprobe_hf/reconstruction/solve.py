"""The weight update of each matrix of a block, given what was collected of its inputs.

Processes share the matrices: each is updated by one of them, and all get the result. A matrix that FSDP2 shards is
gathered for that, one block's at a time, and every process keeps its shard of the new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gradprobe_hf.model.fsdp import is_sharded
from gradprobe_hf.model.targets import Target
from gradprobe_hf.reconstruction.hessians import BlockHessians
from gradprobe_hf.reconstruction.task import FinishedBlock, Reconstruction
from gradprobe_hf.selection.packed_masks import PackedMasks, pack, unpack
from gradprobe_hf.updates.problem import InputSums, MatrixProblem


@dataclass(frozen=True)
class _NewMatrix:
    """Attributes: its `values [out, in]` as they are stored, its `mask` packed, and the `damping` that it took."""

    values: Tensor
    mask: Tensor
    damping: float

    @classmethod
    def empty(cls, target: Target, model: PreTrainedModel) -> _NewMatrix:
        """Room for what another process has made."""
        stored = target.matrix(model)
        values = torch.empty(target.shape, dtype=stored.dtype, device=stored.device)
        return cls(values, pack(torch.zeros_like(values, dtype=torch.bool)), 0.0)


def solve_block(task: Reconstruction, inside: Sequence[Target], collected: BlockHessians) -> FinishedBlock:
    """The weight update of each matrix of a block: every process makes its share, and all get the whole."""
    if task.config.update_row.function is None:
        return masked_block(task, inside)
    processes = task.work.processes
    model, sharded = task.work.model, is_sharded(task.work.model)
    owners = processes.shares([target.shape[0] * target.shape[1] ** 2 for target in inside])
    given: dict[str, _Given] = {}
    # All sums before the first update: a process that is at work keeps the others waiting in their next sum.
    for target, owner in zip(inside, owners, strict=True):
        held = collected.held_out(target) if task.config.holds_out else None
        found = _Given(collected.of(target), held, _gathered(task, target) if sharded else None)
        if owner == processes.rank:
            given[target.name] = found
    own = {target.name: _updated(task, target, given.pop(target.name)) for target in inside if target.name in given}
    dampings = {name: made.damping for name, made in own.items() if made.damping > task.config.fixed_damping}
    made, values = FinishedBlock({}, PackedMasks(), {}), {}
    for target, owner in zip(inside, owners, strict=True):
        one = own.pop(target.name, None) or _NewMatrix.empty(target, model)
        whole, mask = processes.send_(one.values, owner), processes.send_(one.mask, owner)
        _check_finite(whole, target)  # of the whole: all processes raise, or none
        if sharded:
            values[target.name] = target.own_part(model, whole)
            made.masks.add(target.name, [target.own_part(model, unpack(mask, target.shape[1]))])
        else:
            values[target.name] = whole
            made.masks.add_packed(target.name, mask, target.shape[1])
    for more in processes.gather(dampings):
        made.damping.update(more)
    return FinishedBlock(values, made.masks, made.damping)


def _check_finite(values: Tensor, target: Target) -> None:
    if not torch.isfinite(values).all():
        raise ValueError(
            f"the new weights of {target.name} are not finite: look for NaN and infinite values in the weights that it "
            "has, or a dtype that overflows (float16: try bfloat16). Nothing was changed."
        )


@dataclass(frozen=True)
class _Stored:
    """A matrix in the type in which it is stored, `[out, in]`, and its `mask`, bool; None: the update chooses that."""

    matrix: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class _Given:
    """What the update of one matrix is made from.

    Attributes:
        sums: H and D, of all processes.
        held_out: of these what is of the rows that the damping is chosen by, if it is chosen.
        whole: the matrix and its mask, where this process has them in part.
    """

    sums: InputSums
    held_out: InputSums | None
    whole: _Stored | None


def _here(task: Reconstruction, target: Target) -> _Stored:
    """A matrix and its mask, or this process's part of them."""
    matrix = target.matrix(task.work.model)
    return _Stored(matrix, None if task.masks is None else task.masks[target.name].to(matrix.device))


def _gathered(task: Reconstruction, target: Target) -> _Stored:
    """The whole of a matrix that FSDP2 shards, and of its mask. Collectives."""
    model, part = task.work.model, _here(task, target)
    whole = target.gathered(model, part.matrix)
    return _Stored(whole, None if part.mask is None else target.gathered(model, part.mask))


def _updated(task: Reconstruction, target: Target, given: _Given) -> _NewMatrix:
    """The weight update of a matrix."""
    config, solve = task.config, task.config.update_row.function
    assert solve is not None, "there is something to reconstruct"
    hessian, stored = given.sums.hessian, given.whole or _here(task, target)
    weight = stored.matrix.to(hessian.device, hessian.dtype)
    fisher = task.row_fisher.get(target.name)
    problem = MatrixProblem(
        weight=weight,
        hessian=hessian,
        drift=given.sums.drift,
        dense_target=config.dense_target or 0.0,
        damping=config.fixed_damping,
        budget=config.budget_of(config.final_sparsity),
        row_fisher=None if fisher is None else torch.tensor(fisher, dtype=weight.dtype, device=weight.device),
        held_out=given.held_out,
        tokens=given.sums.tokens,
    )
    solution = solve(problem, None if stored.mask is None else stored.mask.to(weight.device))
    values = solution.values.to(stored.matrix.device, stored.matrix.dtype).contiguous()
    return _NewMatrix(values, pack(solution.mask), solution.damping)


def masked_block(task: Reconstruction, inside: Sequence[Target]) -> FinishedBlock:
    """The matrices of a block with zeros, and nothing else changed."""
    assert task.masks is not None, "no weight update chooses them"
    made = FinishedBlock({}, PackedMasks(), {})
    values = {}
    for target in inside:
        stored = target.matrix(task.work.model)
        mask = task.masks[target.name].to(stored.device)
        values[target.name] = stored.masked_fill(mask, 0)
        made.masks.add(target.name, [mask])
    return replace(made, new_weights=values)
