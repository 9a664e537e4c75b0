"""Foreseen: what is known of a run before any work, and its user may not know."""

from __future__ import annotations

import logging
from typing import Any

import torch
from accelerate.utils import send_to_device
from transformers import PreTrainedModel

from gradprobe_hf.config.derived import LEAST_DAMPING
from gradprobe_hf.data.batches import SHARED, Batches, row_count, shared_passages, shared_rows
from gradprobe_hf.data.text.special_tokens import tokenizer_of
from gradprobe_hf.model.families import is_causal, is_in_tower, without_cache
from gradprobe_hf.model.loading.checks import MODULES
from gradprobe_hf.model.loading.pooling import is_cross_encoder, is_for_embeddings, lowers_case
from gradprobe_hf.model.loading.processing import about_missing_processing
from gradprobe_hf.model.parameters import input_device
from gradprobe_hf.model.passes.loss import labels_of, summed_loss
from gradprobe_hf.model.passes.patches import eval_mode
from gradprobe_hf.model.targets import go_alone
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.run.request.own_maps import about_own_maps
from gradprobe_hf.tasks.row_reader import is_regression
from gradprobe_hf.tasks.table import counted_as, is_text_alone

logger = logging.getLogger(__name__)

ENOUGH = 10  # tokens for each input of a matrix; with 3, damping="auto" is 13% better (make bench-structure-options)
_ONE_ROW = (
    f"The calibration has one row: none can be held out to choose the damping by, and {LEAST_DAMPING} is taken. Give "
    "more num_samples."
)
APART = 0.01  # relative, of two losses: nearer ones are the same, rounded otherwise


def foreseen_warnings(context: RunContext) -> list[str]:
    """What a report says of the data and the model; logged, too."""
    found = [*_about_data(context), *_about_media(context), *_about_embeddings(context), *_about_chances(context)]
    found += _about_single_rows(context)
    found += [*_about_case(context), *_about_tokens(context), *_about_own_loss(context)]
    found += about_own_maps(context.model, context.config)
    for warning in found:
        logger.warning(warning)
    lacking = about_missing_processing(context.model, context.processing_class)
    return [*context.of_loading, *lacking, *found]  # these were logged as they came up


def _about_data(context: RunContext) -> list[str]:
    halves = {"": context.evaluation, " of the half that chooses": context.selection}
    return [said for half, batches in halves.items() if (said := _about_known(context, batches, half)) is not None]


def _about_known(context: RunContext, batches: Batches, half: str) -> str | None:
    """Where what is measured was also calibrated on.

    Args:
        half: which part of the evaluation it is, if that is to be said.
    """
    if shared := shared_rows(context.calibration, batches):
        rows, _ = counted_as(context.task, batches)
        return f"{shared} of the {batches.samples} evaluation {rows}{half} were also calibrated on; evaluate on others."
    share = shared_passages(context.calibration, batches)
    if share < SHARED:
        return None
    return (
        f"{share:.0%} of the evaluation text{half} was also calibrated on, in windows cut otherwise; evaluate on "
        "another."
    )


def _about_media(context: RunContext) -> list[str]:
    """Where a model that also sees or hears is calibrated on text: what that can do without, an answer may need."""
    task = context.task
    if not context.calibration or task is None or task.medium is None or not is_text_alone(task, context.calibration):
        return []
    media = task.medium.what
    return [
        f"The calibration is text alone, and a {type(context.model).__name__} reads {media}, too: what it loses there "
        f"is neither calibrated on nor measured on text. Calibrate on {media} with text, if it is for those."
    ]


def _about_embeddings(context: RunContext) -> list[str]:
    """Where what makes embeddings is stored as a language model, and loaded as one: Qwen3-Embedding, say."""
    task = context.task
    if task is None or task.embeds or context.loss_fn is not None or not is_for_embeddings(context.model):
        return []
    return [
        f"The {MODULES} beside the model says that it makes embeddings, and it is pruned for {task.name}: give "
        "task='feature-extraction', and it is loaded and measured for those."
    ]


def _about_chances(context: RunContext) -> list[str]:
    """Where two texts are compared by one number, which transformers takes for a measure and not for a chance."""
    is_measured = context.loss_fn is None and (context.config.needs.probes or context.evaluation)
    is_one = type(context.model).__name__.endswith("ForSequenceClassification") and is_regression(context.model.config)
    if not is_measured or not is_one or not is_cross_encoder(context.model) or context.model.config.num_labels != 1:
        return []
    return [
        "The model is a cross-encoder of sentence-transformers with one label, and what is measured is the squared "
        "error of its output, as transformers has it. Where it was trained by the cross entropy of a sigmoid, as most "
        "are, give that as loss_fn."
    ]


def _about_single_rows(context: RunContext) -> list[str]:
    """Where a loss of the user's own is called with one row of several."""
    alone = go_alone(context.model, context.targets) and any(row_count(batch) > 1 for batch in context.calibration)
    if context.loss_fn is None or not context.config.needs.probes or not alone:
        return []
    return [
        f"loss_fn is called with one row at a time, because those of a batch cannot be told apart in all matrices of a "
        f"{type(context.model).__name__}: what it makes of several rows together has no part in the scores."
    ]


def _about_case(context: RunContext) -> list[str]:
    """Where sentence-transformers lower-cases a text, and the tokenizer by itself does not."""
    if not lowers_case(context.model) or not (context.calibration or context.evaluation):
        return []
    tokenizer = tokenizer_of(context.processing_class)
    if tokenizer is None or tokenizer("A")["input_ids"] == tokenizer("a")["input_ids"]:
        return []
    return [
        "sentence-transformers lower-cases every text before this model reads it (do_lower_case), and texts are read "
        "here as they are: give calibration and evaluation in lower case."
    ]


def _about_tokens(context: RunContext) -> list[str]:
    """Where there is so little text that a weight update fits that alone, or is not determined by it."""
    config, tokens = context.config, context.calibration.tokens
    # What an image has in place of tokens is not counted.
    is_text = context.model.main_input_name == "input_ids"
    reading = [one for one in context.targets if not is_in_tower(one.name)]
    if config.update_row.function is None or not is_text or not tokens or not reading:
        return []
    widest = max(reading, key=lambda target: target.shape[1])
    inputs = widest.shape[1]
    if config.structures and config.update_row.chooses_damping:
        if config.holds_out:
            return [_ONE_ROW] * (context.calibration.samples < 2)
        if tokens < ENOUGH * inputs:
            return [
                f"The calibration has {tokens:,} tokens, and `{widest.name}` {inputs:,} inputs: with fewer than "
                f"{ENOUGH} for each least squares fits what is peculiar to this text. Give more num_samples, or "
                "damping='auto'."
            ]
    elif tokens < inputs:
        return [
            f"The calibration has {tokens:,} tokens, and `{widest.name}` {inputs:,} inputs: with fewer tokens than "
            "inputs they do not determine the weight update, and the damping, even rounding (another batch_size), "
            "decides the rest. Give more num_samples."
        ]
    return []


def _about_own_loss(context: RunContext) -> list[str]:
    """Where the class of a language model makes a loss of its own, which nothing here calls."""
    model = context.model
    is_known = type(model).forward.__module__.startswith("transformers.")
    if is_known or context.loss_fn is not None or not is_causal(model) or not context.calibration:
        return []
    batch = context.calibration.in_batches_of(1).items[0]
    if "input_ids" not in batch or (losses := _both_losses(model, batch)) is None:
        return []
    own, cross_entropy = losses
    if abs(own - cross_entropy) <= APART * abs(cross_entropy):
        return []
    return [
        f"{type(model).__name__} returns a loss of its own, {own:.4g} for the first calibration row, where the cross "
        f"entropy of its next tokens is {cross_entropy:.4g}. The latter is what counts here: give a loss_fn, if the "
        "model is for the other."
    ]


@torch.no_grad()
def _both_losses(model: PreTrainedModel, batch: dict[str, Any]) -> tuple[float, float] | None:
    """The mean that the model returns, and that of the cross entropy; None where it returns none."""
    placed = send_to_device(batch, input_device(model))
    with eval_mode(model):
        total, terms = summed_loss(model, placed)
        own = getattr(model(**{**placed, "labels": labels_of(placed, model)}, **without_cache(model)), "loss", None)
    return None if own is None or not terms else (float(own), float(total / terms))
