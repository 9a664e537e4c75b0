"""Prepared rows: rows of a data set that hold what the model is called with, tokens or pixels, as batches.

They are padded on the right within each batch, unless the model would compute something else of that.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gradprobe_hf.data.batch_checks import check_one_length
from gradprobe_hf.model.families import (
    chooses_among_texts,
    decodes_labels,
    embeds_labels,
    feels_padding,
    makes_decoder_inputs_of_source,
)
from gradprobe_hf.tasks.columns import IGNORED, Row
from gradprobe_hf.tasks.conversation import shown
from gradprobe_hf.tasks.row_reader import RowReader
from gradprobe_hf.tasks.table import Task
from gradprobe_hf.tasks.text_batches import multi_hot

logger = logging.getLogger(__name__)

SPEECH = ("input_values", "input_features")


def prepared_batches(
    rows: Sequence[Row], columns: Sequence[str], reader: RowReader, task: Task, model: PreTrainedModel, size: int
) -> list[dict[str, Any]]:
    """The rows in batches of `size`; one by one where they have unequal lengths, and padding would change the loss.

    Args:
        columns: those that the model takes, without labels.

    Raises:
        ValueError: a value that is none, or rows that do not go together.
    """
    choosing = chooses_among_texts(model)
    made = []
    for row in rows:
        one = {name: tensor_of(name, _of_choices(name, row, reader) if choosing else row[name]) for name in columns}
        labels = _choice(row, one) if choosing else _row_label(row, reader, task)
        if labels is not None:
            one["labels"] = labels
            # Fractions are one for each answer, of several that are right.
            if not (labels.is_floating_point() or choosing or task.one_label or decodes_labels(model)):
                check_one_length(one, ("labels",))
        made.append(one)
    felt = ("input_ids",) if choosing or feels_padding(model) else ()
    felt = (*felt, "labels") if embeds_labels(model) else felt  # which cannot be padded with -100
    alike = all(len({one[name].shape for one in made if name in one}) <= 1 for name in felt)
    if not alike and size > 1:
        tell_one_by_one()
        size = 1
    made = list(_masked(made, reader))
    return [teacher_forced(_stacked(made[start : start + size], reader), model) for start in range(0, len(made), size)]


def tell_one_by_one() -> None:
    """Say that rows go alone, whatever `batch_size` says: passes over them take longer."""
    logger.info("rows have unequal lengths, and padding would change the loss: they are read one by one")


def teacher_forced(batch: dict[str, Any], model: PreTrainedModel) -> dict[str, Any]:
    """The batch with what the decoder is given, of a model that would take it from the source (FSMT)."""
    if not makes_decoder_inputs_of_source(model) or "labels" not in batch or "decoder_input_ids" in batch:
        return batch
    prepare: Any = model.prepare_decoder_input_ids_from_labels
    return {**batch, "decoder_input_ids": prepare(batch["labels"].clone())}


def tensor_of(name: str, value: Any) -> Tensor:
    """A column's value.

    Raises:
        ValueError: it holds nothing, or lists of unequal lengths.
    """
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"a row has {name} {shown(value)}, of which no tensor can be made: {error}.") from error


def _of_choices(name: str, row: Row, reader: RowReader) -> Any:
    """Lists of tokens, one for each choice, filled on the right to the longest of the row."""
    value = row[name]
    if not isinstance(value, list) or not all(isinstance(one, list) for one in value):
        return value
    fill = {"input_ids": reader.pad_token_id}.get(name, 0)
    longest = max(map(len, value), default=0)
    return [[*one, *[fill] * (longest - len(one))] for one in value]


def _choice(row: Row, made: dict[str, Tensor]) -> Tensor | None:
    """The number of the choice that is right; a mask of the tokens is added where there is none.

    Raises:
        ValueError: there is no such choice.
    """
    ids = row.get("input_ids")
    choices = len(made["input_ids"]) if "input_ids" in made else 0
    if isinstance(ids, list) and "attention_mask" not in made:
        lengths = torch.tensor([len(one) for one in ids])
        made["attention_mask"] = (torch.arange(made["input_ids"].shape[-1]) < lengths[:, None]).long()
    value = row.get("labels", row.get("label"))
    if value is None:
        return None
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = -1
    if not 0 <= number < choices:
        raise ValueError(
            f"a row has the label {value!r}, and {choices} choices: the label is the number of the right one, 0 "
            f"to {choices - 1}."
        )
    return torch.tensor(number)


def _row_label(row: Row, reader: RowReader, task: Task) -> Tensor | None:
    """The label of a prepared row: one number, or one for each token; None: it has none."""
    value = row.get("labels", row.get("label"))
    if value is None:
        return None
    if task.one_label and reader.is_multi_label:
        return multi_hot(value, reader)
    found = torch.as_tensor(value) if not isinstance(value, str) else None
    # Whole numbers are classes, of which a row has one; of fractions transformers takes one for each label.
    if found is not None and found.ndim and (found.is_floating_point() or found.numel() == 1 or not task.one_label):
        return found
    if not task.one_label:
        return None  # a number beside a text that is to be continued is about something else
    if reader.is_regression:
        return torch.as_tensor(value, dtype=torch.float32)
    return torch.tensor(reader.label_names.number(value, "a row"))


def _masked(rows: Sequence[dict[str, Tensor]], reader: RowReader) -> Sequence[dict[str, Tensor]]:
    """Speech of unequal lengths with a mask of what is no padding, where the model was trained with one."""
    name = next((name for name in SPEECH if name in rows[0]), None)
    if name is None or "attention_mask" in rows[0] or len({len(row[name]) for row in rows}) == 1:
        return rows
    extractor = getattr(reader.processing_class, "feature_extractor", reader.processing_class)
    if not getattr(extractor, "return_attention_mask", False) or "attention_mask" not in reader.accepts:
        return rows
    return [{**row, "attention_mask": torch.ones(len(row[name]), dtype=torch.long)} for row in rows]


def _stacked(rows: Sequence[dict[str, Tensor]], reader: RowReader) -> dict[str, Any]:
    fill = {"labels": IGNORED}
    if "input_ids" in rows[0]:
        fill["input_ids"] = reader.pad_token_id
        rows = [{"attention_mask": torch.ones_like(row["input_ids"]), **row} for row in rows]
    missing = next((name for name in rows[0] for row in rows if name not in row), None)
    if missing is not None or any(len(row) != len(rows[0]) for row in rows):
        raise ValueError(f"some rows have {missing or 'labels'!r} and others do not.")
    return {name: _padded(name, [row[name] for row in rows], fill.get(name, 0), rows[0]) for name in rows[0]}


def _padded(name: str, values: Sequence[Tensor], fill: int, row: Mapping[str, Tensor]) -> Tensor:
    """Values of unequal lengths, filled on the right.

    Args:
        row: the first, for what else it has.

    Raises:
        ValueError: they differ in more than their length, or their padding would be heard.
    """
    if all(value.shape == values[0].shape for value in values):
        return torch.stack(list(values))
    if any(value.shape[1:] != values[0].shape[1:] for value in values) or name == "pixel_values":
        shapes = " and ".join(map(str, sorted({tuple(value.shape) for value in values})[:3]))
        raise ValueError(
            f"rows of one batch have {name} of the shapes {shapes}: prepare all of one size, as the model's processor "
            "does, or set batch_size=1 (--batch-size 1)."
        )
    if name in SPEECH and "attention_mask" not in row:
        raise ValueError(
            f"{name} have unequal lengths and no attention_mask, so that what they are padded with would be heard as "
            "silence: set batch_size=1 (--batch-size 1), or give rows with an attention_mask where the model was "
            "trained with one (return_attention_mask of its feature extractor)."
        )
    return torch.nn.utils.rnn.pad_sequence(list(values), batch_first=True, padding_value=fill)
