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
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.model.block_cache import BlockOutputCache, BlockSequence
from gradprobe_hf.model.parameters import is_offloaded
from gradprobe_hf.model.targets import Target
from gradprobe_hf.probe.attachment import instrumented
from gradprobe_hf.probe.engine import Workload
from gradprobe_hf.probe.serving import ServedWeights
from gradprobe_hf.probe.steps import own_steps
from gradprobe_hf.reconstruction.hessians import BlockHessians
from gradprobe_hf.reconstruction.new_weights import NewWeights
from gradprobe_hf.runtime.stopwatch import return_free_memory
from gradprobe_hf.selection.packed_masks import PackedMasks
from gradprobe_hf.updates.problem import MatrixProblem


@dataclass(frozen=True)
class FinishedBlock:
    """One block's result.

    Attributes:
        new_weights: of each matrix, `[out, in]`.
        masks: of the weights that are zero.
        damping: where more than was asked for was needed, by matrix.
    """

    new_weights: Mapping[str, Tensor]
    masks: PackedMasks
    damping: dict[str, float]


@dataclass(frozen=True)
class Reconstruction:
    """What is to be reconstructed.

    Attributes:
        masks: which weights go; None: the weight update chooses them.
        row_fisher: of each matrix, the mean Fisher information of the weights of a row, `[out]`, where it is known.
        folder: for the new weights of a model that is offloaded.
        finished: blocks that an earlier run has finished, in their order.
        after_block: called with every further one and its number.
    """

    work: Workload
    targets: Sequence[Target]
    config: GradProbeConfig
    masks: PackedMasks | None
    row_fisher: Mapping[str, Sequence[float]] = field(default_factory=dict)
    folder: Path | None = None
    finished: Sequence[FinishedBlock] = ()
    after_block: Callable[[int, FinishedBlock], None] | None = None


@dataclass(frozen=True)
class Reconstructed:
    """Attributes: `masks` of the weights that are zero; `new_weights` of every matrix; `damping` where more than was
    asked for was needed, by matrix."""

    masks: PackedMasks
    new_weights: NewWeights
    damping: dict[str, float]

    def take(self, block: FinishedBlock) -> None:
        for name, values in block.new_weights.items():
            self.new_weights.add(name, values)
            self.masks.add_packed(name, block.masks.packed(name), block.masks.columns(name))
        self.damping.update(block.damping)


def reconstruction_passes(config: GradProbeConfig) -> int:
    """Forward passes over the calibration data: each block for H, for what it hands on, and maybe as it was."""
    return 3 if config.dense_target else 2


@torch.no_grad()
def reconstruct(task: Reconstruction) -> Reconstructed:
    """New weights of every target; the model is left as it was, and all processes get the same.

    Raises:
        ValueError: blocks that cannot be run one after the other, or inputs that are not finite.
    """
    model, work = task.work.model, task.work
    own = [batch for batch, _ in own_steps(model, task.targets, work.batches, work.processes)]
    blocks = BlockSequence.of(model, task.targets, own[0])
    pruned = BlockOutputCache(model, own, blocks)
    dense = BlockOutputCache(model, own, blocks) if task.config.dense_target else None
    found = Reconstructed(PackedMasks(), NewWeights(task.folder, on_disk=is_offloaded(model)), {})
    bar = tqdm(blocks.names, desc="reconstruction", unit="block", disable=not work.progress, leave=False)
    for number, block in enumerate(bar):
        inside = [target for target in task.targets if target.block == block]
        if number < len(task.finished):
            made = task.finished[number]
            if dense is not None:
                # Through the same maps as when it was collected, so that its outputs have the same bits.
                with instrumented(model, inside, ServedWeights()):
                    dense.advance([block])
        else:
            collected = _collect(task, block, inside, pruned, dense)
            made = _solve(task, inside, collected)
            del collected
            return_free_memory()
            if task.after_block is not None:
                task.after_block(number, made)
        found.take(made)
        del made
        with instrumented(model, inside, ServedWeights(new_weights=found.new_weights)):
            pruned.advance([block])
    return found


def _collect(
    task: Reconstruction,
    block: str,
    inside: Sequence[Target],
    pruned: BlockOutputCache,
    dense: BlockOutputCache | None,
) -> BlockHessians:
    """The inputs of a block's matrices in the model as pruned so far, and in the dense one; that is then past it."""
    collected = BlockHessians(task.work.model, task.work.processes, has_drift=dense is not None)
    left = []
    with instrumented(task.work.model, inside, ServedWeights(), on_input=collected.add):
        for number in range(len(pruned.batches)):
            if dense is not None:
                with collected.as_dense():
                    left.append(dense.run(number, block, collected.start_batch))
            pruned.run(number, block, collected.start_batch)
    if dense is not None:
        dense.finish([block], left)
    return collected


def _solve(task: Reconstruction, inside: Sequence[Target], collected: BlockHessians) -> FinishedBlock:
    """The weight update of each matrix of a block."""
    config, solve = task.config, task.config.update_row.function
    assert solve is not None, "there is something to reconstruct"
    made = FinishedBlock({}, PackedMasks(), {})
    values: dict[str, Tensor] = {}
    for target in inside:
        hessian, drift = collected.of(target)
        stored = target.matrix(task.work.model)
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
        mask = None if task.masks is None else task.masks[target.name].to(weight.device)
        solution = solve(problem, mask)
        values[target.name] = solution.values.to(stored.device, stored.dtype)
        made.masks.add(target.name, [solution.mask])
        if solution.damping > config.damping:
            made.damping[target.name] = solution.damping
    return FinishedBlock(values, made.masks, made.damping)
