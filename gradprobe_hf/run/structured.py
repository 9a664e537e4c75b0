"""Whole structures: which blocks, channels and heads go. The result is masks, like that of any other decision.

Blocks go first, one after the other: each time the one without which the calibration loss is lowest. Then one walk
through what is left of the dense model collects the Hessian of the matrix behind each set of units, block by block, and
the units go that the others can make up for best.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from gradprobe_hf.data.batches import row_count
from gradprobe_hf.evaluation.perplexity import measure
from gradprobe_hf.model.block_cache import BlockOutputCache, BlockSequence, replaced_forward
from gradprobe_hf.model.families import random_batch
from gradprobe_hf.model.loss import Batch, forward_only
from gradprobe_hf.model.parameters import input_device
from gradprobe_hf.model.patches import eval_mode
from gradprobe_hf.model.targets import Target
from gradprobe_hf.probe.attachment import instrumented, serving
from gradprobe_hf.probe.serving import ServedWeights
from gradprobe_hf.probe.steps import own_steps
from gradprobe_hf.reconstruction.hessians import BlockHessians
from gradprobe_hf.reconstruction.silenced_blocks import silenced
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.run.diagnostics import Diagnostics
from gradprobe_hf.selection.packed_masks import PackedMasks
from gradprobe_hf.structures.importance import least_missed
from gradprobe_hf.structures.plan import Plan, Units
from gradprobe_hf.structures.removal import Removal
from gradprobe_hf.structures.table import WINDOWS_WITHOUT
from gradprobe_hf.updates.sweep import inverse_factor

RANDOM_TOKENS = 8  # of the batch that shows whether a block without weights hands on what it is given


def decide_structures(context: RunContext, diagnostics: Diagnostics) -> PackedMasks:
    """The masks of what goes."""
    plan = _plan(context)
    removal = Removal(plan)
    if "blocks" in plan.going:
        with context.stopwatch("blocks"):
            removal = _without_blocks(context, plan, diagnostics)
    if plan.units:
        with context.stopwatch("units"), torch.no_grad():
            removal = replace(removal, units=_least_missed(context, removal))
        diagnostics.count("forward", 1)
    return packed(removal, context.targets)


def removal_of(context: RunContext, masks: Mapping[str, Tensor]) -> Removal | None:
    """What these masks are of; None where single weights go."""
    return None if context.config.structure is None else Removal.of_masks(_plan(context), masks, context.targets)


def packed(removal: Removal, targets: Sequence[Target]) -> PackedMasks:
    """The masks of a removal."""
    masks = PackedMasks()
    for target in targets:
        masks.add(target.name, [removal.mask(target)])
    return masks


@torch.no_grad()
def check_hands_on(model: PreTrainedModel, plan: Plan, targets: Sequence[Target]) -> None:
    """Raise ValueError unless a block whose matrices and biases are zero hands on what it is given.

    Others (a norm behind the residual sum, as in BERT) change it all the same, and removing them is something else.
    """
    block = plan.blocks[1]
    inside = [target for target in targets if target.block == block]
    biases, module = silenced(model, [block]), model.get_submodule(block)
    masks, seen = packed(Removal(plan, frozenset([block])), inside), list[Tensor]()
    original = module.forward

    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = original(hidden, *args, **kwargs)
        seen.extend((hidden, output if isinstance(output, Tensor) else output[0]))
        return output

    batch = send_to_device(random_batch(model, 1, RANDOM_TOKENS), input_device(model))
    with (
        serving(model, [*inside, *biases.vectors], masks, new_weights=biases),
        replaced_forward(module, forward),
        eval_mode(model),
    ):
        forward_only(model, batch)
    given, handed_on = seen
    if not torch.allclose(given, handed_on.to(given.device)):
        raise ValueError(
            f"structure 'blocks': a block of {type(model).__name__} without weights does not hand on what it is given "
            "(it has a norm behind the sum, say), so that none can be left out. Leave 'blocks' out."
        )


def _plan(context: RunContext) -> Plan:
    assert context.config.structure is not None, "asked for where there is one"
    return Plan.of(context.model, context.targets, context.config.structure)


def _without_blocks(context: RunContext, plan: Plan, diagnostics: Diagnostics) -> Removal:
    """The blocks that go: greedy by the loss without each of those that may."""
    batches = _first_rows(list(context.calibration), max(WINDOWS_WITHOUT, context.processes.count))
    share = sum(map(row_count, batches)) / sum(map(row_count, context.calibration))
    gone: list[str] = []
    while len(gone) < plan.going["blocks"]:
        left = [block for block in plan.blocks[1:-1] if block not in gone]
        bar = tqdm(left, desc=f"without a block ({len(gone) + 1})", disable=not context.progress, leave=False)
        losses = {block: _loss_without(context, plan, {*gone, block}, batches) for block in bar}
        gone.append(min(losses, key=lambda block: losses[block]))
        diagnostics.blocks_without.append({"block": gone[-1], "loss": losses[gone[-1]]})
        diagnostics.count("forward", len(left) * share)
    return Removal(plan, frozenset(gone))


def _first_rows(batches: Sequence[Batch], rows: int) -> list[Batch]:
    """Whole batches, until there are as many rows."""
    found: list[Batch] = []
    for batch in batches:
        if sum(map(row_count, found)) >= rows:
            break
        found.append(batch)
    return found


def _loss_without(context: RunContext, plan: Plan, blocks: set[str], batches: Sequence[Batch]) -> float:
    """The mean loss without these blocks; where it is not a number, infinity."""
    inside = [target for target in context.targets if target.block in blocks]
    biases = silenced(context.model, sorted(blocks))
    masks = packed(Removal(plan, frozenset(blocks)), inside)
    work = replace(context.workload, batches=batches, progress=False)
    with serving(context.model, [*inside, *biases.vectors], masks, new_weights=biases):
        loss = measure(work, "calibration", allows_nan=True).loss
    return math.inf if math.isnan(loss) else loss


def _least_missed(context: RunContext, removal: Removal) -> dict[str, Tensor]:
    """Name of a reader -> which of its units go, in the blocks that stay."""
    model, plan = context.model, removal.plan
    own = [batch for batch, _ in own_steps(model, context.targets, context.calibration, context.processes)]
    cache = BlockOutputCache(model, own, BlockSequence.of(model, context.targets, own[0]))
    found: dict[str, Tensor] = {}
    for block in tqdm(cache.blocks.names, desc="units", unit="block", disable=not context.progress, leave=False):
        if block in removal.blocks:
            inside = [target for target in context.targets if target.block == block]
            biases = silenced(model, [block])
            served = ServedWeights(packed(removal, inside), new_weights=biases)
            with instrumented(model, [*inside, *biases.vectors], served):
                cache.advance([block])
            continue
        units = {name: one for name, every in plan.units.items() for one in every if one.reader.block == block}
        collected = _collect(context, cache, block, [one.reader for one in units.values()])
        for name, one in units.items():
            found[one.reader.name] = _chosen(context, one, collected, plan.going[name])
    return found


def _collect(context: RunContext, cache: BlockOutputCache, block: str, readers: Sequence[Target]) -> BlockHessians:
    """The Hessians of these matrices of a block; it is finished then."""
    collected = BlockHessians(context.model, context.processes, has_drift=False)
    with instrumented(context.model, readers, ServedWeights(), on_input=collected.add):
        left = [cache.run(number, block, collected.start_batch) for number in range(len(cache.batches))]
    cache.finish([block], left)
    return collected


def _chosen(context: RunContext, units: Units, collected: BlockHessians, going: int) -> Tensor:
    """Which units of a matrix go, bool `[count]`; the same in all processes."""
    hessian, _ = collected.of(units.reader)
    factor, _ = inverse_factor(hessian, context.config.damping)
    weight = units.reader.matrix(context.model).to(hessian.device, hessian.dtype)
    return least_missed(weight, factor.t() @ factor, units.count, going)
