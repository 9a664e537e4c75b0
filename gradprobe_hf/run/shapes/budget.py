"""Which shapes meet the budget of a configuration, among those that the model can be had in."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict

from transformers import PreTrainedModel

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.model.families import shares_keys_across_blocks
from gradprobe_hf.model.passes.routing import mixtures
from gradprobe_hf.model.targets import Target
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.run.diagnostics import Diagnostics
from gradprobe_hf.run.shapes.latency import check_timeable, latency_table
from gradprobe_hf.run.shapes.structured import hands_on, misrouted
from gradprobe_hf.structures.budgets import ShapeBudget
from gradprobe_hf.structures.latency_table import LatencyTable
from gradprobe_hf.structures.legal_shapes import Shape, is_legal, shape_axes, shapes_within
from gradprobe_hf.structures.plan import Plan
from gradprobe_hf.structures.table import STRUCTURES


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
        available_axes(model, targets)
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
    axes = available_axes(model, targets)
    return Plan.of(model, targets, {name: amounts[1] for name, amounts in axes.items()})


def timed_shapes(
    context: RunContext, budget: ShapeBudget, diagnostics: Diagnostics
) -> tuple[list[Shape], LatencyTable]:
    """The shapes that meet a budget of latency, by a table that is measured now."""
    without = _unavailable(context.model, context.targets)
    axes = shape_axes(context.model, context.targets, without)
    # A run that is resumed goes by the same table, or its shapes would be others.
    found = context.findings.get("latency table", diagnostics, lambda: asdict(latency_table(context, axes)))
    table = LatencyTable(**found)
    return shapes_within(context.model, context.targets, budget, without, table), table


def available_axes(model: PreTrainedModel, targets: Sequence[Target]) -> dict[str, list[int]]:
    """Structure -> how many of it can go, none first, of a model whose weights are there. Raises: as `shape_axes`."""
    return shape_axes(model, targets, _unavailable(model, targets))


def structures_that_can_go(model: PreTrainedModel, targets: Sequence[Target]) -> list[str]:
    """The names of what the model can do without some of; its weights have to be there."""
    try:
        return list(available_axes(model, targets))
    except ValueError:
        return []


def _unavailable(model: PreTrainedModel, targets: Sequence[Target]) -> dict[str, str]:
    """Structures that the model turns out not to do without when it is run, each with a sentence that says why."""
    found = {}
    for name, row in STRUCTURES.items():
        if row.takes == "blocks" and not hands_on(model, targets):
            found[name] = f"structure {name!r}: a block without weights does not hand on what it is given."
        if row.takes == "units" and shares_keys_across_blocks(model):
            found[name] = f"structure {name!r}: blocks read keys and values that others have computed."
        if row.takes == "experts" and mixtures(model):
            with suppress(ValueError):  # not as many from block to block, which `shape_axes` says
                why = misrouted(model, Plan.of(model, targets, {name: 1}))
                found |= {name: f"structure {name!r}: {why}."} if why else {}
    return found
