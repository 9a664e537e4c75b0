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

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from tqdm.auto import tqdm

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.model.fsdp import resharded
from gradprobe_hf.model.parameters import is_offloaded
from gradprobe_hf.model.passes.block_cache import BlockOutputCache
from gradprobe_hf.model.passes.routing import routed
from gradprobe_hf.model.sites import Site
from gradprobe_hf.model.targets import Target, block_biases, block_vectors
from gradprobe_hf.probe.maps.attachment import blocks_in_order, instrumented, serving
from gradprobe_hf.probe.maps.serving import ServedWeights
from gradprobe_hf.reconstruction.block_matching import (
    BlockExamples,
    Matched,
    Matching,
    in_step_sizes,
    match_block,
)
from gradprobe_hf.reconstruction.hessians import BlockHessians
from gradprobe_hf.reconstruction.new_weights import NewWeights
from gradprobe_hf.reconstruction.silenced_blocks import silent_biases
from gradprobe_hf.reconstruction.solve import masked_block, solve_block
from gradprobe_hf.reconstruction.steps import Step, own_steps
from gradprobe_hf.reconstruction.task import FinishedBlock, Reconstruction
from gradprobe_hf.runtime.stopwatch import return_free_memory
from gradprobe_hf.selection.packed_masks import PackedMasks


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
    """Forward passes over the calibration data: each block for H, for what it hands on, and maybe as it was.

    A block that is trained and loses experts is run once more, with all of them on what it is given.
    """
    again = config.refines and config.drops_experts
    return (3 if config.dense_target or config.refinement_row.dense_target else 2) + again


@torch.no_grad()
def reconstruct(task: Reconstruction) -> Reconstructed:
    """New weights of every target; the model is left as it was, and all processes get the same.

    Raises:
        ValueError: blocks that cannot be run one after the other, or inputs that are not finite.
    """
    model, work = task.work.model, task.work
    config, refinement = task.config, task.config.refinement_row
    batches = in_step_sizes(work.batches, refinement) if config.refines else work.batches
    steps = own_steps(task, batches)
    own = [step.batch for step in steps]
    with resharded(model):
        blocks = blocks_in_order(model, task.targets, batches)
    pruned = BlockOutputCache(model, own, blocks)
    dense = BlockOutputCache(model, own, blocks) if config.dense_target or refinement.dense_target else None
    walk = _Walk(task, steps, pruned, dense)
    found = Reconstructed(PackedMasks(), NewWeights(task.folder, on_disk=is_offloaded(model)), {})
    finished = iter(task.finished)
    bar = tqdm(blocks.names, desc="reconstruction", unit="block", disable=not work.progress, leave=False)
    for number, block in enumerate(bar):
        inside = [target for target in task.targets if target.block == block]
        before = next(finished, None)
        if before is not None or block in task.silenced:
            made = _silent(task, block, inside) if before is None else before
            if dense is not None:
                # Through the same maps as when it was collected, so that its outputs have the same bits.
                with instrumented(model, inside, ServedWeights()):
                    dense.advance([block])
        else:
            made = walk.made(block, inside)
            return_free_memory()
        if before is None and task.after_block is not None:
            task.after_block(number, made)
        given = {vector.name: vector for vector in (*block_vectors(model, block), *block_biases(model, block))}
        vectors = [given[name] for name in made.vectors]
        work.processes.in_all(partial(found.take, block, made, vectors))  # each has a disk of its own
        del made, before
        # Routers first: vectors of theirs are served around what is put there.
        with routed(model, task.routes), serving(model, [*inside, *vectors], {}, new_weights=found.new_weights):
            pruned.advance([block])
    return found


@dataclass(frozen=True)
class _Walk:
    """From block to block.

    Attributes:
        steps: this process's batches.
        pruned: what the blocks so far hand on in the model as pruned.
        dense: the same in the dense model, where that runs beside.
    """

    task: Reconstruction
    steps: Sequence[Step]
    pruned: BlockOutputCache
    dense: BlockOutputCache | None

    def made(self, block: str, inside: Sequence[Target]) -> FinishedBlock:
        """A block's matrices updated, then the whole of it trained, as far as either is asked for."""
        task = self.task
        collected = BlockHessians(task.work.model, task.work.processes, has_drift=bool(task.config.dense_target))
        examples = BlockExamples(task.work.model, block, task.config.refinement_row.dense_target)
        self._collect(block, inside, collected, examples)
        made = solve_block(task, inside, collected)
        del collected  # the Hessians: training has use for the memory
        return _refined(task, block, inside, examples, made) if task.config.refines else made

    def _collect(self, block: str, inside: Sequence[Target], collected: BlockHessians, examples: BlockExamples) -> None:
        """The inputs of a block's matrices in the model as pruned so far, and in the dense one; that is then past it.

        Where blocks are trained, what the whole block is called with and should return, too.
        """
        model, config, dense = self.task.work.model, self.task.config, self.dense
        left, is_collecting = [], True
        has_routes = any(router.startswith(f"{block}.") for router in self.task.routes)

        def add(target: Target, site: Site, inputs: Tensor) -> None:
            if is_collecting:
                collected.add(target, site, inputs)

        with ExitStack() as stack:
            on_input = add if config.updates else None
            stack.enter_context(resharded(model))
            stack.enter_context(instrumented(model, inside, ServedWeights(), on_input=on_input))
            if config.refines:
                stack.enter_context(examples.recording())
            for number, step in enumerate(self.steps):
                with collected.batch(step.batch, counts=step.counts, held_rows=step.held_rows):
                    if dense is not None:
                        with collected.dense_pass():
                            left.append(dense.run(number, block))
                        if config.refines:
                            examples.take_dense()
                    with routed(model, self.task.routes):
                        self.pruned.run(number, block)
                if config.refines:
                    if has_routes:  # what is recorded is the block as it was, with all its experts
                        is_collecting = False
                        self.pruned.run(number, block)
                        is_collecting = True
                    examples.take(step.batch)
        if dense is not None:
            dense.finish([block], left)


def _silent(task: Reconstruction, block: str, inside: Sequence[Target]) -> FinishedBlock:
    """A block of which nothing is left."""
    return replace(masked_block(task, inside), vectors=silent_biases(task.work.model, block))


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
    with routed(task.work.model, task.routes), torch.enable_grad():
        values, vectors, matched = match_block(matching, made.new_weights, made.masks)
    return replace(made, new_weights=values, vectors=vectors, matched=matched)
