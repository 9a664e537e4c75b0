"""The loss: a *sum* over tokens, so that a sequence's gradient does not depend on the batch it is in.

transformers' own losses (transformers/loss/loss_utils.py) are means over the labels that are not -100.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from gradprobe_hf.model.families import (
    decodes_labels,
    forward_arguments,
    ignored_label,
    is_causal,
    leaves_out_padding,
    shifts_labels,
    sums_own_loss,
    transcribes_freely,
    without_cache,
)
from gradprobe_hf.model.masks import unpadded
from gradprobe_hf.tasks.columns import IGNORED
from gradprobe_hf.tasks.embeddings import embedding_inputs, embedding_loss, is_for_embedding
from gradprobe_hf.tasks.media_tokens import words_of
from gradprobe_hf.tasks.row_reader import is_regression
from gradprobe_hf.tasks.table import task_of_class

Batch = Mapping[str, Any]
LossFunction = Callable[[PreTrainedModel, Batch], Tensor]

# Logits that are widened to float32 at a time. On a CPU as many as its caches hold: larger tensors come from the system
# page by page whenever they are made, which takes longer than what is computed with them.
LOGITS_AT_ONCE = {"cpu": 2**20}
LOGITS_AT_ONCE_ELSEWHERE = 2**23


def summed_loss(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss summed over the batch, and the number of terms: tokens, or examples for a model without a token loss.

    Args:
        model: called as `model(**batch)`.
        batch: for a causal language model `input_ids` `[sequences, tokens]`, and optionally `attention_mask` and
            `labels` (label t is token t, as in transformers); for any other model what it needs to return a loss.

    Returns:
        Two scalars on the model's device: the loss in nats, with its graph, and the number of terms.

    Raises:
        ValueError: the model returns no loss for this batch.
    """
    if is_causal(model) and "input_ids" in batch:
        return _causal_loss(model, batch)
    if is_for_embedding(batch):
        return embedding_loss(model, batch, **without_cache(model))
    # A key-value cache would be in memory for nothing, and a block that is recomputed would append to it again.
    try:
        with _WideLosses():
            output = model(**{**batch, **without_cache(model)})
    except NotImplementedError as error:
        # Depth, and images made larger: "Training is not ...". Torch raises it too, of operations that a device lacks.
        if not str(error).startswith("Training"):
            raise
        raise ValueError(
            f"{type(model).__name__} has no loss of its own ({error}): give a loss_fn, which is called with the model "
            "and a batch and returns the summed loss."
        ) from error
    loss = getattr(output, "loss", None)
    if loss is None:
        takes = forward_arguments(model)
        needed = "batches with 'labels'" if not takes or "labels" in takes else "what else it needs for one"
        raise ValueError(
            f"{type(model).__name__} returns no loss for a batch of {', '.join(batch)}. Give {needed}, or a "
            "loss_fn, which is called with the model and a batch and returns the summed loss."
        )
    terms = _mean_over(model, batch)
    loss = loss.float() if loss.dtype in _HALF else loss  # its product with their number ends at 65,504 in float16
    return (loss if sums_own_loss(model) else loss * terms), terms


_HALF = (torch.float16, torch.bfloat16)
_LOSSES = (F.cross_entropy, F.nll_loss, F.binary_cross_entropy_with_logits, F.mse_loss, F.l1_loss)


class _WideLosses(TorchFunctionMode):
    """What models of transformers make their loss with, in float32 of logits in half precision.

    A mean of 4.5747 is 4.57 or 4.55 otherwise, and a model that has lost little has lost nothing.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LOSSES:
            args = [_wide(one) for one in args]
            kwargs = {name: _wide(one) for name, one in kwargs.items()}
        return func(*args, **kwargs)


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALF else value


def _causal_loss(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """Next-token cross entropy, in float32 at least."""
    logits, labels = next_token_logits(model, batch)
    return SummedCrossEntropy.apply(logits, labels), (labels != IGNORED).sum()


def next_token_logits(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """What a causal language model predicts: logits `[sequences * tokens, vocabulary]`, and the labels
    `[sequences * tokens]`, -100 where nothing is to be predicted."""
    # Called without labels: the model's own loss is a mean, and may have auxiliary losses added (of a router, say).
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits
    if logits.shape[:2] != batch["input_ids"].shape:
        raise ValueError(
            f"{type(model).__name__} predicts {list(logits.shape[:2])} tokens of {list(batch['input_ids'].shape)} (it "
            "adds some of its own, say): which of them belong together is not known here. Give a loss_fn."
        )
    return logits.flatten(0, 1), next_token_labels(batch, model).to(logits.device).flatten()


def next_token_labels(batch: Batch, model: PreTrainedModel | None = None) -> Tensor:
    """What each token is to predict, `[sequences, tokens]`; -100: nothing. Args: `model`: see `labels_of`."""
    # Shift the labels, not the logits: a slice of those, flattened, is a copy of [sequences, tokens, vocabulary].
    labels = F.pad(labels_of(batch, model)[:, 1:], (0, 1), value=IGNORED)
    mask = batch.get("attention_mask")
    if mask is not None and mask.shape == labels.shape:  # with left padding, the last pad predicts the first token
        labels = labels.masked_fill(mask == 0, IGNORED)
    return labels


def counted_labels(model: PreTrainedModel, batch: Batch) -> int | None:
    """How many labels of a batch the model's own loss counts; None: it has no labels that could count nowhere."""
    labels = _labels_by_mask(batch) if leaves_out_padding(model) else batch.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return None
    if is_causal(model) and "input_ids" in batch and labels.shape == batch["input_ids"].shape:
        return int((next_token_labels(batch, model) != IGNORED).sum())
    shifted = labels[:, 1:] if labels.ndim >= 2 and shifts_labels(model) else labels
    return int((shifted != ignored_label(model)).sum())


def is_in_nats(model: PreTrainedModel) -> bool:
    """Whether the model's own loss is of a probability; False: of a measure, a squared error say, or not known."""
    if is_causal(model):
        return True
    task = task_of_class(type(model).__name__, model.config.is_encoder_decoder)
    return task is not None and not task.embeds and not (task.one_label and is_regression(model.config))


def forward_only(model: PreTrainedModel, batch: Batch) -> Any:
    """A forward pass for what happens on the way, and its output: no loss and no key-value cache."""
    if is_for_embedding(batch):
        return model(**embedding_inputs(batch), **without_cache(model))
    unused = () if decodes_labels(model) else ("labels",)  # any other model would only compute a loss
    return model(**{name: value for name, value in batch.items() if name not in unused}, **without_cache(model))


class SummedCrossEntropy(torch.autograd.Function):
    """Cross entropy summed over the labels that are not -100, in float32 at least, a few tokens at a time.

        loss = sum_t log(sum_v exp(z[t, v])) - z[t, label_t]      d loss / d z = softmax(z) - onehot(label)

    Equal to `F.cross_entropy(logits.float(), labels, reduction="sum")`, which holds four float32 tensors of the size of
    the logits: 1.6 GB with a vocabulary of 49,152 and 2,048 tokens, more than all else that SmolLM2's pass needs. Here
    there is one, the gradient, in the dtype of the logits.

    Shapes: logits z `[tokens, vocabulary]`, labels `[tokens]`.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        counted = labels != IGNORED
        chosen = labels.masked_fill(~counted, 0)[:, None]
        wide = _workspace(logits)
        normalisers = wide.new_empty(len(logits))
        for rows in portions(logits):
            part = wide[: rows.stop - rows.start].copy_(logits[rows])
            highest = part.amax(-1, keepdim=True)  # subtracted before exp, which would overflow
            normalisers[rows] = part.sub_(highest).exp_().sum(-1).log_() + highest[:, 0]
        losses = normalisers - logits.gather(1, chosen)[:, 0].to(normalisers.dtype)
        ctx.save_for_backward(logits, normalisers, chosen, counted)
        return losses.masked_fill(~counted, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None]:
        """`softmax - onehot`, times the gradient of the sum."""
        # The softmax is made again from the normalisers `[tokens]`: saved, it would take as much memory as the logits.
        logits, normalisers, chosen, counted = ctx.saved_tensors
        gradient, wide = torch.empty_like(logits), _workspace(logits)
        for rows in portions(logits):
            part = wide[: rows.stop - rows.start].copy_(logits[rows]).sub_(normalisers[rows, None]).exp_()
            part.scatter_add_(1, chosen[rows], torch.full_like(part[:, :1], -1))
            gradient[rows] = part.mul_((scale * counted[rows])[:, None])
        return gradient, None


def _workspace(logits: Tensor) -> Tensor:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return torch.empty(min(_rows_at_once(logits), len(logits)), logits.shape[1], dtype=dtype, device=logits.device)


def portions(logits: Tensor) -> Iterator[slice]:
    """Rows of logits that are worked on at a time."""
    size = _rows_at_once(logits)
    for start in range(0, len(logits), size):
        yield slice(start, min(start + size, len(logits)))


def _rows_at_once(logits: Tensor) -> int:
    return max(1, LOGITS_AT_ONCE.get(logits.device.type, LOGITS_AT_ONCE_ELSEWHERE) // logits.shape[1])


def labels_of(batch: Batch, model: PreTrainedModel | None) -> Tensor:
    """The given labels, or the tokens themselves, but for those of images and sound; -100 at padding.

    Args:
        model: whose tokens they are; None: they are known to be of words.
    """
    ids = batch.get("input_ids")
    if model is not None and batch.get("labels") is None and isinstance(ids, Tensor):
        # They are many times as many as the words, and a processor's batch for `generate` has no labels.
        ids = words_of(ids, model.config)
    return _labels_by_mask(batch, ids)


def _labels_by_mask(batch: Batch, default: Tensor | None = None) -> Any:
    labels, mask = batch.get("labels"), batch.get("attention_mask")
    labels = default if labels is None else labels
    if not isinstance(labels, Tensor) or (seen := unpadded(mask, labels)) is None:
        return labels
    return labels.masked_fill(~seen, IGNORED)


def _mean_over(model: PreTrainedModel, batch: Batch) -> Tensor:
    """The number of terms that transformers averaged over: labels that are not -100, or examples."""
    labels = _labels_by_mask(batch) if leaves_out_padding(model) else batch.get("labels")
    if not isinstance(labels, Tensor):
        first = next(value for value in batch.values() if isinstance(value, Tensor))
        return torch.tensor(first.shape[0], device=first.device)
    if labels.ndim >= 2 and not labels.is_floating_point() and not transcribes_freely(model):
        shifted = labels[:, 1:] if shifts_labels(model) else labels
        return (shifted != ignored_label(model)).sum()
    if labels.ndim == 1 and not labels.is_floating_point() and getattr(model.config, "num_labels", 0) > 1:
        return (labels != IGNORED).sum()  # classes, whose cross entropy leaves these out
    return torch.tensor(labels.shape[0], device=labels.device)
