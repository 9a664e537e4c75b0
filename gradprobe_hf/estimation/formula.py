"""Formulas: what a pass takes, from the shapes of its matrices alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from gradprobe_hf.model.config_names import chosen_experts
from gradprobe_hf.model.families import is_causal, is_fused_experts
from gradprobe_hf.model.targets import Target

# Alive when backward starts: the logits and their gradient.
TENSORS_OF_THE_LOSS = 2
# A block keeps input and output of each linear map, and about as much again for norms, activation functions and
# attention.
KEPT_PER_FEATURE = 2


def loss_bytes(model: PreTrainedModel, rows: int, length: int) -> int:
    """Bytes of the logits `[rows, length, vocabulary]` and their gradient; 0 for a model without an output head."""
    head = model.get_output_embeddings()
    if getattr(head, "weight", None) is None:
        return 0
    itemsize = model.dtype.itemsize
    each = TENSORS_OF_THE_LOSS * itemsize
    # In float32 there is never more than a portion of them where the loss is made here; transformers' own is of all.
    if not is_causal(model) and itemsize < torch.float32.itemsize:
        each = itemsize + TENSORS_OF_THE_LOSS * torch.float32.itemsize
    return each * rows * length * int(head.weight.shape[0])


def block_bytes(model: PreTrainedModel, targets: Sequence[Target], rows: int, length: int) -> dict[str, int]:
    """Block -> bytes that it keeps for backward."""
    kept: dict[str, int] = {}
    for target in targets:
        features = sum(target.shape) * share_of(model, target)
        size = round(KEPT_PER_FEATURE * rows * length * features * model.dtype.itemsize)
        kept[target.block] = kept.get(target.block, 0) + size
    return kept


def active_weights(model: PreTrainedModel, targets: Sequence[Target]) -> int:
    """Target weights that one token passes; of experts those that it is routed to."""
    return round(sum(target.numel * share_of(model, target) for target in targets))


def share_of(model: PreTrainedModel, target: Target) -> float:
    """Fraction of the tokens that reach a matrix, in (0, 1]; experts are taken to be balanced."""
    if target.expert is None:
        return 1.0
    experts = model.get_submodule(target.sites[0].module)
    return min(1.0, chosen_experts(model.config) / experts.num_experts) if is_fused_experts(experts) else 1.0
