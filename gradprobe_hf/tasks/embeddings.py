"""Embeddings of texts or images: what a model without a head makes of them, and a loss for how far they have moved.

    e = normalised sum_t pooling[t] hidden[t]        loss = 1/2 sum_rows |e - y|^2 = sum_rows 1 - cos(e, y)

A batch has y, of length one too, as `labels` `[rows, hidden]`, and of texts under `POOLING` what each token weighs in
its row, `[rows, tokens]`; images are pooled by the model. One that makes an embedding of a text and one of an image
(CLIP) has both in e, one behind the other, so that cos(e, y) is the mean of their two cosines.

Where y is the model's own e, the loss and its gradients are zero. So n `[rows, hidden]`, under `DIRECTION`, is added to
the gradient by e, and not to the loss. With n normal, of deviation s, the gradient by the weights is J^T n there, J the
derivative of e, and the mean of its squares s^2 diag(J^T J): the diagonal of the loss's Hessian, times a number that is
the same for all weights. (n as drawn from the model's own distribution: Martens, arXiv:1412.1193, section 5.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

# Names of no input of any model.
POOLING = "gradprobe_pooling"
DIRECTION = "gradprobe_direction"
_OF_TOWERS = ("image_embeds", "text_embeds")  # in the output of a model with two
Pooling = Literal["mean", "cls", "last"]


def pooling_weights(how: Pooling, mask: Tensor) -> Tensor:
    """`[rows, tokens]`, of rows that are padded on either side; those of a row add up to one.

    >>> pooling_weights("mean", torch.tensor([[1, 1, 0, 0]])), pooling_weights("last", torch.tensor([[1, 1, 0, 0]]))
    (tensor([[0.5000, 0.5000, 0.0000, 0.0000]]), tensor([[0., 1., 0., 0.]]))
    """
    there = mask.float()
    if how == "mean":
        return there / there.sum(1, keepdim=True)
    place = there.argmax(1) if how == "cls" else there.shape[1] - 1 - there.flip(1).argmax(1)
    return torch.zeros_like(there).scatter_(1, place[:, None], 1.0)


def embedded(model: Any, batch: Mapping[str, Any], **call: Any) -> Tensor:
    """`[rows, hidden]`, each of length one, in float32 at least.

    Args:
        call: what the model is called with beside the batch.

    Raises:
        ValueError: a model of images that makes no single vector of one.
    """
    output = model(**embedding_inputs(batch), **call)
    if POOLING in batch:
        hidden = _wide(output.last_hidden_state)
        return F.normalize((batch[POOLING].to(hidden)[:, None] @ hidden)[:, 0], dim=-1)
    if all(isinstance(getattr(output, name, None), Tensor) for name in _OF_TOWERS):
        return F.normalize(torch.cat([_of_tower(model, output, name) for name in _OF_TOWERS], dim=-1), dim=-1)
    return F.normalize(_wide(_of_images(model, output)), dim=-1)


def _of_tower(model: Any, output: Any, name: str) -> Tensor:
    """`[rows, hidden]` of length one, of the images or the texts of a batch."""
    found = getattr(output, name)
    if found.ndim != 2:
        raise ValueError(
            f"{type(model).__name__} makes {name} of {list(found.shape)}, and no single vector of each row, that could "
            "be compared with the one before: give a loss_fn."
        )
    return F.normalize(_wide(found), dim=-1)


def _of_images(model: Any, output: Any) -> Tensor:
    """`[rows, hidden]`: what the model pools of an image, or its class token where it pools nothing."""
    pooled = getattr(output, "pooler_output", None)
    if pooled is not None:
        return torch.flatten(pooled, 1)  # convolutions leave [rows, hidden, 1, 1]
    hidden = output.last_hidden_state
    if hidden.ndim == 3 and any(name.endswith("cls_token") for name, _ in model.named_parameters()):
        return hidden[:, 0]
    raise ValueError(
        f"{type(model).__name__} makes no single vector of an image, by a pooler or a class token, that could be "
        "compared with the one before: give a loss_fn."
    )


def _wide(hidden: Tensor) -> Tensor:
    return hidden.to(torch.promote_types(hidden.dtype, torch.float32))


def is_for_embedding(batch: Mapping[str, Any]) -> bool:
    """Whether the loss of a batch is how far its embeddings have moved."""
    return DIRECTION in batch


def embedding_loss(model: Any, batch: Mapping[str, Any], **call: Any) -> tuple[Tensor, Tensor]:
    """The loss, summed over the rows, and how many they are: two scalars."""
    found = embedded(model, batch, **call)
    loss = (found - batch["labels"].to(found)).square().sum() / 2
    loss = loss + (batch[DIRECTION].to(found) * (found - found.detach())).sum()  # of zeros, but for their gradient
    return loss, torch.tensor(len(found), device=found.device)


def embedding_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """What the model is called with."""
    return {name: value for name, value in batch.items() if name not in ("labels", POOLING, DIRECTION)}


def predicted_embeddings(model: Any, batch: Mapping[str, Any], _: Any) -> tuple[list[Any], list[Any]]:
    """The embeddings of a batch, and those that they should be."""
    return embedded(model, batch).tolist(), batch["labels"].tolist()
