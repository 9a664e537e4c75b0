"""The order in which blocks go: one after the other, each time the one without which the calibration loss is lowest.

All are left out in turn for the first one. Losses rise with every block that has gone and change their order little, so
that from then on only the few are tried without which the loss was lowest the time before. In front of the block that
is left out all is as it was: what the blocks there hand on is computed once for all that are tried.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

from tqdm.auto import tqdm

from gradprobe_hf.data.batches import row_count, token_count
from gradprobe_hf.evaluation.perplexity import measure
from gradprobe_hf.model.families import is_causal
from gradprobe_hf.model.passes.block_cache import BlockOutputCache
from gradprobe_hf.model.passes.loss import Batch, counted_labels
from gradprobe_hf.probe.maps.attachment import blocks_in_order, serving
from gradprobe_hf.probe.steps import share
from gradprobe_hf.run.context import BlockOrder, RunContext
from gradprobe_hf.run.diagnostics import Diagnostics
from gradprobe_hf.run.shapes.unit_evidence import removed_blocks
from gradprobe_hf.structures.plan import Plan
from gradprobe_hf.structures.removal import Removal
from gradprobe_hf.structures.table import FEWER_BLOCKS, ROWS_WITHOUT, TOKENS_WITHOUT


def blocks_going(context: RunContext, plan: Plan, count: int, diagnostics: Diagnostics) -> list[dict[str, Any]]:
    """The first so many blocks that go, each with the loss without it and those before it.

    What the context's order does not know yet is measured, and counted in the diagnostics.

    Raises:
        ValueError: whichever block is left out, there is no loss that is finite.
    """
    order = BlockOrder() if context.block_order is None else context.block_order
    while len(order.gone) < count:
        losses = _losses_beside(context, plan, order, diagnostics)
        first, *others = sorted(losses, key=lambda block: losses[block])
        if not order.gone and math.isinf(losses[first]):
            raise ValueError(
                "structure 'blocks': the calibration loss is not finite, whichever block is left out. Nothing was "
                "changed. Look for NaN in the model's weights, or a dtype that overflows (float16: try bfloat16)."
            )
        order.gone.append({"block": first, "loss": losses[first]})
        order.next_tried = others + [block for block in order.next_tried if block not in losses]
    return order.gone[:count]


def losses_alone(context: RunContext, plan: Plan, diagnostics: Diagnostics) -> dict[str, float]:
    """Block -> the calibration loss without it alone, of those that may go."""
    return _losses_beside(context, plan, context.block_order or BlockOrder(), diagnostics, first=True)


def losses_without(
    context: RunContext, plan: Plan, gone: Set[str], tried: Sequence[str], diagnostics: Diagnostics
) -> dict[str, float]:
    """Block -> the loss without it and those that are gone, of each that is tried."""
    bar = tqdm(total=len(tried), desc=f"without a block ({len(gone) + 1})", disable=not context.progress, leave=False)
    cache, losses = _outputs_before(context), dict[str, float]()
    with bar:
        for name in tried if cache is None else cache.blocks.names:
            if name in tried:
                without = {*gone, name}
                measure = partial(loss_without, context, plan, without, diagnostics, cache)
                losses[name] = context.findings.get(f"without {', '.join(sorted(without))}", diagnostics, measure)
                bar.update()
            if len(losses) == len(tried):
                break
            if cache is not None:
                removed, masks, biases = removed_blocks(context, Removal(plan, frozenset(gone)))
                with serving(context.model, removed, masks, new_weights=biases):
                    cache.advance([name])
    return losses


def loss_without(
    context: RunContext,
    plan: Plan,
    blocks: Set[str],
    diagnostics: Diagnostics,
    cache: BlockOutputCache | None = None,
) -> float:
    """The mean loss over a few rows without these blocks; where it is not a number, infinity.

    Args:
        cache: outputs of the first blocks for this process's share of these rows.
    """
    removed, masks, biases = removed_blocks(context, Removal(plan, frozenset(blocks)))
    with serving(context.model, removed, masks, new_weights=biases):
        return loss_of_few_rows(context, diagnostics, cache)


def loss_of_few_rows(context: RunContext, diagnostics: Diagnostics, cache: BlockOutputCache | None = None) -> float:
    """The mean loss over a few rows of the model as it is served now; where it is not a number, infinity."""
    batches = few_rows(context)
    work = replace(context.workload, batches=batches, progress=False)
    loss = measure(work, "calibration", allows_nan=True, cache=cache).loss
    passes = sum(map(row_count, batches)) / sum(map(row_count, context.calibration))
    diagnostics.count("forward", passes * (1 - (cache.share if cache else 0)))
    return math.inf if math.isnan(loss) else loss


def _outputs_before(context: RunContext) -> BlockOutputCache | None:
    """For the rows that blocks are left out of; None where blocks do not run one after the other, each once."""
    model = context.model
    batches = few_rows(context)
    try:
        sequence = blocks_in_order(model, context.targets, batches)
    except ValueError:
        return None
    return BlockOutputCache(model, [batch for batch, _ in share(batches, context.processes, in_step=False)], sequence)


def few_rows(context: RunContext) -> list[Batch]:
    """Calibration batches that are enough to tell one block, or one shape, from another."""
    found, rows, tokens = list[dict[str, Any]](), 0, 0
    has_token_loss = is_causal(context.model) and context.workload.loss_fn is None
    # Row by row, where rows can be stacked again: as many whatever the batches are.
    apart = context.calibration.in_batches_of(1)
    for batch in apart.items:
        enough = rows >= ROWS_WITHOUT or (has_token_loss and tokens >= TOKENS_WITHOUT)
        if enough and rows >= context.processes.count:
            break
        found.append(batch)
        counted = counted_labels(context.model, batch)  # of a chat, say, the answers alone
        rows, tokens = rows + row_count(batch), tokens + (token_count(batch) if counted is None else counted)
    size = max(map(row_count, context.calibration))
    return list(replace(apart, items=tuple(found)).in_batches_of(size))


def _losses_beside(
    context: RunContext, plan: Plan, order: BlockOrder, diagnostics: Diagnostics, first: bool = False
) -> dict[str, float]:
    """Block -> the loss without it and those that go already; with `first`, without it alone."""
    names: Sequence[str] = [] if first else [one["block"] for one in order.gone]
    if not names and order.alone:
        return order.alone
    may_go = plan.may_go(set(names))
    left = [block for block in order.next_tried if block in may_go][:FEWER_BLOCKS] if names else may_go
    losses = losses_without(context, plan, set(names), left, diagnostics)
    if not names:
        order.alone.update(losses)
    return losses
