"""Whole structures: which blocks, channels and heads go. The result is masks, like that of any other decision.

Blocks go first, one after the other: each time the one without which the calibration loss is lowest. Then what is left
of the dense model is measured, and units go as their score says.
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
from gradprobe_hf.model.block_cache import replaced_forward
from gradprobe_hf.model.families import random_batch
from gradprobe_hf.model.loss import Batch, forward_only
from gradprobe_hf.model.parameters import input_device
from gradprobe_hf.model.patches import eval_mode
from gradprobe_hf.model.targets import Target
from gradprobe_hf.probe.attachment import serving
from gradprobe_hf.reconstruction.silenced_blocks import silenced
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.run.diagnostics import Diagnostics
from gradprobe_hf.run.unit_evidence import removed_blocks, weighed_units
from gradprobe_hf.selection.packed_masks import PackedMasks
from gradprobe_hf.structures.plan import Plan
from gradprobe_hf.structures.removal import Removal
from gradprobe_hf.structures.table import WINDOWS_WITHOUT

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
            removal = replace(removal, units=_units_going(context, removal, diagnostics))
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


def _units_going(context: RunContext, removal: Removal, diagnostics: Diagnostics) -> dict[str, Tensor]:
    """Name of a reader -> which of its units go, bool `[count]`, in the blocks that stay; the same in all processes."""
    choose, going = context.config.unit_score.chosen, removal.plan.going
    return {
        one.units.reader.name: choose(one.evidence, going[one.structure])
        for one in weighed_units(context, removal, diagnostics)
    }


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
    gone, masks, biases = removed_blocks(context, Removal(plan, frozenset(blocks)))
    work = replace(context.workload, batches=batches, progress=False)
    with serving(context.model, gone, masks, new_weights=biases):
        loss = measure(work, "calibration", allows_nan=True).loss
    return math.inf if math.isnan(loss) else loss
