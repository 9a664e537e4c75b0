"""The sequential order: blocks are decided one step after the other, each probed on the model as pruned so far.

Candidates are chosen once, for all blocks, on the model as it is. In forward order a step starts from what the blocks
before it have left (`BlockOutputCache`), and in every order its backward stops at its first block; so `blocks x 2`
probes cost about as much as half as many whole ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradprobe_hf.config.values import BlockOrder
from gradprobe_hf.model.passes.block_cache import BlockOutputCache
from gradprobe_hf.model.targets import Target
from gradprobe_hf.probe.maps.attachment import blocks_in_order, instrumented
from gradprobe_hf.probe.maps.serving import ServedWeights
from gradprobe_hf.probe.steps import own_steps
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.run.diagnostics import Diagnostics
from gradprobe_hf.run.probing.probe_pair import Position, ProbePair
from gradprobe_hf.run.probing.probe_state import begun_in, known_masks
from gradprobe_hf.selection.packed_masks import PackedMasks


def decide_in_order(context: RunContext, diagnostics: Diagnostics) -> PackedMasks:
    """The masks of all steps.

    Raises:
        ValueError: blocks that a pass does not run one after the other.
    """
    model, config = context.model, context.config
    own = [batch for batch, _ in own_steps(model, context.targets, context.calibration, context.processes)]
    sequence = blocks_in_order(model, context.targets, context.calibration)
    order = sequence.names
    begun = begun_in(context.snapshots)
    decided, candidates = PackedMasks(), None
    if begun is not None and begun.pair > 0 and context.snapshots is not None:
        decided, candidates = known_masks(context.snapshots.read(begun.step))
    if candidates is None:
        alone = replace(context, config=config.score_alone())
        candidates = ProbePair(alone, context.targets, diagnostics, Position(begun=begun)).run(config.final_sparsity)
    cache = BlockOutputCache(model, own, sequence) if config.block_order == "forward" else None
    portions = steps(order, context.targets, config.block_order, config.blocks_per_step)
    for number, blocks in enumerate(portions, start=1):
        inside = [target for target in context.targets if target.block in blocks]
        if begun is None or begun.pair <= number:
            at = Position(
                number,
                served=decided,
                candidates=candidates,
                begun=begun,
                cache=cache,
                depth=1 - min(order.index(block) for block in blocks) / len(order),
                label=f"step {number} of {len(portions)}, ",
            )
            pair = ProbePair(context, inside, diagnostics, at)
            decided = decided.replaced_by(pair.run(config.final_sparsity))
        if cache is not None:
            with instrumented(model, inside, ServedWeights(decided)):
                cache.advance(blocks)
            diagnostics.count("forward", len(blocks) / len(order))
    found = PackedMasks()
    for target in context.targets:
        found.add_packed(target.name, decided.packed(target.name), decided.columns(target.name))
    return found


def steps(order: Sequence[str], targets: Sequence[Target], by: BlockOrder, at_once: int) -> list[list[str]]:
    """The blocks of each step; by `"size"`: the ones with the most weights to prune first.

    Inside a step blocks are in the order in which a pass runs them.
    """
    chosen = list(order)
    if by == "reverse":
        chosen.reverse()
    if by == "size":
        weights = {block: sum(target.numel for target in targets if target.block == block) for block in order}
        chosen.sort(key=lambda block: -weights[block])
    return [sorted(chosen[i : i + at_once], key=order.index) for i in range(0, len(chosen), at_once)]
