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
from gradprobe_hf.model.families import without_cache
from gradprobe_hf.model.fsdp import resharded
from gradprobe_hf.model.loading.pooling import pooling_of
from gradprobe_hf.model.parameters import input_device
from gradprobe_hf.model.passes.patches import eval_mode
from gradprobe_hf.model.passes.upcast import upcast_products
from gradprobe_hf.tasks.embeddings import DIRECTION, POOLING, Pooling, embedded, pooling_weights

SPREAD = 0.01  # of directions: where a second probe finds embeddings that have moved, that counts, and they do not


def with_embeddings(found: Batches, model: PreTrainedModel, seed: int) -> Batches:
    """Batches of text with the model's embeddings as labels, and what `tasks.embeddings` makes a loss with.

    Args:
        seed: draws the directions of gradients.

    Raises:
        ValueError: the model pools in a way that is not known here.
    """
    how, generator = pooling_of(model), torch.Generator().manual_seed(seed)
    items = tuple(_labelled(batch, model, how, generator) for batch in found)
    ways = {"mean": "the mean of its tokens", "cls": "its first token", "last": "its last token"}
    words = f"; a text's embedding is {ways[how]}, normalised, and the loss is 1 - cos to the dense model's"
    return replace(found, items=items, protocol=found.protocol + words)


@torch.no_grad()
def _labelled(
    batch: Mapping[str, Any], model: PreTrainedModel, how: Pooling, generator: torch.Generator
) -> dict[str, Any]:
    mask = batch.get("attention_mask")
    weights = pooling_weights(how, torch.ones_like(batch["input_ids"]) if mask is None else mask)
    there = send_to_device({**batch, POOLING: weights}, input_device(model))
    with resharded(model), eval_mode(model), upcast_products(model):
        labels: Tensor = embedded(model, there, **without_cache(model)).cpu()
    # Row by row, so that they do not depend on how rows are batched.
    directions = SPREAD * torch.stack([torch.randn(row.shape, generator=generator) for row in labels])
    return {**batch, POOLING: weights, DIRECTION: directions, "labels": labels}
