"""The shape of a smaller model: of those that meet a budget the one that loses least, as measured.

There may be dozens. What each loses is estimated first: along each axis (channels, heads, blocks) the loss of the dense
model without a few amounts of it is measured, the units that are left made up for what goes on the dense model's
inputs, and what a shape loses is the sum over its axes of what lies between. Some of the calibration rows are held out;
the few shapes with the lowest estimates are pruned on the others as a run of their own would be, and measured on those.
"""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.data.batches import Batches, row_count
from gradprobe_hf.estimation.expected_passes import search_passes
from gradprobe_hf.evaluation.perplexity import measure
from gradprobe_hf.model.parameters import is_offloaded
from gradprobe_hf.model.routing import mixtures, routed
from gradprobe_hf.model.targets import Target
from gradprobe_hf.probe.attachment import serving
from gradprobe_hf.reconstruction.new_weights import NewWeights
from gradprobe_hf.run.block_order import blocks_going, few_rows, loss_of_few_rows, loss_without, losses_alone
from gradprobe_hf.run.context import BlockOrder, RunContext
from gradprobe_hf.run.diagnostics import Diagnostics
from gradprobe_hf.run.latency import check_timeable, latency_table, measured_latency
from gradprobe_hf.run.structured import hands_on, misrouted
from gradprobe_hf.run.unit_evidence import Weighed, expert_fisher, weighed_units
from gradprobe_hf.runtime.stopwatch import Stopwatch, rough_time
from gradprobe_hf.structures.budgets import BUDGETS, ShapeBudget
from gradprobe_hf.structures.importance import made_up_for
from gradprobe_hf.structures.latency_table import LatencyTable
from gradprobe_hf.structures.legal_shapes import Shape, block_sizes, is_legal, shape_axes, shapes_within
from gradprobe_hf.structures.plan import Plan
from gradprobe_hf.structures.removal import Removal
from gradprobe_hf.structures.table import STRUCTURES, shape_words
from gradprobe_hf.structures.unit_scores import lowest_of

logger = logging.getLogger(__name__)

TRIED = 4  # shapes that are pruned and measured
STOPS = 3  # amounts of a structure that are measured; what lies between is interpolated
HELD_OUT = 1 / 8  # of the calibration rows
_TWO_ROWS = "at least two rows: num_samples=2 (--num-samples)"

# Prunes a context whose shape is given, and returns the loss on some batches and what goes.
Trial = Callable[[RunContext, Batches, Diagnostics], tuple[float, Removal]]


def budget_shapes(
    model: PreTrainedModel, targets: Sequence[Target], config: GradProbeConfig, order: Sequence[str] = ()
) -> list[Shape]:
    """The shapes that meet a configuration's budget of size. Args, Raises: as `shapes_within`."""
    budget = config.shape_budget
    assert budget is not None, "asked for where there is one"
    return shapes_within(model, targets, budget, _unavailable(model, targets), order=order)


def check_budget(model: PreTrainedModel, targets: Sequence[Target], config: GradProbeConfig) -> None:
    """Raise ValueError for a budget that no shape of the model meets, as far as it can be told without a clock."""
    budget = config.shape_budget
    if budget is not None and budget.is_measured:
        check_timeable(model, Plan.of(model, targets, {}))
        shape_axes(model, targets, _unavailable(model, targets))
    else:
        budget_shapes(model, targets, config)
    if config.structure_rounds > 1 and not shape_axes(model, targets, {}).keys() & set(config.in_rounds):
        raise ValueError(
            f"structure_rounds={config.structure_rounds} has no effect here: with importance={config.importance!r} "
            f"only experts go in rounds, and {type(model).__name__} has none that can. Leave it unset, or set "
            "importance='fisher'."
        )


def example_of_budget(model: PreTrainedModel, targets: Sequence[Target], config: GradProbeConfig) -> Plan:
    """A plan of a shape that a budget may lead to, one of as many structures as there are."""
    budget = config.shape_budget
    assert budget is not None, "asked for where there is one"
    if not budget.is_measured:
        shapes = sorted(budget_shapes(model, targets, config), key=lambda shape: -len(shape.going))
        richest = next((one for one in shapes if is_legal(model, targets, one)), None)
        return Plan.of(model, targets, {} if richest is None else richest.going)
    axes = shape_axes(model, targets, _unavailable(model, targets))
    return Plan.of(model, targets, {name: amounts[1] for name, amounts in axes.items()})


def _timed_shapes(
    context: RunContext, budget: ShapeBudget, diagnostics: Diagnostics
) -> tuple[list[Shape], LatencyTable]:
    """The shapes that meet a budget of latency, by a table that is measured now."""
    without = _unavailable(context.model, context.targets)
    axes = shape_axes(context.model, context.targets, without)
    # A run that is resumed goes by the same table, or its shapes would be others.
    found = context.findings.get("latency table", diagnostics, lambda: asdict(latency_table(context, axes)))
    table = LatencyTable(**found)
    return shapes_within(context.model, context.targets, budget, without, table), table


def structures_that_can_go(model: PreTrainedModel, targets: Sequence[Target]) -> list[str]:
    """The names of what the model can do without some of; its weights have to be there."""
    try:
        return list(shape_axes(model, targets, _unavailable(model, targets)))
    except ValueError:
        return []


def _unavailable(model: PreTrainedModel, targets: Sequence[Target]) -> dict[str, str]:
    """Structures that the model turns out not to do without when it is run, each with a sentence that says why."""
    found = {}
    for name, row in STRUCTURES.items():
        if row.takes == "blocks" and not hands_on(model, targets):
            found[name] = f"structure {name!r}: a block without weights does not hand on what it is given."
        if row.takes == "experts" and mixtures(model):
            with suppress(ValueError):  # not as many from block to block, which `shape_axes` says
                why = misrouted(model, Plan.of(model, targets, {name: 1}))
                found |= {name: f"structure {name!r}: {why}."} if why else {}
    return found


def with_shape(context: RunContext, going: Mapping[str, int]) -> RunContext:
    """The context of a run whose shape is given."""
    return replace(context, config=context.config.varied(structure=dict(going), **dict.fromkeys(BUDGETS)))


def choose_shape(context: RunContext, diagnostics: Diagnostics, trial: Trial) -> None:
    """Put down in the diagnostics which shapes meet the budget, and what was measured of the most promising.

    Raises:
        ValueError: none of these can be made, or none has a loss.
    """
    budget, table = context.config.shape_budget, None
    assert budget is not None, "asked for where there is one"
    held_out, rest = context.calibration.split(context.config.seed, HELD_OUT, _TWO_ROWS)
    # What is found of the shapes is found on other rows than what follows.
    findings = context.findings.under("shapes")
    on_rest = replace(context, calibration=rest, snapshots=None, findings=findings, stopwatch=Stopwatch())
    own = Diagnostics()
    if budget.is_measured:
        shapes, table = _timed_shapes(context, budget, diagnostics)
    else:
        shapes = budget_shapes(context.model, context.targets, context.config, _known_order(on_rest, own))
    # Where all are tried, nothing has to be expected of them.
    expected = estimated_losses(on_rest, shapes, own) if len(shapes) > TRIED else [0.0] * len(shapes)
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
    axes = shape_axes(model, targets, _unavailable(model, targets))
    amounts = next((counts for name, counts in axes.items() if STRUCTURES[name].takes == "blocks"), [0])
    plan = Plan.of(model, targets, {})
    if len({*block_sizes(model, plan).values()}) == 1 or not any(amounts):
        return []
    # No shape loses more blocks than one that loses nothing else, which loses most where the smallest go.
    alone = (shape.going for shape in budget_shapes(model, targets, config) if [*shape.going] == ["blocks"])
    most = next(alone, {"blocks": amounts[-1]})["blocks"]
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


@dataclass(frozen=True)
class _Curve:
    """What the model loses (nats) with the amount of a structure that goes: `amounts` rise from 0, `losses` from 0."""

    amounts: Sequence[int]
    losses: Sequence[float]

    def at(self, amount: int) -> float:
        """On the straight line between two measured amounts."""
        right = bisect_left(self.amounts, amount)
        if self.amounts[right] == amount:
            return self.losses[right]
        (a, b), (low, high) = self.amounts[right - 1 : right + 1], self.losses[right - 1 : right + 1]
        return low + (high - low) * (amount - a) / (b - a)


def estimated_losses(context: RunContext, shapes: Sequence[Shape], diagnostics: Diagnostics) -> list[float]:
    """The calibration loss (nats) that each shape is expected to have."""
    stops = {name: _stops(shapes, name) for name in STRUCTURES if any(name in shape.going for shape in shapes)}
    begun = time.perf_counter()
    dense = loss_without(context, Plan.of(context.model, context.targets, {}), set(), diagnostics)
    _announce(context, shapes, stops, time.perf_counter() - begun)
    curves = {
        name: _Curve([0, *stops[name]], [0.0, *(loss - dense for loss in losses)])
        for name, losses in _measured_stops(context, stops, diagnostics).items()
    }
    blocks = len({target.block for target in context.targets})
    found = [dense + _lost(shape.going, curves, blocks) for shape in shapes]
    return [math.inf if math.isnan(loss) else loss for loss in found]


def _announce(context: RunContext, shapes: Sequence[Shape], stops: Mapping[str, Sequence[int]], seconds: float) -> None:
    """Log what the search will take. Args: `seconds`: that the model took for a few rows."""
    config, blocks = context.config, len({target.block for target in context.targets})
    alone = sum(blocks - 2 for name in stops if STRUCTURES[name].takes == "blocks")
    probed = 1 + alone / 2 + sum(map(len, stops.values()))  # without a block passes begin in front of it
    rows = context.calibration.samples
    passes = search_passes(config, rows, blocks, [shape.going for shape in shapes], TRIED, probed)
    whole = seconds * rows / sum(map(row_count, few_rows(context)))
    logger.info(
        "%d shapes meet %s; %d are pruned to find the best: about %.0f passes over the calibration data, %s by the "
        "first of them, and the updates of weights",
        len(shapes),
        config.shape_budget,
        TRIED,
        passes,
        rough_time(passes * whole),
    )


def _lost(going: Mapping[str, int], curves: Mapping[str, _Curve], blocks: int) -> float:
    whole = sum(count for name, count in going.items() if STRUCTURES[name].takes == "blocks")
    # Units go of the blocks that stay, and fewer of these lose less.
    shares = {name: 1.0 if STRUCTURES[name].takes == "blocks" else 1 - whole / blocks for name in going}
    return sum(shares[name] * curves[name].at(count) for name, count in going.items())


def _stops(shapes: Sequence[Shape], name: str) -> list[int]:
    """The amounts of a structure that are measured: the least, the most, and evenly between."""
    every = sorted({shape.going[name] for shape in shapes if name in shape.going})
    if len(every) <= STOPS:
        return every
    return [every[round(number * (len(every) - 1) / (STOPS - 1))] for number in range(STOPS)]


def _measured_stops(
    context: RunContext, stops: Mapping[str, Sequence[int]], diagnostics: Diagnostics
) -> dict[str, list[float]]:
    """Structure -> the loss without each of these amounts of it, nothing else gone."""
    found = {}
    inside = {name: amounts for name, amounts in stops.items() if STRUCTURES[name].takes == "units"}
    for name, amounts in stops.items():
        if STRUCTURES[name].takes == "blocks":
            plan = Plan.of(context.model, context.targets, {name: 1})
            alone = losses_alone(context, plan, diagnostics)
            order = plan.first_to_go(sorted(alone, key=lambda block: alone[block]), max(amounts))
            measure = partial(_losses_without_blocks, context, plan, order, amounts, diagnostics)
            found[name] = context.findings.get("amounts of blocks", diagnostics, measure)
        if STRUCTURES[name].takes == "experts":
            measure = partial(_losses_without_experts, context, name, amounts, diagnostics)
            found[name] = context.findings.get("amounts of experts", diagnostics, measure)
    return found | context.findings.get(
        "amounts of units", diagnostics, partial(_losses_without_units, context, inside, diagnostics)
    )


def _losses_without_blocks(
    context: RunContext, plan: Plan, order: Sequence[str], amounts: Sequence[int], diagnostics: Diagnostics
) -> list[float]:
    return [loss_without(context, plan, set(order[:count]), diagnostics) for count in amounts]


def _losses_without_experts(
    context: RunContext, name: str, amounts: Sequence[int], diagnostics: Diagnostics
) -> list[float]:
    fisher = expert_fisher(context, Removal(Plan.of(context.model, context.targets, {name: 1})), diagnostics)
    losses = []
    for count in amounts:
        with routed(context.model, {router: lowest_of(scores, count) for router, scores in fisher.items()}):
            losses.append(loss_of_few_rows(context, diagnostics))
    return losses


def _losses_without_units(
    context: RunContext, stops: Mapping[str, Sequence[int]], diagnostics: Diagnostics
) -> dict[str, list[float]]:
    readers, served = _without_units(context, stops, diagnostics)
    return {
        name: [_served_loss(context, readers[name], served[name, count], diagnostics) for count in amounts]
        for name, amounts in stops.items()
    }


@torch.no_grad()
def _without_units(
    context: RunContext, stops: Mapping[str, Sequence[int]], diagnostics: Diagnostics
) -> tuple[dict[str, list[Target]], dict[tuple[str, int], NewWeights]]:
    """Structure -> the matrices that read it, and these without each amount of it: (structure, amount) -> values."""
    model, scores, makes_up = context.model, context.config.unit_scores, context.config.updates
    plan = Plan.of(model, context.targets, {name: amounts[-1] for name, amounts in stops.items()})
    readers = {name: [units.reader for units in plan.units[name]] for name in stops}
    served = {
        (name, count): NewWeights(context.folder, on_disk=is_offloaded(model))
        for name, amounts in stops.items()
        for count in amounts
    }
    # What the others make up for is told by the inputs, whatever it is that units go by.
    for one in weighed_units(context, Removal(plan), stops.keys(), diagnostics, all_inputs=makes_up) if stops else ():
        for count in stops[one.structure]:
            values = _without(one, scores[one.structure].chosen(one.evidence, count), makes_up)
            stored = one.units.reader.matrix(model)
            served[one.structure, count].add(one.units.reader.name, values.to(stored.device, stored.dtype))
    return readers, served


def _without(one: Weighed, gone: Tensor, makes_up: bool) -> Tensor:
    """A matrix without some of the units that it reads, `[out, in]`."""
    columns = one.units.columns(gone).to(one.evidence.weight.device)
    if makes_up and one.evidence.inverse is not None:
        return made_up_for(one.evidence.weight, one.evidence.inverse, columns)
    return one.evidence.weight.masked_fill(columns, 0)


def _served_loss(context: RunContext, readers: Sequence[Target], values: NewWeights, diagnostics: Diagnostics) -> float:
    with serving(context.model, readers, {}, new_weights=values):
        return loss_of_few_rows(context, diagnostics)
