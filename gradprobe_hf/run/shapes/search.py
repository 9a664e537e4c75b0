"""The shape of a smaller model: of those that meet a budget the one that loses least, as measured.

There may be dozens. What each loses is estimated first (`estimates.py`). Some of the calibration rows are held
out; the few shapes with the lowest estimates are pruned on the others as a run of their own would be, and measured on
those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from typing import Any

from tqdm.auto import tqdm

from gradprobe_hf.data.batches import Batches
from gradprobe_hf.evaluation.perplexity import measure
from gradprobe_hf.probe.steps import most_rows, step_count
from gradprobe_hf.run.context import BlockOrder, RunContext
from gradprobe_hf.run.diagnostics import Diagnostics
from gradprobe_hf.run.shapes.block_order import blocks_going
from gradprobe_hf.run.shapes.budget import available_axes, budget_shapes, timed_shapes
from gradprobe_hf.run.shapes.estimates import estimated_losses
from gradprobe_hf.run.shapes.latency import measured_latency
from gradprobe_hf.runtime.stopwatch import Stopwatch
from gradprobe_hf.structures.budgets import BUDGETS
from gradprobe_hf.structures.legal_shapes import Shape, block_sizes, is_legal
from gradprobe_hf.structures.plan import Plan
from gradprobe_hf.structures.removal import Removal
from gradprobe_hf.structures.table import STRUCTURES, blocks_in, shape_words

TRIED = 4  # shapes that are pruned and measured
HELD_OUT = 1 / 8  # of the calibration rows
_TWO_ROWS = "at least two rows: num_samples=2 (--num-samples)"

# Prunes a context whose shape is given, and returns the loss on some batches and what goes.
Trial = Callable[[RunContext, Batches, Diagnostics], tuple[float, Removal]]


def with_shape(context: RunContext, going: Mapping[str, int]) -> RunContext:
    """The context of a run whose shape is given."""
    return replace(context, config=context.config.varied(structure=dict(going), **dict.fromkeys(BUDGETS)))


def rows_apart(context: RunContext) -> tuple[Batches, Batches]:
    """Calibration rows that shapes are measured on, and those that they are pruned on, in a batch for every process.

    Raises:
        ValueError: there are too few.
    """
    model, targets, processes = context.model, context.targets, context.processes
    held_out, rest = context.calibration.split(context.config.seed, HELD_OUT, _TWO_ROWS)
    if step_count(model, targets, rest) < processes.count:
        rest = rest.in_batches_of(most_rows(model, targets, rest, processes))
    if (steps := step_count(model, targets, rest)) < processes.count:
        raise ValueError(
            f"{context.config.shape_budget}: {processes.count} processes and {steps} calibration batches beside those "
            "that shapes are measured on: every process needs one. Set a larger num_samples (--num-samples), give more "
            "batches, or start fewer processes."
        )
    return held_out, rest


def choose_shape(context: RunContext, diagnostics: Diagnostics, trial: Trial) -> None:
    """Put down in the diagnostics which shapes meet the budget, and what was measured of the most promising.

    Raises:
        ValueError: none of these can be made, or none has a loss.
    """
    budget, table = context.config.shape_budget, None
    assert budget is not None, "asked for where there is one"
    held_out, rest = rows_apart(context)
    # What is found of the shapes is found on other rows than what follows.
    findings = context.findings.under("shapes")
    on_rest = replace(context, calibration=rest, snapshots=None, findings=findings, stopwatch=Stopwatch())
    own = Diagnostics()
    if budget.is_measured:
        shapes, table = timed_shapes(context, budget, diagnostics)
    else:
        shapes = budget_shapes(context.model, context.targets, context.config, _known_order(on_rest, own))
    # Where all are tried, nothing has to be expected of them.
    expected = estimated_losses(on_rest, shapes, own, TRIED) if len(shapes) > TRIED else [0.0] * len(shapes)
    order = sorted(range(len(shapes)), key=lambda number: expected[number])
    legal = (number for number in order if is_legal(context.model, context.targets, shapes[number]))
    losses: dict[int, float] = {}
    for number in tqdm(list(islice(legal, TRIED)), desc="shapes", disable=not context.progress, leave=False):
        losses[number], left = _tried(on_rest, shapes[number], held_out, own, trial)
        # Of which blocks go, where these differ in size, only a budget of size has to know before.
        shapes[number] = replace(shapes[number], parameters=left)
    quiet = replace(context.workload_on(held_out), progress=False)
    diagnostics.dense_loss = measure(quiet, "shapes").loss
    for kind, passes in own.passes.items():
        diagnostics.count(kind, passes * rest.samples / context.calibration.samples)
    if not any(map(math.isfinite, losses.values())):
        tried = ", ".join(str(dict(shapes[number].going)) for number in losses) or "none that its code takes"
        raise ValueError(
            f"{context.config.shape_budget}: no shape of {type(context.model).__name__} that meets it has a loss that "
            f"is finite (tried: {tried}). Give a larger budget."
        )
    for number in sorted(order, key=lambda number: losses.get(number, math.inf)):
        shape = shapes[number]
        diagnostics.shapes.append(
            {
                "removed": dict(shape.going),
                "parameters": shape.parameters,
                "bytes": shape.bytes,
                "latency": None if table is None else table(shape.going) / table.dense,
                "estimated": expected[number] if len(shapes) > TRIED else None,
                "loss": losses.get(number),
            }
        )
    if table is not None:
        chosen = diagnostics.shapes[0]
        timed = partial(measured_latency, context, chosen["removed"])
        # Another clock would tell another time.
        diagnostics.latency = {"table": chosen["latency"], **context.findings.get("latency", diagnostics, timed)}
        diagnostics.latency |= table.terms or {}


def _known_order(context: RunContext, diagnostics: Diagnostics) -> list[str]:
    """The order in which blocks go, as far as a budget of size needs it; empty where they are all as large.

    It does not depend on what else goes, and all shapes share it.
    """
    model, targets, config = context.model, context.targets, context.config
    axes = available_axes(model, targets)
    amounts = next((counts for name, counts in axes.items() if STRUCTURES[name].takes == "blocks"), [0])
    plan = Plan.of(model, targets, {})
    if len({*block_sizes(model, plan).values()}) == 1 or not any(amounts):
        return []
    # No shape loses more blocks than one that loses nothing else, which loses most where the smallest go.
    shapes = (shape.going for shape in budget_shapes(model, targets, config))
    most = next((blocks_in(going) for going in shapes if blocks_in(going) == sum(going.values())), amounts[-1])
    return [one["block"] for one in blocks_going(context, plan, most, diagnostics)]


def _tried(
    context: RunContext, shape: Shape, held_out: Batches, diagnostics: Diagnostics, trial: Trial
) -> tuple[float, int]:
    """The loss of a shape on rows that it was not pruned on, and how many parameters it leaves."""
    order, name = context.block_order or BlockOrder(), shape_words(shape.going)

    def tried() -> dict[str, Any]:
        own = replace(context, block_order=order, findings=context.findings.under(name))
        loss, removal = trial(with_shape(own, shape.going), held_out, diagnostics)
        return {"loss": loss, "left": removal.parameters(context.model), "order": asdict(order)}

    found = context.findings.get(name, diagnostics, tried)
    order.load(found["order"])  # that others go on from
    return found["loss"], found["left"]
