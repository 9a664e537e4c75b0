"""Configuration names: what families call a value in their configuration, and what a smaller model's says otherwise.

Nothing heavy is imported here, because the configuration and the command line read the table of structures, whose rows
are made of these, before anything is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

# How configurations call the number of experts that a token is routed to.
_CHOSEN_EXPERTS = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "num_selected_experts")
# How configurations, and routers, call the number of experts that there are.
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
# How configurations call the channels of a feed-forward network; of two stacks together.
_WIDTHS = (
    *(("intermediate_size",), ("ffn_dim",), ("ffn_hidden_size",), ("n_inner",), ("d_ff",), ("hidden_dim",)),
    ("encoder_ffn_dim", "decoder_ffn_dim"),
)
# What has the width of a feed-forward network computed from the configuration's, where it is set -> that: LFM2 takes
# two thirds of it, rounded up. A smaller model has the width itself, and the switch off.
_COMPUTED_WIDTHS = {"block_auto_adjust_ff_dim": "intermediate_size"}
# Lists in a configuration that have one element for each block.
_PER_BLOCK = (
    *("layer_types", "no_rope_layers", "layer_rope_theta", "mlp_layer_types", "indexer_types"),
    *("intermediate_size", "moe_topk"),
)
# Those of them that say which tokens a block sees, and whether it knows where they are.
_SIGHT = ("layer_types", "no_rope_layers", "layer_rope_theta", "attention_layers")
# Numbers in a configuration up to which blocks are of another kind: full attention, no experts.
_LEADING_BLOCKS = ("max_window_layers", "first_k_dense_replace", "num_dense_layers")
# Lists in a configuration with the numbers of some blocks.
_BLOCK_NUMBERS = ("mlp_only_layers", "full_attn_idxs", "attn_layer_indices", "rope_scaling_layers")
# What a configuration says of some blocks alone: number -> values.
_BY_BLOCK = "per_layer_config"
# What blocks do by their own numbers, which change when one before them goes: attention is scaled by it (GPT-2), every
# n-th has experts.
_BY_NUMBER = (
    *("scale_attn_by_inverse_layer_idx", "decoder_sparse_step", "moe_layer_interval"),
    *("attn_layer_period", "expert_layer_period"),  # Jamba
    "block_types",  # RecurrentGemma: kinds that take turns
    "indexer_types",  # DeepSeek's sparse attention: some blocks read the tokens that the one before them has chosen
)


def text_attribute(config: PreTrainedConfig, name: str, default: Any = None) -> Any:
    """A value of the language model's configuration (`hidden_size`, `max_position_embeddings`, ...), if it has it."""
    return getattr(config.get_text_config(), name, None) or default


def of_each_block(config: PreTrainedConfig, name: str, default: Any = None) -> list[Any]:
    """A value of the language model's configuration that may differ from block to block, for each of them."""
    text = config.get_text_config()
    if name in _unlike(text):
        return [getattr(one, name, None) or default for one in text.per_layer_config]
    return [getattr(text, name, None) or default] * (getattr(text, "num_hidden_layers", None) or 1)


def seen_by_block(config: PreTrainedConfig, blocks: int) -> list[str]:
    """What a configuration says of the tokens that each of so many blocks sees, `"full_attention"` say; or nothing."""
    lists = [getattr(config, name, None) for name in _SIGHT]
    said = [values for values in lists if isinstance(values, (list, tuple)) and len(values) == blocks]
    return [" ".join(str(values[number]) for values in said) for number in range(blocks)]


def _unlike(config: PreTrainedConfig) -> Collection[str]:
    """Values that a configuration has for each block: Gemma 4's heads are wider where attention is full.

    To ask it for one of them is an error of transformers', also with a default.
    """
    return getattr(config, "per_layer_attributes", None) or ()  # None too: of a configuration without any


def chosen_experts(config: PreTrainedConfig) -> int:
    """How many experts a token is routed to, at most; 1 for a dense model."""
    text = config.get_text_config()
    found = next((getattr(text, name) for name in _CHOSEN_EXPERTS if getattr(text, name, None)), 1)
    return max(found) if isinstance(found, (list, tuple)) else int(found)  # HunYuan has one for each block


def router_counts(router: nn.Module) -> list[str]:
    """Attributes of a router that say how many experts there are."""
    return [name for name in _EXPERT_COUNTS if isinstance(router.__dict__.get(name), int)]


def key_value_heads(config: PreTrainedConfig) -> int:
    """Heads with keys and values of their own; all, where several queries share none. Raises: ValueError."""
    if "num_key_value_heads" in _unlike(config):
        counts = sorted(set(of_each_block(config, "num_key_value_heads")))
        raise ValueError(f"its blocks have {', '.join(map(str, counts))} of them by its configuration")
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def told_by_number(config: PreTrainedConfig) -> str | None:
    """The name of a value in a configuration by which blocks differ with their numbers; None if there is none."""
    values = {name: getattr(config, name, None) for name in _BY_NUMBER}
    known = {*_PER_BLOCK, *_BLOCK_NUMBERS, "layers_block_type"}  # the last is another name for `layer_types`
    # What stands for each block under a name that nobody has told what it is cannot be cut.
    blocks = getattr(config, "num_hidden_layers", None)
    values |= {
        name: list(map(str, value))
        for name, value in config.to_dict().items()
        if name not in known and isinstance(value, (list, tuple)) and len(value) == blocks and "token_id" not in name
    }
    return next((name for name, value in values.items() if value is True or _kinds(value) > 1), None)


@dataclass(frozen=True)
class Left:
    """What a smaller model has of a structure.

    Attributes:
        there: how many the model has.
        kept: numbers of those that stay; of units and experts, which are alike in every block, any so many.
        columns: of units, what reads them has so many inputs.
    """

    there: int
    kept: Sequence[int]
    columns: int = 0


def narrower(config: PreTrainedConfig, left: Left) -> dict[str, Any]:
    """What the configuration says otherwise with fewer channels in the feed-forward networks. Raises: ValueError."""
    values = config.to_dict()
    found: dict[str, Any] = dict.fromkeys(_feed_forward_keys(values, left.there), len(left.kept))
    return found | {switch: False for switch in _COMPUTED_WIDTHS if values.get(switch)}


def with_fewer_heads(config: PreTrainedConfig, left: Left) -> dict[str, Any]:
    """With fewer key-value heads, each with its query heads. How wide one is has to be said: it was a share of all."""
    heads = config.num_attention_heads
    found = {
        _key(config, "num_attention_heads"): heads // left.there * len(left.kept),
        _key(config, "num_key_value_heads"): len(left.kept),
    }
    if "head_dim" in _unlike(config):  # it is said of each block
        return found
    return found | {_key(config, "head_dim"): left.columns // heads}


def with_fewer_experts(config: PreTrainedConfig, left: Left) -> dict[str, Any]:
    """With fewer experts in every mixture. Raises: ValueError."""
    return {_experts_key(config.to_dict(), left.there): len(left.kept)}


def with_fewer_blocks(config: PreTrainedConfig, left: Left) -> dict[str, Any]:
    """With fewer blocks, and with what else is said of each of them by its number."""
    values = config.to_dict()
    found: dict[str, Any] = {_key(config, "num_hidden_layers"): len(left.kept)}
    for key in _PER_BLOCK:
        if isinstance(values.get(key), (list, tuple)) and len(values[key]) == left.there:
            found[key] = [values[key][number] for number in left.kept]
    for key in _LEADING_BLOCKS:
        if values.get(key) and values[key] <= left.there:
            found[key] = sum(number < values[key] for number in left.kept)
    for key in _BLOCK_NUMBERS:
        if values.get(key):
            found[key] = [new for new, number in enumerate(left.kept) if number in values[key]]
    if values.get(_BY_BLOCK):
        of_block = {int(number): own for number, own in values[_BY_BLOCK].items()}
        found[_BY_BLOCK] = {new: of_block[number] for new, number in enumerate(left.kept) if number in of_block}
    return found


def _kinds(value: int | Sequence[str] | None) -> int:
    """How many kinds of blocks a period stands for, or a list of what takes turns."""
    return len(set(value)) if isinstance(value, Sequence) else value or 0


def _key(config: PreTrainedConfig, name: str) -> str:
    """What the family's configuration file calls a value: GPT-2 has `n_layer` for `num_hidden_layers`."""
    return str(config.attribute_map.get(name, name))


def _feed_forward_keys(values: dict[str, Any], width: int) -> tuple[str, ...]:
    """What a configuration's values call the channels of a feed-forward network: one name, or one for each stack.

    Raises:
        ValueError: none of the known names has this width.
    """
    for switch, name in _COMPUTED_WIDTHS.items():
        if values.get(switch):
            return (name,)
    for names in _WIDTHS:
        # GPT-2 writes none for four times the hidden size.
        if all(name in values and values[name] in (width, None) for name in names):
            return names
    raise ValueError(f"its configuration has no name for {width} FFN channels")


def _experts_key(values: dict[str, Any], count: int) -> str:
    """What a configuration's values call the number of experts.

    Raises:
        ValueError: none of the known names has this value.
    """
    found = next((name for name in _EXPERT_COUNTS if values.get(name) == count), None)
    if found is None:
        raise ValueError(f"its configuration has no name for {count} experts")
    return found
