"""Batch checks: values that no model or not this one can take, before the first pass does."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gradprobe_hf.data.batches import AS_GIVEN, BESIDE, Batches
from gradprobe_hf.data.label_checks import POSITIONS, SINGLE_ROWS, check_labels
from gradprobe_hf.data.text.text_options import TextOptions
from gradprobe_hf.model.families import (
    answers_by_position,
    computes_time_first,
    forward_arguments,
    is_causal,
    longest_text,
    needs_pairs,
    place_argument,
    sample_batch,
    sees_ahead,
    shifts_labels,
)
from gradprobe_hf.tasks.columns import IGNORED
from gradprobe_hf.tasks.table import task_of_class

# What says which tokens count, or what is to be predicted, in other code than transformers' models: they take any name.
_LABELS_ELSEWHERE = ("label_ids", "targets", "target", "shift_labels")
_MASKS_ELSEWHERE = (
    *("completion_mask", "assistant_masks", "assistant_mask", "response_mask", "loss_mask", "label_mask"),
    *("prompt_mask", "loss_weights"),
)
_WITHOUT_LOSS = "; score='wanda', or importance='obs' where channels or heads alone go, needs no loss"
_INPUTS = {"input_ids", "attention_mask", "token_type_ids", "pixel_values", "input_features", "input_values"}


def check_batches(model: PreTrainedModel, batches: Batches, part: str, needs_loss: bool) -> None:
    """Raise ValueError for the first batch that the model cannot be called with.

    Args:
        part: what the batches are for: the name of an argument.
        needs_loss: whether a loss is made of them, and no forward pass alone.
    """
    takes = forward_arguments(model)
    alone = all(set(batch) <= _INPUTS for batch in batches)
    may_be_labelled = not takes or "labels" in takes or answers_by_position(model) or needs_pairs(model)
    if needs_loss and not is_causal(model) and alone and may_be_labelled:
        without = _WITHOUT_LOSS * (part == "calibration")
        if needs_pairs(model):
            raise ValueError(
                f"{part}: {type(model).__name__} returns a loss only where a batch has return_loss=True. Give that, "
                f"rows of images with text, or a loss_fn{without}."
            )
        labels = " and ".join(POSITIONS) if answers_by_position(model) else "labels"
        raise ValueError(
            f"{part}: {type(model).__name__} has no loss without {labels}, and a batch has "
            f"{', '.join(batches.items[0])} alone, as plain text has. Give batches with {labels}, or a loss_fn"
            f"{without}."
        )
    if needs_loss and (ahead := sees_ahead(model)):
        why, remedy = ahead
        raise ValueError(
            f"{part}: each token of this {type(model).__name__} sees those that it is to predict, {why}: their cross "
            f"entropy means nothing. {remedy}; or give a loss_fn."
        )
    dimensions = _dimensions(model)
    for batch in batches:
        if takes and not any(name in takes for name in batch if name not in BESIDE):
            raise ValueError(
                f"{part}: {type(model).__name__} takes {model.main_input_name}, and a batch has "
                f"{', '.join(map(str, batch))}."
            )
        if needs_loss and _is_of_transformers(model):
            _check_named_labels(model, batch, takes, part)
            _check_unshifted(model, batch, part)
        _check_rows(model, batch, dimensions, part)
        if isinstance(ids := batch.get("input_ids"), Tensor):
            _check_ids(model, ids, dimensions, part)
            _check_mask(batch.get("attention_mask"), ids, part)
            _check_layout(model, ids, part)
            _check_place(model, batch, part)
        check_labels(model, batch, part, needs_loss)


def check_text_options(options: TextOptions, *read: Batches) -> None:
    """Raise ValueError for options of texts where all that was read are batches of the user's own, as they are."""
    read = tuple(filter(len, read))
    if not read or any(batches.protocol != AS_GIVEN for batches in read):
        return
    for option in fields(options):
        if (value := getattr(options, option.name)) != option.default:
            raise ValueError(
                f"{option.name}={value!r} has no effect here: it belongs to a text or a data set, and batches are "
                f"taken as they are. Leave {option.name} unset."
            )


def check_reads_text(model: PreTrainedModel, part: str) -> None:
    """Raise ValueError where a model does not read plain text."""
    name, needed = type(model).__name__, model.main_input_name
    if needed != "input_ids" or needs_pairs(model):
        alone = {"pixel_values": "images", "input_features": "speech", "input_values": "speech"}
        what = "images with text" if needs_pairs(model) else alone.get(needed, needed)
        task = task_of_class(name, model.config.is_encoder_decoder)
        batches = "batches that it returns a loss for (a DataLoader, or a list)"
        if task is None:
            raise ValueError(
                f"{part}: a {name} reads {what}, of which no batches are made here, nor of text: give {batches}."
            )
        raise ValueError(
            f"{part}: {name} does not read plain text, but {what}: give a data set with them, or {batches}."
        )


def _is_of_transformers(model: PreTrainedModel) -> bool:
    """Whether it is known what the model makes of a batch: a class of its user's may read anything in it."""
    return type(model).forward.__module__.startswith("transformers.")


def _check_named_labels(model: PreTrainedModel, batch: Mapping[str, Any], takes: Collection[str], part: str) -> None:
    """Raise ValueError for labels by a name that the model ignores: every token would count in its loss."""
    labels = batch.get("labels")
    for name in (*_LABELS_ELSEWHERE, *_MASKS_ELSEWHERE):
        if name in batch and name not in takes and not _is_in_labels(name, batch[name], labels):
            masks = "give labels, -100 where a token does not count"
            remedy = "call it 'labels'" if name in _LABELS_ELSEWHERE[:-1] and labels is None else masks
            raise ValueError(f"{part}: a batch has {name!r}, which {type(model).__name__} does not take: {remedy}.")


def _is_in_labels(name: str, values: Any, labels: Any) -> bool:
    """Whether labels say what something beside them does: they leave out what a mask does, as collators make them."""
    if labels is None or name in ("shift_labels", "loss_weights"):
        return False
    if name in _LABELS_ELSEWHERE or name == "prompt_mask":
        return True
    try:
        values, labels = torch.as_tensor(values), torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError):  # something else by that name
        return True
    return values.shape != labels.shape or bool((labels[values == 0] == IGNORED).all())


def _check_unshifted(model: PreTrainedModel, batch: Mapping[str, Any], part: str) -> None:
    """Raise ValueError for labels that are the ids of the next tokens, which would be shifted once more."""
    ids, labels = batch.get("input_ids"), batch.get("labels")
    if not (isinstance(ids, Tensor) and isinstance(labels, Tensor)):
        return
    if ids.ndim != 2 or labels.shape != ids.shape or ids.shape[1] < 2:
        return
    counted = labels[:, :-1] != IGNORED
    is_next, is_same = ((labels[:, :-1] == other)[counted] for other in (ids[:, 1:], ids[:, :-1]))
    if len(is_next) and bool(is_next.all()) and not bool(is_same.all()) and is_causal(model):
        by_model = "shifts labels by itself" if shifts_labels(model) else "is given labels here as all others are"
        raise ValueError(
            f"{part}: the labels of a batch are its input_ids shifted by one, and {type(model).__name__} {by_model}: "
            "give the input_ids as labels, -100 where a token does not count."
        )


def check_named_in_row(row: Mapping[str, Any], read: Collection[str], source: str) -> None:
    """Raise ValueError for what says which tokens count by a name that is not read, where nothing that is read does.

    Args:
        read: the columns that are.
    """
    if any(name in read for name in _MASKS_ELSEWHERE):
        return
    labels = row.get("labels") if "labels" in read else None
    for name in (*_LABELS_ELSEWHERE, *_MASKS_ELSEWHERE):
        value = row.get(name)
        is_of_tokens = isinstance(value, (list, tuple)) and len(value) == len(row["input_ids"])
        if is_of_tokens and not _is_in_labels(name, value, labels):
            remedy = "call it 'labels'" if name in _LABELS_ELSEWHERE else "call it 'completion_mask'"
            raise ValueError(
                f"{source}: rows have {name!r}, a value for each token, which is not read, so that all tokens would "
                f"count: {remedy} (rename_column), or remove it."
            )


def check_one_length(row: Mapping[str, Tensor], names: Collection[str]) -> None:
    """Raise ValueError where a row has more or fewer values than tokens, which the padding of its batch would hide.

    Args:
        names: what it holds that has a value for each token.
    """
    ids = row.get("input_ids")
    if ids is None or ids.ndim != 1:
        return
    for name in names:
        if name in row and row[name].ndim == 1 and len(row[name]) != len(ids):
            raise ValueError(f"a row has {len(ids)} input_ids and {len(row[name])} {name}: give one for each token.")


def _dimensions(model: PreTrainedModel) -> int | None:
    """How many a batch of a model's main input has; None where no batch of it is known, or the code is its user's."""
    if not _is_of_transformers(model):
        return None
    try:
        return sample_batch(model, 1, 1)[model.main_input_name].ndim
    except ValueError:
        return None


def _check_rows(model: PreTrainedModel, batch: Mapping[str, Any], dimensions: int | None, part: str) -> None:
    """Raise ValueError for a row by itself; token ids have an error of their own."""
    name = model.main_input_name
    given = batch.get(name)
    if dimensions in (None, 2) or not isinstance(given, Tensor) or given.ndim != dimensions - 1:
        return
    axes = ("choices", "tokens") if name == "input_ids" else ("...",)
    raise ValueError(
        f"{part}: {name} of a batch are a tensor [rows, {', '.join(axes)}] of {dimensions} dimensions, and these have "
        f"{tuple(given.shape)}: {SINGLE_ROWS}"
    )


def _check_ids(model: PreTrainedModel, ids: Tensor, dimensions: int | None, part: str) -> None:
    is_deeper = dimensions is not None and ids.ndim > dimensions
    if ids.is_floating_point() or ids.ndim < 2 or is_deeper or not ids.numel():
        remedy = " Leave out return_tensors where rows are tokenised (dataset.map)." if is_deeper else ""
        raise ValueError(
            f"{part}: input_ids must be whole numbers [sequences, tokens], got {ids.dtype} {tuple(ids.shape)}.{remedy}"
        )
    rows = _tokens(model)
    lowest, highest = int(ids.min()), int(ids.max())
    if rows is not None and (lowest < 0 or highest >= rows):
        raise ValueError(
            f"{part}: input_ids hold {lowest if lowest < 0 else highest}, and {type(model).__name__} knows the tokens "
            f"0 to {rows - 1}: its tokenizer (processing_class) is larger than its embedding ({rows}), or another's. "
            "Use the model's own, or resize_token_embeddings and train."
        )
    longest = longest_text(model)
    if longest is not None and ids.shape[-1] > longest:
        raise ValueError(
            f"{part}: input_ids have {ids.shape[-1]} tokens in a row, and {type(model).__name__} has {longest} "
            "positions; give rows of that many tokens at most."
        )


def _check_mask(mask: Any, ids: Tensor, part: str) -> None:
    if isinstance(mask, Tensor) and mask.ndim == ids.ndim and mask.shape != ids.shape:
        raise ValueError(
            f"{part}: attention_mask is {tuple(mask.shape)}, and input_ids {tuple(ids.shape)}: they must be alike."
        )
    if isinstance(mask, Tensor) and mask.shape == ids.shape and not bool(mask.any(-1).all()):
        raise ValueError(f"{part}: a row has an attention_mask of zeros alone, and so no token: leave it out.")


def _check_layout(model: PreTrainedModel, ids: Tensor, part: str) -> None:
    if computes_time_first(model) and ids.ndim > 2:  # of a multiple choice
        raise ValueError(
            f"{part}: {type(model).__name__} computes on [tokens, sequences], in which the {ids.shape[-2]} texts of a "
            "row cannot be told apart: it cannot be measured."
        )


def _check_place(model: PreTrainedModel, batch: Mapping[str, Any], part: str) -> None:
    place = place_argument(model)
    if place is not None and place not in batch:
        raise ValueError(
            f"{part}: a {type(model).__name__} reads tokens with their place on the page, and a batch has no "
            f"{place!r}, without which all would stand at one: give it as its processor makes it."
        )


def _tokens(model: PreTrainedModel) -> int | None:
    """How many tokens a model knows; None where it has no one embedding of them."""
    try:
        embedding = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None
    return int(embedding.weight.shape[0]) if isinstance(embedding, nn.Embedding) else None
