"""Reconstruction: the kept weights of each matrix make up for those that go, block by block.

Each block sees the calibration text as the model pruned and reconstructed so far hands it on, `x`, `[tokens, in]`.
What is collected for a matrix is in `hessians.py`; only one block's are there at a time. Its weight update then keeps
the outputs `W x`.

The blocks before have not kept theirs exactly, so `W x` is not what the dense model computes, `W x'`. The least-squares
weights for the dense outputs are `W + W D (H + damping)^-1`; what is kept are outputs a share, `dense_target`, of the
way to those. All of the way does worse than none: every matrix of a block then makes up for the same error of the
residual stream. (GPTAQ, arXiv:2504.02692, calibrates quantisation so.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.model.block_cache import BlockOutputCache, BlockSequence
from gradprobe_hf.model.fsdp import is_sharded, resharded
from gradprobe_hf.model.parameters import is_offloaded
from gradprobe_hf.model.targets import Target
from gradprobe_hf.probe.attachment import instrumented, serving
from gradprobe_hf.probe.engine import Workload
from gradprobe_hf.probe.serving import ServedWeights
from gradprobe_hf.probe.steps import own_steps
from gradprobe_hf.reconstruction.block_matching import (
    BlockExamples,
    Matched,
    Matching,
    block_vectors,
    in_step_sizes,
    match_block,
)
from gradprobe_hf.reconstruction.hessians import BlockHessians
from gradprobe_hf.reconstruction.new_weights import NewWeights
from gradprobe_hf.reconstruction.silenced_blocks import silent_biases
from gradprobe_hf.runtime.stopwatch import return_free_memory
from gradprobe_hf.selection.packed_masks import PackedMasks, pack, unpack
from gradprobe_hf.updates.problem import MatrixProblem


@dataclass(frozen=True)
class FinishedBlock:
    """One block's result.

    Attributes:
        new_weights: of each matrix, `[out, in]`.
        masks: of the weights that are zero.
        damping: where more than was asked for was needed, by matrix.
        vectors: gains and biases that were trained, by parameter.
        matched: how the training of the block went, if it was trained.
    """

    new_weights: Mapping[str, Tensor]
    masks: PackedMasks
    damping: dict[str, float]
    vectors: Mapping[str, Tensor] = field(default_factory=dict)
    matched: Matched | None = None


@dataclass(frozen=True)
class Reconstruction:
    """What is to be reconstructed.

    Attributes:
        masks: which weights go; None: the weight update chooses them.
        row_fisher: of each matrix, the mean Fisher information of the weights of a row, `[out]`, where it is known.
        folder: for the new weights of a model that is offloaded.
        finished: blocks that an earlier run has finished, in their order.
        after_block: called with every further one and its number.
        silenced: blocks that go whole: nothing in them is left to change.
    """

    work: Workload
    targets: Sequence[Target]
    config: GradProbeConfig
    masks: PackedMasks | None
    row_fisher: Mapping[str, Sequence[float]] = field(default_factory=dict)
    folder: Path | None = None
    finished: Sequence[FinishedBlock] = ()
    after_block: Callable[[int, FinishedBlock], None] | None = None
    silenced: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Reconstructed:
    """Attributes: `masks` of the weights that are zero; `new_weights` of every matrix and of the vectors that were
    trained; `damping` where more than was asked for was needed, by matrix; `matched`: how training went, by block."""

    masks: PackedMasks
    new_weights: NewWeights
    damping: dict[str, float]
    matched: dict[str, Matched] = field(default_factory=dict)

    def take(self, name: str, block: FinishedBlock, vectors: Sequence[Target]) -> None:
        for matrix, values in block.new_weights.items():
            self.new_weights.add(matrix, values)
            self.masks.add_packed(matrix, block.masks.packed(matrix), block.masks.columns(matrix))
        self.damping.update(block.damping)
        for vector in vectors:
            self.new_weights.add_vector(vector, block.vectors[vector.name])
        if block.matched is not None:
            self.matched[name] = block.matched


def reconstruction_passes(config: GradProbeConfig) -> int:
    """Forward passes over the calibration data: each block for H, for what it hands on, and maybe as it was."""
    return 3 if config.dense_target or config.refinement_row.dense_target else 2


@torch.no_grad()
def reconstruct(task: Reconstruction) -> Reconstructed:
    """New weights of every target; the model is left as it was, and all processes get the same.

    Raises:
        ValueError: blocks that cannot be run one after the other, or inputs that are not finite.
    """
    model, work = task.work.model, task.work
    config, refinement = task.config, task.config.refinement_row
    batches = in_step_sizes(work.batches, refinement) if config.refines else work.batches
    steps = own_steps(model, task.targets, batches, work.processes)
    own = [batch for batch, _ in steps]
    with resharded(model):
        blocks = BlockSequence.of(model, task.targets, own[0])
    pruned = BlockOutputCache(model, own, blocks)
    dense = BlockOutputCache(model, own, blocks) if config.dense_target or refinement.dense_target else None
    found = Reconstructed(PackedMasks(), NewWeights(task.folder, on_disk=is_offloaded(model)), {})
    bar = tqdm(blocks.names, desc="reconstruction", unit="block", disable=not work.progress, leave=False)
    for number, block in enumerate(bar):
        inside = [target for target in task.targets if target.block == block]
        is_finished = number < len(task.finished)
        if is_finished or block in task.silenced:
            made = task.finished[number] if is_finished else _silent(task, block, inside)
            if dense is not None:
                # Through the same maps as when it was collected, so that its outputs have the same bits.
                with instrumented(model, inside, ServedWeights()):
                    dense.advance([block])
        else:
            made = _made(task, block, inside, pruned, dense, [counts for _, counts in steps])
            return_free_memory()
        if not is_finished and task.after_block is not None:
            task.after_block(number, made)
        vectors = [vector for vector in block_vectors(model, block) if vector.name in made.vectors]
        found.take(block, made, vectors)
        del made
        with serving(model, [*inside, *vectors], {}, new_weights=found.new_weights):
            pruned.advance([block])
    return found


def _made(
    task: Reconstruction,
    block: str,
    inside: Sequence[Target],
    pruned: BlockOutputCache,
    dense: BlockOutputCache | None,
    counted: Sequence[bool],
) -> FinishedBlock:
    """A block's matrices updated, then the whole of it trained, as far as either is asked for."""
    collected, examples = _collect(task, block, inside, pruned, dense, counted)
    made = _solve(task, inside, collected)
    del collected  # the Hessians: training has use for the memory
    return _refined(task, block, inside, examples, made) if task.config.refines else made


def _collect(
    task: Reconstruction,
    block: str,
    inside: Sequence[Target],
    pruned: BlockOutputCache,
    dense: BlockOutputCache | None,
    counted: Sequence[bool],
) -> tuple[BlockHessians, BlockExamples]:
    """The inputs of a block's matrices in the model as pruned so far, and in the dense one; that is then past it.

    Where blocks are trained, what the whole block is called with and should return, too.

    Args:
        counted: whether each batch counts; one that does not only keeps other processes company.
    """
    model, config = task.work.model, task.config
    collected = BlockHessians(model, task.work.processes, has_drift=bool(config.dense_target))
    examples = BlockExamples(model, block, config.refinement_row.dense_target)
    left = []
    with ExitStack() as stack:
        on_input = collected.add if config.updates else None
        stack.enter_context(resharded(model))
        stack.enter_context(instrumented(model, inside, ServedWeights(), on_input=on_input))
        if config.refines:
            stack.enter_context(examples.recording())
        for number, counts in enumerate(counted):
            collected.counts = counts
            if dense is not None:
                with collected.as_dense():
                    left.append(dense.run(number, block, collected.start_batch))
                if config.refines:
                    examples.take_dense()
            pruned.run(number, block, collected.start_batch)
            if config.refines:
                examples.take(pruned.batches[number])
    if dense is not None:
        dense.finish([block], left)
    return collected, examples


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


def _solve(task: Reconstruction, inside: Sequence[Target], collected: BlockHessians) -> FinishedBlock:
    """The weight update of each matrix of a block: every process makes its share, and all get the whole."""
    if task.config.update_row.function is None:
        return _masked(task, inside)
    processes = task.work.processes
    model, sharded = task.work.model, is_sharded(task.work.model)
    owners = processes.shares([target.shape[0] * target.shape[1] ** 2 for target in inside])
    given = {}
    # All sums before the first update: a process that is at work keeps the others waiting in their next sum.
    for target, owner in zip(inside, owners, strict=True):
        found = collected.of(target), _gathered(task, target) if sharded else None
        if owner == processes.rank:
            given[target.name] = found
    own = {target.name: _updated(task, target, *given.pop(target.name)) for target in inside if target.name in given}
    dampings = {name: made.damping for name, made in own.items() if made.damping > task.config.damping}
    made, values = FinishedBlock({}, PackedMasks(), {}), {}
    for target, owner in zip(inside, owners, strict=True):
        one = own.pop(target.name, None) or _NewMatrix.empty(target, model)
        whole, mask = processes.send_(one.values, owner), processes.send_(one.mask, owner)
        if sharded:
            values[target.name] = target.own_part(model, whole)
            made.masks.add(target.name, [target.own_part(model, unpack(mask, target.shape[1]))])
        else:
            values[target.name] = whole
            made.masks.add_packed(target.name, mask, target.shape[1])
    for more in processes.gather(dampings):
        made.damping.update(more)
    return FinishedBlock(values, made.masks, made.damping)


def _here(task: Reconstruction, target: Target) -> tuple[Tensor, Tensor | None]:
    """A matrix as it is stored, or this process's part of it, and of its mask, if that is known."""
    stored = target.matrix(task.work.model)
    return stored, None if task.masks is None else task.masks[target.name].to(stored.device)


def _gathered(task: Reconstruction, target: Target) -> tuple[Tensor, Tensor | None]:
    """The whole of a matrix that FSDP2 shards, and of its mask. Collectives."""
    model = task.work.model
    stored, mask = _here(task, target)
    return target.gathered(model, stored), None if mask is None else target.gathered(model, mask)


def _updated(
    task: Reconstruction,
    target: Target,
    sums: tuple[Tensor, Tensor | None],
    whole: tuple[Tensor, Tensor | None] | None,
) -> _NewMatrix:
    """The weight update of a matrix.

    Args:
        sums: H and D, of all processes.
        whole: the matrix and its mask, where this process has them in part.
    """
    config, solve = task.config, task.config.update_row.function
    assert solve is not None, "there is something to reconstruct"
    (hessian, drift), (stored, mask) = sums, whole or _here(task, target)
    weight = stored.to(hessian.device, hessian.dtype)
    fisher = task.row_fisher.get(target.name)
    problem = MatrixProblem(
        weight,
        hessian,
        drift,
        config.dense_target or 0.0,
        config.damping,
        config.budget_of(config.final_sparsity),
        None if fisher is None else torch.tensor(fisher, dtype=weight.dtype, device=weight.device),
    )
    solution = solve(problem, None if mask is None else mask.to(weight.device))
    values = solution.values.to(stored.device, stored.dtype).contiguous()
    return _NewMatrix(values, pack(solution.mask), solution.damping)


def _masked(task: Reconstruction, inside: Sequence[Target]) -> FinishedBlock:
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


def _silent(task: Reconstruction, block: str, inside: Sequence[Target]) -> FinishedBlock:
    """A block of which nothing is left."""
    return replace(_masked(task, inside), vectors=silent_biases(task.work.model, block))


def _refined(
    task: Reconstruction, block: str, inside: Sequence[Target], examples: BlockExamples, made: FinishedBlock
) -> FinishedBlock:
    """A block trained as a whole."""
    matching = Matching(
        task.work.model,
        block,
        inside,
        examples.examples,
        task.config.refinement_row,
        task.work.processes,
        task.config.seed,
    )
    with torch.enable_grad():
        values, vectors, matched = match_block(matching, made.new_weights, made.masks)
    return replace(made, new_weights=values, vectors=vectors, matched=matched)
