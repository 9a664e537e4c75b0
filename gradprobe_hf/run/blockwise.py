"""The sequential order: blocks are decided one step after the other, each probed on the model as pruned so far.

Candidates are chosen once, for all blocks, on the model as it is. In forward order a step starts from what the blocks
before it have left (`blocks.Prefix`), and in every order its backward stops at its first block; so `blocks x 2` probes
cost about as much as half as many whole ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradprobe_hf.config import BlockOrder
from gradprobe_hf.model.block_cache import BlockOutputCache, blocks_in_order
from gradprobe_hf.model.targets import Target
from gradprobe_hf.probe.attachment import instrumented
from gradprobe_hf.probe.engine import own_steps
from gradprobe_hf.probe.folding import Probe
from gradprobe_hf.run.context import Diagnostics, RunContext
from gradprobe_hf.run.probe_pair import ProbePair, merged
from gradprobe_hf.run.schedule import UNBOUNDED, begun_in
from gradprobe_hf.selection.packed_masks import PackedMasks


def decide_in_order(setting: RunContext, findings: Diagnostics) -> PackedMasks:
    """The masks of all steps.

    Raises:
        ValueError: blocks that a pass does not run one after the other.
    """
    model, config = setting.model, setting.config
    assert setting.batches is not None, "every decision but 'none' has probes"
    own = [batch for batch, _ in own_steps(model, setting.targets, setting.batches, setting.processes)]
    order = blocks_in_order(model, setting.targets, own[0])
    begun = begun_in(setting)
    decided, candidates = (
        (PackedMasks(), None) if begun is None or begun < 2 or setting.journal is None else setting.journal.masks(begun)
    )
    if candidates is None:
        alone = replace(setting, config=replace(config, decision="none", order="joint", **UNBOUNDED))
        candidates = ProbePair(alone, setting.targets, findings).run(config.final_sparsity, begun)
    prefix = BlockOutputCache(model, own, len(order)) if config.block_order == "forward" else None
    portions = steps(order, setting.targets, config.block_order, config.blocks_per_step)
    for number, blocks in enumerate(portions, start=1):
        inside = [target for target in setting.targets if target.block in blocks]
        if begun is None or begun // 2 <= number:
            depth = 1 - min(order.index(block) for block in blocks) / len(order)
            place = f"step {number} of {len(portions)}, "
            trial = ProbePair(setting, inside, findings, number, decided, candidates, prefix, depth, place)
            decided = merged(decided, trial.run(config.final_sparsity, begun))
        if prefix is not None:
            with instrumented(model, inside, Probe(shrunk=decided, factor=0.0)):
                prefix.advance(blocks)
            findings.count("forward", len(blocks) / len(order))
    found = PackedMasks()
    for target in setting.targets:
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
