"""Label checks: what no loss of the model can be made of, or another than is meant, before the first pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gradprobe_hf.model.families import (
    answers_by_position,
    chooses_among_texts,
    forward_arguments,
    frame_counts,
    ignored_label,
    is_causal,
    is_transducer,
    makes_decoder_inputs_of_source,
    transcribes_freely,
)
from gradprobe_hf.tasks.columns import IGNORED
from gradprobe_hf.tasks.image_texts import sees_prefix_whole

BEYOND = 1.0  # how far boxes of real data may reach past the edges of their image, in images; pixels are hundreds
POSITIONS = ("start_positions", "end_positions")
_SINGLE, _SEVERAL = "single_label_classification", "multi_label_classification"
_ONE_CLASS = tuple(f"For{of}Classification" for of in ("Sequence", "Image"))
SINGLE_ROWS = (
    "items of a list are batches. Give single rows as a data set, datasets.Dataset.from_list(rows), or put them into "
    "batches with a DataLoader."
)


def check_labels(model: PreTrainedModel, batch: Mapping[str, Any], part: str, needs_loss: bool) -> None:
    """Raise ValueError for labels of a batch that the model cannot take, or takes for something else.

    Args:
        part: what the batch is for: the name of an argument.
        needs_loss: whether a loss is made of it, and no forward pass alone.
    """
    if answers_by_position(model) and needs_loss:
        _check_positions(model, batch, part)
    labels = batch.get("labels")
    if isinstance(labels, Sequence) and needs_loss and type(model).__name__.endswith("ForObjectDetection"):
        _check_boxes(model, labels, part)
    if needs_loss and (isinstance(labels, (int, float)) or (isinstance(labels, Tensor) and not labels.ndim)):
        raise ValueError(
            f"{part}: labels of a batch are a tensor [rows, ...], and these are one number, {float(labels):g}: "
            f"{SINGLE_ROWS}"
        )
    if not isinstance(labels, Tensor):
        return
    if needs_loss:
        _check_one_class(model, labels, part)
        _check_several(model, labels, part)
    if labels.is_floating_point():
        if needs_loss:
            _check_whole(model, labels, part)
        return
    _check_shape(model, batch, labels, part)
    _check_classes(model, batch, labels, part)
    _check_predicted(model, batch.get("token_type_ids"), labels, part)
    if needs_loss and model.config.is_encoder_decoder and model.can_generate() and not is_transducer(model):
        _check_written(model, batch, labels, part)
    if needs_loss and transcribes_freely(model):
        _check_frames(model, batch, labels, part)


def _check_one_class(model: PreTrainedModel, labels: Tensor, part: str) -> None:
    """Of a classifier that gives a row one class. Fractions make transformers take it for one with several."""
    kind = getattr(model.config, "problem_type", None) or ("" if labels.is_floating_point() else _SINGLE)
    if kind != _SINGLE or not type(model).__name__.endswith(_ONE_CLASS) or labels.ndim < 2 or labels.shape[-1] < 2:
        return
    raise ValueError(
        f"{part}: labels of a {type(model).__name__} are the number of each row's class, [rows], and these are "
        f"{tuple(labels.shape)}. Give labels.argmax(-1) of a 1 among zeros; where a row has several classes the config "
        "says problem_type='multi_label_classification'."
    )


def _check_several(model: PreTrainedModel, labels: Tensor, part: str) -> None:
    """Of a classifier that gives a row several classes, each with a chance of its own."""
    if not type(model).__name__.endswith(_ONE_CLASS) or not type(model).forward.__module__.startswith("transformers."):
        return
    count, is_float = model.config.num_labels, labels.is_floating_point()
    # By themselves fractions are taken for chances of each class; DeBERTa takes them for something else.
    supposed = _SEVERAL if is_float and count > 1 and not type(model).__name__.startswith("Deberta") else ""
    if (getattr(model.config, "problem_type", None) or supposed) != _SEVERAL:
        return
    if labels.shape[1:] != (count,) or not is_float:
        given = f"{tuple(labels.shape)} of {str(labels.dtype).removeprefix('torch.')}"
        raise ValueError(
            f"{part}: labels of this {type(model).__name__} are [rows, {count}], 1.0 for each class that a row has and "
            f"0.0 for the others, and these are {given}. Give labels.float() of such, or, where a row has one class, "
            "its number, a whole one, and problem_type='single_label_classification' in the config."
        )


def _check_whole(model: PreTrainedModel, labels: Tensor, part: str) -> None:
    if is_causal(model):
        raise ValueError(f"{part}: labels of a language model are tokens, whole numbers, and these {labels.dtype}.")
    if type(model).__name__.endswith("ForSemanticSegmentation") and model.config.num_labels > 1:
        raise ValueError(
            f"{part}: labels of a {type(model).__name__} are the class of each pixel, whole numbers, and these "
            f"{labels.dtype}."
        )


def _check_shape(model: PreTrainedModel, batch: Mapping[str, Any], labels: Tensor, part: str) -> None:
    ids = batch.get("input_ids")
    if is_causal(model) and isinstance(ids, Tensor) and labels.shape != ids.shape:
        raise ValueError(
            f"{part}: labels are {tuple(labels.shape)}, and input_ids {tuple(ids.shape)}: they must be alike."
        )


def _check_classes(model: PreTrainedModel, batch: Mapping[str, Any], labels: Tensor, part: str) -> None:
    classes = _classes(model, batch)
    ignored = ignored_label(model)
    counted = labels[labels != ignored]
    if classes is None or not counted.numel():
        return
    lowest, highest = int(counted.min()), int(counted.max())
    if lowest < 0 or highest >= classes:
        raise ValueError(
            f"{part}: labels hold {lowest if lowest < 0 else highest}, and {type(model).__name__} predicts 0 to "
            f"{classes - 1} (and {ignored}, which is not counted)."
        )


def _check_boxes(model: PreTrainedModel, labels: Sequence[Any], part: str) -> None:
    for row in labels:
        found = [row.get(name) if isinstance(row, Mapping) else None for name in ("class_labels", "boxes")]
        classes, boxes = (one if isinstance(one, Tensor) else None for one in found)
        if classes is None or boxes is None or boxes.shape != (len(classes), 4):
            raise ValueError(
                f"{part}: labels of a {type(model).__name__} are, for each image, a dict with its 'class_labels' "
                "[boxes] and 'boxes' [boxes, 4], as the image processor makes them."
            )
        if not len(classes):
            continue
        lowest, highest = float(boxes.min()), float(boxes.max())
        if lowest < -BEYOND or highest > 1 + BEYOND:
            raise ValueError(
                f"{part}: a box holds {lowest if lowest < -BEYOND else highest:g}, and {type(model).__name__} takes "
                "fractions of the image: center x, center y, width and height, as the image processor makes them."
            )
        first, last = int(classes.min()), int(classes.max())
        # Where a text names the classes, they are numbered by it.
        named = "input_ids" in forward_arguments(model)
        if first < 0 or (last >= model.config.num_labels and not named):
            raise ValueError(
                f"{part}: class_labels hold {first if first < 0 else last}, and {type(model).__name__} predicts 0 to "
                f"{model.config.num_labels - 1}."
            )


def _check_predicted(model: PreTrainedModel, kinds: Any, labels: Tensor, part: str) -> None:
    if not sees_prefix_whole(model.config) or not isinstance(kinds, Tensor) or kinds.shape != labels.shape:
        return
    if bool(((labels != IGNORED) & (kinds == 0)).any()):
        raise ValueError(
            f"{part}: there are labels where token_type_ids are 0, and {type(model).__name__} sees all of these tokens "
            "at once, so that none of them is predicted: give its processor the answers as suffix, or set these labels "
            f"to {IGNORED}."
        )


def _check_positions(model: PreTrainedModel, batch: Mapping[str, Any], part: str) -> None:
    """Positions of an answer. Models leave out those behind the last token without a word, and none at padding."""
    missing = [name for name in POSITIONS if batch.get(name) is None]
    if missing and "labels" not in batch:
        raise ValueError(
            f"{part}: a {type(model).__name__} has no loss without {' and '.join(POSITIONS)}, and a batch lacks "
            f"{' and '.join(missing)}."
        )
    for name in POSITIONS:
        found, ids = batch.get(name), batch.get("input_ids")
        if not isinstance(found, Tensor) or not isinstance(ids, Tensor):
            continue
        found = found.squeeze(-1) if found.ndim == 2 else found  # as models do
        if found.shape != ids.shape[:1]:
            continue  # several questions of a row (Splinter)
        if found.is_floating_point():
            raise ValueError(f"{part}: {name} are the numbers of tokens, whole numbers, and these {found.dtype}.")
        mask = batch.get("attention_mask")
        seen = mask.bool() if isinstance(mask, Tensor) and mask.shape == ids.shape else torch.ones_like(ids).bool()
        inside = (found >= 0) & (found < ids.shape[1])
        inside &= seen.gather(1, found.clamp(0, ids.shape[1] - 1)[:, None].to(seen.device))[:, 0].to(inside.device)
        if not bool(inside.all()):
            row = int((~inside).nonzero()[0])
            raise ValueError(
                f"{part}: a row has {name} {int(found[row])}, and {int(seen[row].sum())} tokens: the answer is not "
                "among them. Leave out rows whose answer was cut off, or let them begin and end at the first token (0),"
                " if the model was trained so."
            )


def _check_written(model: PreTrainedModel, batch: Mapping[str, Any], labels: Tensor, part: str) -> None:
    """Labels of an encoder-decoder `[rows, tokens]`."""
    if makes_decoder_inputs_of_source(model) and "decoder_input_ids" not in batch:
        raise ValueError(
            f"{part}: a {type(model).__name__} makes its decoder's inputs of the source, not of the labels: give "
            "'decoder_input_ids', as model.prepare_decoder_input_ids_from_labels(labels) makes them."
        )
    configs = (model.config, model.config.get_text_config(decoder=True))
    pad = next((one for config in configs if (one := getattr(config, "pad_token_id", None)) is not None), None)
    ends = [getattr(config, "eos_token_id", None) for config in configs]
    ends = [one for each in ends for one in (each if isinstance(each, list) else [each])]
    if pad is not None and pad not in ends and labels.ndim == 2 and bool((labels[:, -1:] == pad).any()):
        raise ValueError(
            f"{part}: labels end with pad tokens ({pad}), which the loss counts like words: set them to {IGNORED}, as "
            "DataCollatorForSeq2Seq does."
        )


def _check_frames(model: PreTrainedModel, batch: Mapping[str, Any], labels: Tensor, part: str) -> None:
    """CTC has no path for a text that is longer than what is heard: its loss is infinite."""
    frames = frame_counts(model, batch)
    if frames is None or labels.ndim != 2 or getattr(model.config, "ctc_zero_infinity", False):
        return
    blank = model.config.pad_token_id
    kept = (labels >= 0) & (labels != blank)  # the others are padding
    repeated = ((labels[:, 1:] == labels[:, :-1]) & kept[:, 1:]).sum(1)  # which need a blank between them
    needed = kept.sum(1) + repeated
    short = (needed > frames.to(needed.device)).nonzero()
    if len(short):
        row = int(short[0])
        raise ValueError(
            f"{part}: a recording has {int(frames[row])} frames, and its text needs {int(needed[row])}: no path leads "
            "through it, and its loss is infinite. Leave out recordings that are too short for their texts, or set "
            "model.config.ctc_zero_infinity=True, with which they count as 0."
        )


def _classes(model: PreTrainedModel, batch: Mapping[str, Any]) -> int | None:
    """How many classes a label may name; None where labels are no classes."""
    name = type(model).__name__
    if chooses_among_texts(model):
        ids = batch.get("input_ids")
        return int(ids.shape[1]) if isinstance(ids, Tensor) and ids.ndim == 3 else None
    if name.endswith("ForNextSentencePrediction"):
        return 2
    if name.endswith(("Classification", "ForSemanticSegmentation")):
        regresses = model.config.num_labels == 1 or "multi" in str(model.config.problem_type)
        return None if regresses else int(model.config.num_labels)
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    return int(weight.shape[0]) if isinstance(weight, torch.Tensor) and weight.ndim == 2 else None
