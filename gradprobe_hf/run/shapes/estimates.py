"""What a shape is expected to lose, before any is pruned.

Along each axis (channels, heads, experts, blocks) the loss of the dense model without a few amounts of it is measured,
the units that are left made up for what goes on the dense model's inputs. What a shape loses is the sum over its axes
of what lies between; where blocks go, too, what goes inside of them counts by the share of those that stay.
"""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gradprobe_hf.data.batches import row_count
from gradprobe_hf.estimation.expected_passes import search_passes
from gradprobe_hf.model.parameters import is_offloaded
from gradprobe_hf.model.passes.routing import routed
from gradprobe_hf.model.targets import Target
from gradprobe_hf.probe.maps.attachment import serving
from gradprobe_hf.reconstruction.new_weights import NewWeights
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.run.diagnostics import Diagnostics
from gradprobe_hf.run.shapes.block_order import few_rows, loss_of_few_rows, loss_without, losses_alone
from gradprobe_hf.run.shapes.unit_evidence import Weighed, expert_fisher, weighed_units
from gradprobe_hf.runtime.stopwatch import rough_time
from gradprobe_hf.structures.importance import made_up_for
from gradprobe_hf.structures.legal_shapes import Shape
from gradprobe_hf.structures.plan import Plan
from gradprobe_hf.structures.removal import Removal
from gradprobe_hf.structures.table import STRUCTURES, blocks_in
from gradprobe_hf.structures.unit_scores import lowest_of

logger = logging.getLogger(__name__)

STOPS = 3  # amounts of a structure that are measured; what lies between is interpolated


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


def estimated_losses(context: RunContext, shapes: Sequence[Shape], diagnostics: Diagnostics, tried: int) -> list[float]:
    """The calibration loss (nats) that each shape is expected to have.

    Args:
        tried: how many of them are pruned afterwards, for what is said of the time.
    """
    stops = {name: _stops(shapes, name) for name in STRUCTURES if any(name in shape.going for shape in shapes)}
    begun = time.perf_counter()
    dense = loss_without(context, Plan.of(context.model, context.targets, {}), set(), diagnostics)
    _announce(context, shapes, stops, tried, time.perf_counter() - begun)
    curves = {
        name: _Curve([0, *stops[name]], [0.0, *(loss - dense for loss in losses)])
        for name, losses in _measured_stops(context, stops, diagnostics).items()
    }
    blocks = len({target.block for target in context.targets})
    found = [dense + _lost(shape.going, curves, blocks) for shape in shapes]
    return [math.inf if math.isnan(loss) else loss for loss in found]


def _announce(
    context: RunContext, shapes: Sequence[Shape], stops: Mapping[str, Sequence[int]], tried: int, seconds: float
) -> None:
    """Log what the search will take. Args: `seconds`: that the model took for a few rows."""
    config, blocks = context.config, len({target.block for target in context.targets})
    alone = sum(blocks - 2 for name in stops if STRUCTURES[name].takes == "blocks")
    probed = 1 + alone / 2 + sum(map(len, stops.values()))  # without a block passes begin in front of it
    rows = context.calibration.samples
    passes = search_passes(config, rows, blocks, [shape.going for shape in shapes], tried, probed)
    whole = seconds * rows / sum(map(row_count, few_rows(context)))
    logger.info(
        "%d shapes meet %s; %d are pruned to find the best: about %.0f passes over the calibration data, %s by the "
        "first of them, and the updates of weights",
        len(shapes),
        config.shape_budget,
        tried,
        passes,
        rough_time(passes * whole),
    )


def _lost(going: Mapping[str, int], curves: Mapping[str, _Curve], blocks: int) -> float:
    # Units go of the blocks that stay, and fewer of these lose less.
    inside = 1 - blocks_in(going) / blocks
    shares = {name: 1.0 if STRUCTURES[name].takes == "blocks" else inside for name in going}
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
