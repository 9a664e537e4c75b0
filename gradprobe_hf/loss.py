"""The loss that is differentiated and measured: a *sum* over tokens, so that batching never changes a gradient.

Source of the shapes: transformers/loss/loss_utils.py; its losses are means over the labels that are not -100.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

Batch = Mapping[str, Any]
LossFunction = Callable[[PreTrainedModel, Batch], Tensor]

IGNORED = -100


def summed_loss(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """Sum of the loss over the batch, and over how many terms: tokens, or examples where a model has no token loss.

    Args:
        model: called as `model(**batch)`.
        batch: for a causal language model `input_ids` `[sequences, tokens]`, and optionally `attention_mask` and
            `labels` (as transformers shifts them: label t is token t); for every other model whatever it needs to
            return a loss.

    Returns:
        Two scalars on the model's device: the loss in nats, with its graph, and the number of terms.

    Raises:
        ValueError: the model returns no loss for this batch.
    """
    if is_causal(model) and "input_ids" in batch:
        return _causal_loss(model, batch)
    output = model(**batch)
    loss = getattr(output, "loss", None)
    if loss is None:
        raise ValueError(
            f"{type(model).__name__} returns no loss for a batch of {', '.join(batch)}. Give batches with 'labels', "
            "or a loss_fn(model, batch) that returns the summed loss."
        )
    terms = _mean_over(model, batch)
    return loss * terms, terms


def objective(model: PreTrainedModel) -> str | None:
    """What the model is trained for, as transformers names its losses: "ForCausalLM", "ForMaskedLM", ...

    transformers reads it off the class's name, which for GPT-2's `GPT2LMHeadModel` says nothing; the auto mapping does.
    """
    # FSDP2 renames the class of what it shards.
    if type(model).__name__.removeprefix("FSDP") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return "ForCausalLM"
    return getattr(model, "loss_type", None)


def is_causal(model: PreTrainedModel) -> bool:
    """Whether the model predicts the next token from the ones before it."""
    return objective(model) == "ForCausalLM" and not model.config.is_encoder_decoder


def _causal_loss(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """Next-token cross entropy, in float32 at least. The model's own loss is a mean, and may have others added."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    # Shift the labels, not the logits: shifting logits would copy [sequences, tokens, vocabulary].
    labels = F.pad(_labels(batch).to(logits.device)[:, 1:], (0, 1), value=IGNORED)
    mask = batch.get("attention_mask")
    if mask is not None and mask.shape == labels.shape:  # padding predicts nothing, on the left either
        labels = labels.masked_fill(mask == 0, IGNORED)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss, (labels != IGNORED).sum()


def _labels(batch: Batch) -> Tensor:
    """The given labels, or the tokens themselves; padding counts for nothing."""
    labels = batch.get("labels")
    if labels is None:
        labels = batch["input_ids"]
    mask = batch.get("attention_mask")
    return labels if mask is None or mask.shape != labels.shape else labels.masked_fill(mask == 0, IGNORED)


def _mean_over(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Over how many terms transformers averaged: the labels not ignored, or the examples."""
    labels = batch.get("labels")
    if not isinstance(labels, Tensor):
        first = next(value for value in batch.values() if isinstance(value, Tensor))
        return torch.tensor(first.shape[0], device=first.device)
    if labels.ndim >= 2 and not labels.is_floating_point():
        shifted = labels[:, 1:] if _shifts_labels(model) else labels
        return (shifted != IGNORED).sum()
    return torch.tensor(labels.shape[0], device=labels.device)


def _shifts_labels(model: PreTrainedModel) -> bool:
    """Decoder-only models called `ForConditionalGeneration` (vision-language models) shift; encoder-decoders do not."""
    causal = objective(model) in ("ForCausalLM", "ForConditionalGeneration")
    return causal and not model.config.is_encoder_decoder
