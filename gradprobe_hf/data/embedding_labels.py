"""Labels for a model that makes embeddings: its own, as it is before anything is pruned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from transformers import PreTrainedModel

from gradprobe_hf.data.batches import Batches
from gradprobe_hf.model.families import needs_pairs, without_cache
from gradprobe_hf.model.fsdp import resharded
from gradprobe_hf.model.loading.pooling import pooling_of
from gradprobe_hf.model.parameters import input_device
from gradprobe_hf.model.passes.patches import eval_mode
from gradprobe_hf.model.passes.upcast import upcast_products
from gradprobe_hf.tasks.embeddings import DIRECTION, POOLING, Pooling, embedded, pooling_weights

SPREAD = 0.01  # of directions: where a second probe finds embeddings that have moved, that counts, and they do not


def with_embeddings(found: Batches, model: PreTrainedModel, seed: int) -> Batches:
    """Batches with the model's embeddings as labels, and what `tasks.embeddings` makes a loss with.

    Args:
        seed: draws the directions of gradients.

    Raises:
        ValueError: the model pools in a way that is not known here.
    """
    if is_of_pairs := needs_pairs(model):
        _check_pairs(found, model)
    reads_text = any("input_ids" in batch for batch in found)
    how = pooling_of(model) if reads_text and not is_of_pairs else None
    generator = torch.Generator().manual_seed(seed)
    items = tuple(_labelled(batch, model, how, generator) for batch in found)
    if how is None and items:
        _check_repeats(items[0], model)
    pooled = _OF_PAIRS if is_of_pairs else _WAYS[how]
    words = f"; {pooled}, normalised, and the loss is 1 - cos to the dense model's"
    return replace(found, items=items, protocol=found.protocol + words)


_WAYS: dict[Pooling | None, str] = {
    "mean": "a text's embedding is the mean of its tokens",
    "cls": "a text's embedding is its first token",
    "last": "a text's embedding is its last token",
    None: "an image's embedding is what the model pools, or its class token where it pools nothing",
}


_OF_PAIRS = "the embeddings are those of an image and of its text"


@torch.no_grad()
def _labelled(
    batch: Mapping[str, Any], model: PreTrainedModel, how: Pooling | None, generator: torch.Generator
) -> dict[str, Any]:
    """Args: `how` tokens are pooled; None: of images, by the model."""
    if how is not None:
        mask = batch.get("attention_mask")
        batch = {**batch, POOLING: pooling_weights(how, torch.ones_like(batch["input_ids"]) if mask is None else mask)}
    labels = _embedded(batch, model)
    # Row by row, so that they do not depend on how rows are batched.
    directions = SPREAD * torch.stack([torch.randn(row.shape, generator=generator) for row in labels])
    return {**batch, DIRECTION: directions, "labels": labels}


def _embedded(batch: Mapping[str, Any], model: PreTrainedModel) -> Tensor:
    there = send_to_device(batch, input_device(model))
    with resharded(model), eval_mode(model), upcast_products(model):
        return embedded(model, there, **without_cache(model)).cpu()


def _check_pairs(found: Batches, model: PreTrainedModel) -> None:
    missing = next((name for batch in found for name in ("input_ids", "pixel_values") if name not in batch), None)
    if missing:
        raise ValueError(
            f"{type(model).__name__} makes embeddings of images with text, and the data has no {missing!r}: give both "
            "in each row."
        )


@torch.no_grad()
def _check_repeats(batch: Mapping[str, Any], model: PreTrainedModel) -> None:
    """Raise ValueError for a model that hides parts of an image at random: it would seem to move by itself."""
    if not torch.allclose(_embedded(batch, model), batch["labels"], atol=0.01):
        raise ValueError(
            f"{type(model).__name__} makes another embedding of the same image each time, so that nobody could tell "
            "what pruning does to it: load it so that it hides nothing (mask_ratio=0 of a masked autoencoder)."
        )
