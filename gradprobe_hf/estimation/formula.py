"""Formulas: what can be said of a pass from the shapes of its matrices alone."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from gradprobe_hf.model.families import chosen_experts, is_fused_experts
from gradprobe_hf.model.targets import Target

# Alive at the top of backward: the logits and their gradient; what is in float32 of them is a portion (loss.py).
TENSORS_OF_THE_LOSS = 2
# A block keeps the input of each linear map and its output, and about as much again for norms, activation functions
# and attention.
KEPT_PER_FEATURE = 2
# Of a block of which only the width is known: `34 tokens * hidden` bytes in a dtype of two bytes, with fused attention
# (Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", equation 2).
KEPT_PER_HIDDEN = 17


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
    experts = model.get_submodule(target.sites[0].module)
    return min(1.0, chosen_experts(model.config) / experts.num_experts) if is_fused_experts(experts) else 1.0
