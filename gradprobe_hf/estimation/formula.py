"""Formulas: what can be said of a pass from the shapes of its matrices alone."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedConfig, PreTrainedModel

from gradprobe_hf.model.targets import Target, is_fused_experts

# Alive at the top of backward: the logits and their gradient; what is in float32 of them is a portion (loss.py).
TENSORS_OF_THE_LOSS = 2
# A block keeps the input of each linear map and its output, and about as much again for norms, activation functions
# and attention.
KEPT_PER_FEATURE = 2
# Of a block of which only the width is known: `34 tokens * hidden` bytes in a dtype of two bytes, with fused attention
# (Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", equation 2).
KEPT_PER_HIDDEN = 17
CHOSEN_EXPERTS = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "num_selected_experts")


def loss_bytes(model: PreTrainedModel, rows: int, length: int) -> int:
    """The loss end of a language model: tensors `[sequences, tokens, vocabulary]` in its dtype."""
    head = model.get_output_embeddings()
    if getattr(head, "weight", None) is None:
        return 0
    return TENSORS_OF_THE_LOSS * model.dtype.itemsize * rows * length * int(head.weight.shape[0])


def block_bytes(model: PreTrainedModel, targets: Sequence[Target], rows: int, length: int) -> dict[str, int]:
    """What each block keeps for backward: `KEPT_PER_FEATURE` times every target's input and output."""
    kept: dict[str, int] = {}
    for target in targets:
        features = sum(target.shape) * share_of(model, target)
        size = round(KEPT_PER_FEATURE * rows * length * features * model.dtype.itemsize)
        kept[target.block] = kept.get(target.block, 0) + size
    return kept


def active_weights(model: PreTrainedModel, targets: Sequence[Target]) -> int:
    """Target weights that one token passes: of experts, those that it is sent to."""
    return round(sum(target.numel * share_of(model, target) for target in targets))


def share_of(model: PreTrainedModel, target: Target) -> float:
    """The share of the tokens that reach a matrix when experts are balanced, in (0, 1]."""
    if target.expert is None:
        return 1.0
    config = model.config.get_text_config()
    chosen = next((getattr(config, name) for name in CHOSEN_EXPERTS if getattr(config, name, None)), 1)
    experts = model.get_submodule(target.sites[0].module)
    return min(1.0, chosen / experts.num_experts) if is_fused_experts(experts) else 1.0


def bytes_by_width(config: PreTrainedConfig, rows: int, length: int, itemsize: int, checkpoint: bool) -> int:
    """What a batch takes, where not even a skeleton of the model can be made: from its width, depth and vocabulary."""
    text = config.get_text_config()
    hidden, layers, vocabulary = (
        getattr(text, name, None) or otherwise
        for name, otherwise in (("hidden_size", 1024), ("num_hidden_layers", 24), ("vocab_size", 0))
    )
    block = KEPT_PER_HIDDEN * itemsize * rows * length * hidden
    kept = block + layers * itemsize * rows * length * hidden if checkpoint else layers * block
    return kept + TENSORS_OF_THE_LOSS * itemsize * rows * length * vocabulary
