"""Shapes: the configuration of the smaller model, and whether its code takes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from gradprobe_hf.model.families import (
    BLOCK_NUMBERS,
    COMPUTED_WIDTHS,
    LEADING_BLOCKS,
    PER_BLOCK,
    config_key,
    experts_key,
    feed_forward_keys,
    key_value_heads,
    told_by_number,
)
from gradprobe_hf.model.loading import skeleton
from gradprobe_hf.structures.plan import Plan
from gradprobe_hf.structures.removal import Removal
from gradprobe_hf.structures.table import STRUCTURES

FEW = 64  # units


def shape_values(config: PreTrainedConfig, removal: Removal) -> dict[str, Any]:
    """What the configuration of the smaller model says otherwise, under the names of the family."""
    plan, values = removal.plan, config.to_dict()
    found: dict[str, Any] = {}
    if "ffn" in plan.units:
        width = plan.units["ffn"][0].count
        found |= dict.fromkeys(feed_forward_keys(values, width), width - plan.going["ffn"])
        found |= {switch: False for switch in COMPUTED_WIDTHS if values.get(switch)}
    if "kv_groups" in plan.units:
        one, groups = plan.units["kv_groups"][0], key_value_heads(config)
        heads, left = config.num_attention_heads, groups - plan.going["kv_groups"]
        found[config_key(config, "num_attention_heads")] = heads // groups * left
        found[config_key(config, "num_key_value_heads")] = left
        found[config_key(config, "head_dim")] = one.reader.shape[1] // heads
    if plan.experts:
        there = plan.experts[0].mixture.count
        found[experts_key(values, there)] = there - plan.going["experts"]
    if removal.blocks:
        found[config_key(config, "num_hidden_layers")] = len(removal.kept_blocks)
        for key in PER_BLOCK:
            if isinstance(values.get(key), (list, tuple)) and len(values[key]) == len(plan.blocks):
                found[key] = [values[key][number] for number in removal.kept_blocks]
        for key in LEADING_BLOCKS:
            if values.get(key) and values[key] <= len(plan.blocks):
                found[key] = sum(number < values[key] for number in removal.kept_blocks)
        for key in BLOCK_NUMBERS:
            if values.get(key):
                found[key] = [new for new, number in enumerate(removal.kept_blocks) if number in values[key]]
    return found


def smaller_config(config: PreTrainedConfig, removal: Removal) -> PreTrainedConfig:
    """The configuration of the smaller model.

    Raises:
        Exception: whatever the family's own checks raise for a shape that it does not take.
    """
    made = type(config).from_dict({**config.to_dict(), **shape_values(config, removal)})
    made._attn_implementation = config._attn_implementation
    return made


def random_smaller(model: PreTrainedModel, removal: Removal, dtype: torch.dtype) -> PreTrainedModel:
    """What is left of a model, with weights that are drawn, on the CPU."""
    state = torch.get_rng_state()  # drawing them is no part of the run
    try:
        made: PreTrainedModel = type(model)._from_config(smaller_config(model.config, removal), dtype=dtype)
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
    if spanning := _over_all_heads(model, plan):
        return f"its {spanning} is over all heads together"
    if "blocks" in plan.going and (name := told_by_number(model.config)):
        return f"with its {name} a block depends on how many are before it"
    removal = Removal.example(plan)
    try:
        made = skeleton(smaller_config(model.config, removal), type(model))
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
            return f"its {name} would be {there.get(name)}, not {wanted.get(name)}"
    return None


def _over_all_heads(model: PreTrainedModel, plan: Plan) -> str | None:
    """A norm of queries or keys with a gain for every row that makes them: OLMoE's, which a smaller one keeps."""
    for units in plan.units.get("kv_groups", ()):
        attention = model.get_submodule(units.reader.parameter.rsplit(".", 2)[0])
        # Biases of makers are cut with them, and that of the reader is of its outputs.
        linear = {one.parameter.rsplit(".", 2)[1] for one in (units.reader, *(maker for maker, _ in units.makers))}
        rows = {maker.shape[0] for maker, _ in units.makers}
        for name, parameter in attention.named_parameters():
            if parameter.ndim == 1 and len(parameter) in rows and units.count > 1 and name.split(".")[0] not in linear:
                return name
    return None
