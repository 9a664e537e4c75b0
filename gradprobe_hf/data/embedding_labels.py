"""Labels for a model that makes embeddings: its own, as it is before anything is pruned.

At them its loss is zero, and so are its gradients. Calibration is towards embeddings that were moved a little, at
random, y = e + s n with n standard normal. Then the gradient is -s J^T n, with J the derivative of the embedding, and
the mean of its squares over n is s^2 diag(J^T J): of the loss that is measured that is the Hessian's diagonal, times a
number that is the same for all weights. (Labels drawn from the model's own distribution: Martens, arXiv:1412.1193, 5.)
"""

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
from gradprobe_hf.model.loading.pooling import pooling_of
from gradprobe_hf.model.parameters import input_device
from gradprobe_hf.model.passes.patches import eval_mode
from gradprobe_hf.model.passes.upcast import upcast_products
from gradprobe_hf.tasks.embeddings import POOLING, Pooling, embedded, pooling_weights

MOVED = 0.01  # of each component, where the embedding is of length one: next to what pruning moves it little


def with_embeddings(found: Batches, model: PreTrainedModel, *, moved_by: int | None) -> Batches:
    """Batches of text with the model's embeddings as labels.

    Args:
        moved_by: a seed, for labels that have gradients; None: they are measured against.

    Raises:
        ValueError: the model pools in a way that is not known here.
    """
    how = pooling_of(model)
    generator = None if moved_by is None else torch.Generator().manual_seed(moved_by)
    items = tuple(_labelled(batch, model, how, generator) for batch in found)
    ways = {"mean": "the mean of its tokens", "cls": "its first token", "last": "its last token"}
    loss = "the loss is 1 - cos to the dense model's"
    if moved_by is not None:
        loss = f"the loss is half the squared distance to that, moved at random by {MOVED} (seed {moved_by})"
    words = f"; a text's embedding is {ways[how]}, normalised, and {loss}"
    return replace(found, items=items, protocol=found.protocol + words)


@torch.no_grad()
def _labelled(
    batch: Mapping[str, Any], model: PreTrainedModel, how: Pooling, generator: torch.Generator | None
) -> dict[str, Any]:
    mask = batch.get("attention_mask")
    weights = pooling_weights(how, torch.ones_like(batch["input_ids"]) if mask is None else mask)
    there = send_to_device({**batch, POOLING: weights}, input_device(model))
    with eval_mode(model), upcast_products(model):
        labels: Tensor = embedded(model, there, **without_cache(model)).cpu()
    if generator is not None:
        # Row by row, so that it does not depend on how they are batched.
        labels = labels + MOVED * torch.stack([torch.randn(row.shape, generator=generator) for row in labels])
    return {**batch, POOLING: weights, "labels": labels}
