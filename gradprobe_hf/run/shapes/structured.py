"""Whole structures: which blocks, experts, channels and heads go. The result is masks, like that of any other decision.

Blocks go first, then experts, by what is measured of the model that is left; then units, as their score says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from transformers import PreTrainedModel

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.model.families import random_batch
from gradprobe_hf.model.parameters import input_device
from gradprobe_hf.model.passes.loss import forward_only
from gradprobe_hf.model.passes.patches import eval_mode, replaced_forward
from gradprobe_hf.model.passes.routing import routed, wrongly_routed
from gradprobe_hf.model.passes.upcast import upcast_products
from gradprobe_hf.model.targets import Target
from gradprobe_hf.probe.maps.attachment import serving
from gradprobe_hf.reconstruction.silenced_blocks import silenced
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.run.diagnostics import Diagnostics
from gradprobe_hf.run.shapes.block_order import blocks_going
from gradprobe_hf.run.shapes.unit_evidence import expert_fisher, weighed_units
from gradprobe_hf.selection.packed_masks import PackedMasks
from gradprobe_hf.structures.plan import Plan
from gradprobe_hf.structures.removal import Removal
from gradprobe_hf.structures.table import STRUCTURES
from gradprobe_hf.structures.unit_scores import lowest_of

RANDOM_TOKENS = 8  # of the batch that shows whether a block without weights hands on what it is given


def decide_structures(context: RunContext, diagnostics: Diagnostics) -> PackedMasks:
    """The masks of what goes."""
    plan = _plan(context)
    removal = Removal(plan)
    if plan.blocks_going:
        with context.stopwatch("blocks"):
            gone = blocks_going(context, plan, plan.blocks_going, diagnostics)
        diagnostics.blocks_without = [dict(one) for one in gone]
        removal = Removal(plan, frozenset(one["block"] for one in gone))
    config = context.config
    # Units are weighed behind a router that passes over the experts that went: what goes first decides what is left.
    for share in _shares(config, plan.experts_going) if plan.experts else ():
        with routed(context.model, removal.routes):
            choose = partial(_experts_going, context, removal, share, diagnostics)
            removal = replace(removal, experts=_found(context, f"experts, {share}", diagnostics, choose))
    for structures, share in _portions(config, plan):
        with context.stopwatch("units"), routed(context.model, removal.routes), torch.no_grad():
            choose = partial(_units_going, context, removal, structures, share, diagnostics)
            found = _found(context, f"{', '.join(sorted(structures))}, {share}", diagnostics, choose)
            removal = replace(removal, units={**removal.units, **found})
    return packed(removal, context.targets)


def _found(
    context: RunContext, key: str, diagnostics: Diagnostics, choose: Callable[[], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """What is chosen to go, or was by the run that is resumed."""
    found = context.findings.get(key, diagnostics, lambda: {name: gone.tolist() for name, gone in choose().items()})
    return {name: torch.tensor(gone) for name, gone in found.items()}


def _portions(config: GradProbeConfig, plan: Plan) -> list[tuple[Set[str], Fraction]]:
    """Structures of units, and how much of what is to go of them, one portion after the other."""
    in_rounds = {name for name in plan.units if name in config.in_rounds}
    shares = _shares(config, max((plan.going[name] for name in in_rounds), default=0))
    if len(shares) < 2:
        return [(plan.units.keys(), Fraction(1))] if plan.units else []
    # What goes at once goes first: gates are measured in the model without it.
    at_once = plan.units.keys() - in_rounds
    return [*([(at_once, Fraction(1))] if at_once else []), *((in_rounds, share) for share in shares)]


def _shares(config: GradProbeConfig, going: int) -> list[Fraction]:
    """How much of the units that are to go has gone behind each round."""
    # More rounds than units would be probes behind which nothing goes.
    rounds = min(config.structure_rounds, going)
    return [Fraction(number, rounds) for number in range(1, rounds + 1)]


def removal_of(context: RunContext, masks: Mapping[str, Tensor]) -> Removal | None:
    """What these masks are of; None where single weights go."""
    return Removal.of_masks(_plan(context), masks, context.targets) if context.config.amounts else None


def packed(removal: Removal, targets: Sequence[Target]) -> PackedMasks:
    """The masks of a removal."""
    masks = PackedMasks()
    for target in targets:
        masks.add(target.name, [removal.mask(target)])
    return masks


def check_hands_on(model: PreTrainedModel, targets: Sequence[Target]) -> None:
    """Raise ValueError unless blocks whose matrices and biases are zero hand on what they are given."""
    if not hands_on(model, targets):
        raise ValueError(
            f"structure 'blocks': a block of {type(model).__name__} without weights does not hand on what it is given "
            "(it has a norm or a factor behind the sum, say, or does not run once in a pass), so that none can be left "
            "out. Leave 'blocks' out."
        )


@torch.no_grad()
def hands_on(model: PreTrainedModel, targets: Sequence[Target]) -> bool:
    """Whether blocks whose matrices and biases are zero hand on what they are given, all those that may go.

    Others (a norm behind the residual sum, as in BERT, or a factor, as in Gemma 4) change it all the same, and removing
    them is something else. So it is where a block runs several times, or never.

    Raises:
        ValueError: NaN or infinite values in what they are given.
    """
    plan = Plan.of(model, targets, {})
    blocks = plan.may_go(set()) or [plan.blocks[len(plan.blocks) // 2]]
    inside = [target for target in targets if target.block in blocks]
    biases, masks = silenced(model, blocks), packed(Removal(plan, frozenset(blocks)), inside)
    seen: dict[str, list[tuple[Tensor | None, Tensor]]] = {block: [] for block in blocks}
    batch = send_to_device(random_batch(model, 1, RANDOM_TOKENS), input_device(model))
    with (
        serving(model, [*inside, *biases.vectors], masks, new_weights=biases),
        ExitStack() as watched,
        eval_mode(model),
        upcast_products(model),
    ):
        for block in blocks:  # in one pass: what one of them hands on, the next is given
            module = model.get_submodule(block)
            watched.enter_context(replaced_forward(module, partial(_noted, module.forward, seen[block])))
        forward_only(model, batch)
    return all(_handed_on(block, passes) for block, passes in seen.items())


def _noted(forward: Callable[..., Any], passes: list[tuple[Tensor | None, Tensor]], *args: Any, **kwargs: Any) -> Any:
    """What a block makes; it is noted with what it was given."""
    output = forward(*args, **kwargs)
    handed_on = output if isinstance(output, Tensor) else output[0]
    # Whatever it is called, and whether or not by its name: masks and positions have other shapes.
    given = (one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one.shape == handed_on.shape)
    passes.append((next(given, None), handed_on))
    return output


def _handed_on(block: str, passes: Sequence[tuple[Tensor | None, Tensor]]) -> bool:
    """Whether a block has run once, and handed on what it was given."""
    if len(passes) != 1 or (given := passes[0][0]) is None:
        return False
    if not given.isfinite().all():
        raise ValueError(
            f"structure 'blocks': the inputs of {block} are not finite: look for NaN in the weights before it, or a "
            "dtype that overflows (float16: try bfloat16). Nothing was changed."
        )
    return torch.allclose(given, passes[0][1].to(given.device))


def check_routing(model: PreTrainedModel, plan: Plan) -> None:
    """Raise ValueError unless the model's code sends no token to experts that go."""
    for name in plan.going:
        alone = plan.alone(name)
        if not alone.experts or (reason := misrouted(model, alone)) is None:
            continue
        asked, there = alone.experts_going, alone.there(name)
        tried = sorted(range(1, alone.most(name) + 1), key=lambda count: abs(count - asked))
        nearest = next((n for n in tried if misrouted(model, replace(alone, going={name: n})) is None), None)
        remedy = f"leave {name!r} out" if nearest is None else f"the nearest that it can is {nearest}: set that"
        raise ValueError(
            f"structure {name!r}: {type(model).__name__} cannot do without {asked} of its {there} "
            f"{STRUCTURES[name].units}; {remedy}. ({reason})"
        )


@torch.no_grad()
def misrouted(model: PreTrainedModel, plan: Plan) -> str | None:
    """Why the model's code does not do without as many of its experts; None if it does."""
    batch = send_to_device(random_batch(model, 1, RANDOM_TOKENS), input_device(model))
    inside = [matrix for one in plan.experts for expert in one.matrices for matrix in expert]
    # Through measured maps, as in every pass of a run: transformers' own products take no float64.
    with serving(model, inside, {}), eval_mode(model), upcast_products(model):
        return wrongly_routed(model, Removal.example(plan).routes, lambda: forward_only(model, batch))


def _experts_going(
    context: RunContext, removal: Removal, share: Fraction, diagnostics: Diagnostics
) -> dict[str, Tensor]:
    """Name of a router -> which of its experts go, bool `[experts]`; the same in all processes.

    Args:
        share: of those that are to go.
    """
    going, before = math.ceil(share * removal.plan.experts_going), removal.experts
    fisher = expert_fisher(context, removal, diagnostics)
    return {router: lowest_of(scores, going, before.get(router)) for router, scores in fisher.items()}


def _plan(context: RunContext) -> Plan:
    assert context.config.amounts, "asked for where there are some"
    return Plan.of(context.model, context.targets, context.config.amounts)


def _units_going(
    context: RunContext, removal: Removal, structures: Set[str], share: Fraction, diagnostics: Diagnostics
) -> dict[str, Tensor]:
    """Name of a reader -> which of its units go, bool `[count]`, in the blocks that stay; the same in all processes.

    Args:
        share: of those of these structures that are to go.
    """
    scores, going = context.config.unit_scores, removal.plan.going
    return {
        one.units.reader.name: scores[one.structure].chosen(one.evidence, math.ceil(share * going[one.structure]))
        for one in weighed_units(context, removal, structures, diagnostics)
    }
