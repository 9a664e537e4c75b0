"""The order in which blocks go: one after the other, each time the one without which the calibration loss is lowest.

All are left out in turn for the first one. Losses rise with every block that has gone and change their order little, so
that from then on only the few are tried without which the loss was lowest the time before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tqdm.auto import tqdm

from gradprobe_hf.data.batches import row_count
from gradprobe_hf.evaluation.perplexity import measure
from gradprobe_hf.model.loss import Batch
from gradprobe_hf.probe.attachment import serving
from gradprobe_hf.run.context import BlockOrder, RunContext
from gradprobe_hf.run.diagnostics import Diagnostics
from gradprobe_hf.run.unit_evidence import removed_blocks
from gradprobe_hf.structures.plan import Plan
from gradprobe_hf.structures.removal import Removal
from gradprobe_hf.structures.table import FEWER_BLOCKS, WINDOWS_WITHOUT


def blocks_going(context: RunContext, plan: Plan, count: int, diagnostics: Diagnostics) -> list[dict[str, Any]]:
    """The first so many blocks that go, each with the loss without it and those before it.

    What the context's order does not know yet is measured, and counted in the diagnostics.
    """
    order = BlockOrder() if context.block_order is None else context.block_order
    while len(order.gone) < count:
        losses = _losses_beside(context, plan, order, diagnostics)
        first, *others = sorted(losses, key=lambda block: losses[block])
        order.gone.append({"block": first, "loss": losses[first]})
        order.next_tried = others + [block for block in order.next_tried if block not in losses]
    return order.gone[:count]


def losses_alone(context: RunContext, plan: Plan, diagnostics: Diagnostics) -> dict[str, float]:
    """Block -> the calibration loss without it alone, of those that may go."""
    return _losses_beside(context, plan, context.block_order or BlockOrder(), diagnostics, first=True)


def loss_without(context: RunContext, plan: Plan, blocks: set[str], diagnostics: Diagnostics) -> float:
    """The mean loss over a few rows without these blocks; where it is not a number, infinity."""
    batches = few_rows(context)
    gone, masks, biases = removed_blocks(context, Removal(plan, frozenset(blocks)))
    work = replace(context.workload, batches=batches, progress=False)
    with serving(context.model, gone, masks, new_weights=biases):
        loss = measure(work, "calibration", allows_nan=True).loss
    diagnostics.count("forward", sum(map(row_count, batches)) / sum(map(row_count, context.calibration)))
    return math.inf if math.isnan(loss) else loss


def few_rows(context: RunContext) -> list[Batch]:
    """Calibration batches that are enough to tell one block, or one shape, from another."""
    found: list[Batch] = []
    for batch in context.calibration:
        if sum(map(row_count, found)) >= max(WINDOWS_WITHOUT, context.processes.count):
            break
        found.append(batch)
    return found


def _losses_beside(
    context: RunContext, plan: Plan, order: BlockOrder, diagnostics: Diagnostics, first: bool = False
) -> dict[str, float]:
    """Block -> the loss without it and those that go already; with `first`, without it alone."""
    names: Sequence[str] = [] if first else [one["block"] for one in order.gone]
    if not names and order.alone:
        return order.alone
    left = order.next_tried[:FEWER_BLOCKS] if names else plan.blocks[1:-1]
    bar = tqdm(left, desc=f"without a block ({len(names) + 1})", disable=not context.progress, leave=False)
    losses = {block: loss_without(context, plan, {*names, block}, diagnostics) for block in bar}
    if not names:
        order.alone.update(losses)
    return losses
