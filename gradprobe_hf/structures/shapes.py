"""Shapes: the configuration of the smaller model, and whether its code takes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from gradprobe_hf.model.config_names import told_by_number
from gradprobe_hf.model.loading.load import skeleton
from gradprobe_hf.model.pooler import without_pooler
from gradprobe_hf.structures.plan import Plan
from gradprobe_hf.structures.removal import Removal
from gradprobe_hf.structures.table import STRUCTURES

FEW = 64  # units


def shape_values(config: PreTrainedConfig, removal: Removal) -> dict[str, Any]:
    """What the configuration of the smaller model says otherwise, under the names of the family."""
    found: dict[str, Any] = {}
    for name, row in STRUCTURES.items():
        if left := removal.left(name):
            found |= row.configured(config, left)
    return found


def smaller_config(config: PreTrainedConfig, removal: Removal) -> PreTrainedConfig:
    """The configuration of the smaller model.

    Raises:
        Exception: whatever the family's own checks raise for a shape that it does not take.
    """
    made = type(config).from_dict({**config.to_dict(), **shape_values(config, removal)})
    # Neither is in a dict of a configuration, and the two models are timed against each other.
    made._attn_implementation = config._attn_implementation
    made._experts_implementation = config._experts_implementation
    return made


def random_smaller(model: PreTrainedModel, removal: Removal, dtype: torch.dtype) -> PreTrainedModel:
    """What is left of a model, with weights that are drawn, on the CPU."""
    state = torch.get_rng_state()  # drawing them is no part of the run
    try:
        config, given = smaller_config(model.config, removal), without_pooler(model)
        made: PreTrainedModel = type(model)._from_config(config, dtype=dtype, **given)
    finally:
        torch.set_rng_state(state)
    return made.eval()


def check_legal(model: PreTrainedModel, plan: Plan) -> None:
    """Raise ValueError for the first structure that the model's code cannot do without, with what it can."""
    if unfit(model, plan) is None:
        return
    for name in plan.going:
        alone = plan.alone(name)
        if reason := unfit(model, alone):
            raise ValueError(f"{_refusal(model, alone, name)} ({reason})")
    raise ValueError(f"{type(model).__name__} cannot do without these structures together ({unfit(model, plan)}).")


def _refusal(model: PreTrainedModel, plan: Plan, name: str) -> str:
    row, asked = STRUCTURES[name], plan.going[name]
    there = plan.there(name)
    # Where there are few units every number of them is tried, the nearest first. Channels are alike, and thousands.
    tried = sorted(range(1, there), key=lambda count: abs(count - asked)) if there <= FEW else []
    nearest = next((count for count in tried if unfit(model, replace(plan, going={name: count})) is None), None)
    remedy = (
        f"leave {name!r} out of structure" if nearest is None else f"the nearest that it can is {nearest}: set that"
    )
    return f"{type(model).__name__} cannot do without {asked} of its {there} {row.units}; {remedy}."


def unfit(model: PreTrainedModel, plan: Plan) -> str | None:
    """Why a model of the smaller shape cannot be made; None if it can. It is built without weights."""
    if spanning := _over_all_units(model, plan):
        return f"its {spanning} is over all heads together"
    if plan.blocks_going and (name := told_by_number(model.config)):
        return f"with its {name} what a block does depends on its number"
    removal = Removal.example(plan)
    try:
        made = skeleton(smaller_config(model.config, removal), type(model), **without_pooler(model))
    except Exception as error:  # each family checks its configuration in a way of its own
        return " ".join(str(error).split()) or type(error).__name__
    wanted = {
        renamed: tuple(removal.tensor(name, tensor.to("meta")).shape)
        for name, tensor in model.state_dict(keep_vars=True).items()
        if (renamed := removal.name(name)) is not None
    }
    there = {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()}
    for name in sorted(wanted.keys() | there.keys()):
        if wanted.get(name) != there.get(name):
            return _differs(name, wanted.get(name), there.get(name))
    return None


def _differs(name: str, left: tuple[int, ...] | None, made: tuple[int, ...] | None) -> str:
    """What a tensor would be that does not fit. Args: left: of it in the smaller model; made: by the model's code."""
    if left is None or made is None:
        return f"its code makes {'no' if made is None else 'a further'} {name} then"
    return f"its code makes {name} {' x '.join(map(str, made))} then, and {' x '.join(map(str, left))} are left of it"


def _over_all_units(model: PreTrainedModel, plan: Plan) -> str | None:
    """A norm of queries or keys with a gain for every row that makes them: OLMoE's, which a smaller one keeps."""
    together = [one for name, found in plan.units.items() if STRUCTURES[name].normed_together for one in found]
    for units in together:
        attention = model.get_submodule(units.reader.parameter.rsplit(".", 2)[0])
        # Biases of makers are cut with them, and that of the reader is of its outputs.
        linear = {one.parameter.rsplit(".", 2)[1] for one in (units.reader, *(maker for maker, _ in units.makers))}
        rows = {maker.shape[0] for maker, _ in units.makers}
        for name, parameter in attention.named_parameters():
            if parameter.ndim == 1 and len(parameter) in rows and units.count > 1 and name.split(".")[0] not in linear:
                return name
    return None
