"""Texts: what a causal language model does by default beside its calibration: write text of its own, and be measured.

Another text to calibrate on leaves out the first, `evaluation=False` the second. Rows of other models are the user's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from transformers import PreTrainedModel

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.data.text.self_generated import window_bytes, written_at_once
from gradprobe_hf.data.windows import WINDOWS_MEASURED
from gradprobe_hf.estimation.expected_passes import attempts_of
from gradprobe_hf.estimation.formula import TENSORS_OF_THE_LOSS, loss_bytes
from gradprobe_hf.estimation.passes import PassCost
from gradprobe_hf.estimation.work import Walk
from gradprobe_hf.model.families import is_causal

# `[windows, vocabulary]` in float32 where a token is drawn: logits, probabilities, their sums, and what is left of it.
TENSORS_OF_A_DRAW = 4
FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Written:
    """The model's own text, which it writes token by token.

    Attributes:
        passes: forward passes, each of one token of `at_once` windows.
        flops: floating-point operations of them all.
        bytes: keys and values, and what a token is drawn from.
    """

    windows: int
    at_once: int
    passes: int
    flops: int
    bytes: int


@dataclass(frozen=True)
class Measured:
    """The evaluation: perplexity and KL divergence, dense and pruned side by side.

    Attributes:
        windows: of the evaluation text, where nothing is searched for; with `max_metric_drop` a half of them chooses.
        passes: forward passes, each of `rows` windows, dense ones and pruned ones.
        flops: floating-point operations of them all.
        bytes: a forward pass of one model, and the logits of the other.
    """

    windows: int
    rows: int
    passes: int
    flops: int
    bytes: int


def written(model: PreTrainedModel, config: GradProbeConfig, walk: Walk, forward: PassCost) -> Written | None:
    """What the model's own text takes; None of a model that writes none, or a method that reads none.

    Args:
        walk: its batches and their shape.
        forward: the cost of one forward pass of such a batch.
    """
    if not walk.batches or not is_causal(model):
        return None
    windows, length = config.num_samples, walk.length
    at_once = min(windows, written_at_once(model, length))
    passes = math.ceil(windows / at_once) * (length - 1)  # the first token is the tokenizer's
    drawn = TENSORS_OF_A_DRAW * FLOAT32_BYTES * at_once * _vocabulary(model)
    flops = _per_token(forward, walk) * windows * (length - 1)
    return Written(windows, at_once, passes, round(flops), at_once * window_bytes(model, length) + drawn)


def measured(model: PreTrainedModel, config: GradProbeConfig, walk: Walk, forward: PassCost) -> Measured | None:
    """What the evaluation takes by default; None where it is another: of the whole test split, or of the user's rows.

    Args:
        walk: the shape of its batches, which are those of the calibration.
        forward: the cost of one forward pass of such a batch.
    """
    if not is_causal(model) or config.evaluation_protocol == "paper":
        return None
    windows = WINDOWS_MEASURED if config.evaluation_samples is None else config.evaluation_samples
    searched = attempts_of(config)
    choosing = windows // 2 if searched else 0
    # Every attempt is measured on one half, and the dense model is first; the other half is reported of both.
    counts = [(windows - choosing, 2), (choosing, searched + 1 if searched else 0)]
    passes = sum(math.ceil(rows / walk.rows) * times for rows, times in counts)
    tokens = sum(rows * times for rows, times in counts) * walk.length
    logits = loss_bytes(model, walk.rows, walk.length) // TENSORS_OF_THE_LOSS
    flops = round(_per_token(forward, walk) * tokens)
    return Measured(windows, walk.rows, passes, flops, forward.peak_bytes + logits)


def _per_token(forward: PassCost, walk: Walk) -> float:
    return forward.flops / (walk.rows * walk.length)


def _vocabulary(model: PreTrainedModel) -> int:
    head = model.get_output_embeddings()
    return 0 if getattr(head, "weight", None) is None else int(head.weight.shape[0])
