"""Labelled: rows of a data set -> batches of a task: texts with a class, images, speech with what is said, ...

Rows are shuffled with the seed and the first `samples` taken; none is cut in two, and none joined to another.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gradprobe_hf.data.batches import Batches, row_count
from gradprobe_hf.data.sources import Source
from gradprobe_hf.tasks.columns import IGNORED, Row
from gradprobe_hf.tasks.row_reader import RowReader
from gradprobe_hf.tasks.table import Task

ROWS_MEASURED = 1000  # at most, where no number was asked for: it takes 1,000 to tell accuracies apart by 3%


@dataclass(frozen=True, kw_only=True)
class RowSpec:
    """Which rows to read, and how.

    Attributes:
        task: that the rows are for.
        samples: rows.
        exactly: False where there may be fewer.
        length: tokens of a row at most.
        batch_size: rows in a batch.
        seed: shuffles the rows, and draws what is drawn.
        text_columns: of what goes in; none: they are looked for.
        text_of: the text of a row, where a template makes it of several columns.
        label_column: None: it is looked for.
    """

    task: Task
    samples: int
    exactly: bool = True
    length: int
    batch_size: int
    seed: int
    text_columns: tuple[str, ...] = ()
    text_of: Callable[[Row], str] | None = None
    label_column: str | None = None


def labelled_batches(opened: Source, spec: RowSpec, model: PreTrainedModel, processing_class: Any) -> Batches:
    """Rows of texts, images or speech, as batches of the task.

    Raises:
        ValueError: too few rows, no such column, or a value that is not what it should be.
    """
    assert spec.task.batch_of is not None, "the task reads rows"
    if isinstance(opened.rows, list):
        raise ValueError(
            f"{opened.name} is plain text, and {spec.task.name} needs rows with labels: give a data set with a column "
            "of them (calibration, evaluation), or batches with 'labels'."
        )
    rows = _taken(opened, spec)
    inputs, label = spec.task.columns(rows[0], spec.text_columns, spec.label_column)
    reader = _reader(spec, model, processing_class, inputs, label, _stored_names(opened.rows, label))
    items = [
        spec.task.batch_of(rows[start : start + spec.batch_size], reader)
        for start in range(0, len(rows), spec.batch_size)
    ]
    columns = ", ".join(filter(None, (*inputs, label)))
    renumbered = reader.label_names.renumbered and label is not None
    by_name = ", labels matched to the model's by name" if renumbered else ""
    protocol = f"{len(rows)} {spec.task.row} ({columns}{by_name}), shuffled with seed {spec.seed}"
    return _described(items, opened, protocol + _cut(items, reader.length))


def prepared_batches(opened: Source, spec: RowSpec, model: PreTrainedModel, processing_class: Any) -> Batches:
    """Rows that hold what the model is called with: tokens, or pixels. Padded on the right within each batch.

    Raises:
        ValueError: too few rows, or a label that is none of the model's.
    """
    rows = _taken(opened, spec)
    names = _stored_names(opened.rows, next((name for name in ("label", "labels") if name in rows[0]), None))
    reader = _reader(spec, model, processing_class, (), None, names)
    keep = [name for name in rows[0] if name in reader.accepts and name != "labels"]
    values = [{name: torch.as_tensor(row[name]) for name in keep} for row in rows]
    for one, row in zip(values, rows, strict=True):
        labels = _row_label(row, reader, spec.task)
        if labels is not None:
            one["labels"] = labels
    items = [_stacked(values[start : start + spec.batch_size], reader) for start in range(0, len(rows), spec.batch_size)]
    kind = "tokenised rows" if "input_ids" in keep else spec.task.row
    return _described(items, opened, f"{len(rows)} {kind}, shuffled with seed {spec.seed}")


def with_labels(found: Batches, spec: RowSpec, model: PreTrainedModel, processing_class: Any) -> Batches:
    """Batches of tokens as the task needs them: with masked tokens as labels, for a masked language model."""
    if spec.task.prepare is None or any("labels" in batch for batch in found):
        return found
    reader = _reader(spec, model, processing_class, (), None, ())
    items = tuple(spec.task.prepare(batch, reader) for batch in found)
    return replace(found, items=items, protocol=f"{found.protocol}; 15% of the tokens masked with seed {spec.seed}")


def is_prepared(rows: Any, model: PreTrainedModel) -> bool:
    """Whether rows hold what the model is called with already."""
    names = [] if isinstance(rows, list) else rows.column_names or []
    return model.main_input_name in names or "input_ids" in names


def _taken(opened: Source, spec: RowSpec) -> list[Row]:
    assert not isinstance(opened.rows, list), "plain texts are not rows"
    try:
        taken = list(islice(opened.rows.shuffle(seed=spec.seed), spec.samples))
    except ImportError as error:  # a column of audio or video, and no library that decodes it
        raise ValueError(f"{opened.name} cannot be decoded: {error}") from error
    if not taken:
        raise ValueError(f"{opened.name} holds no rows.")
    if spec.exactly and len(taken) < spec.samples:
        raise ValueError(
            f"{opened.name} holds {len(taken)} rows and {spec.samples} were asked for: give more rows, or ask for at "
            f"most {len(taken)} samples."
        )
    return taken


def _reader(
    spec: RowSpec,
    model: PreTrainedModel,
    processing_class: Any,
    inputs: tuple[str, ...],
    label: str | None,
    stored_names: tuple[str, ...],
) -> RowReader:
    return RowReader(
        config=model.config,
        processing_class=processing_class,
        # Of the class: Accelerate hangs a wrapper that takes anything on an offloaded model.
        accepts=frozenset(inspect.signature(type(model).forward).parameters),
        inputs=inputs,
        label=label,
        text_of=spec.text_of,
        length=_length(spec.length, model.config, processing_class),
        stored_names=stored_names,
        generator=torch.Generator().manual_seed(spec.seed),
    )


def _length(asked: int, config: Any, processing_class: Any) -> int:
    """Tokens of a row at most: as asked, or as many as the model has positions for."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    text = config.get_text_config()
    limits = [getattr(tokenizer, "model_max_length", None)]
    limits += [getattr(text, name, None) for name in ("max_position_embeddings", "max_target_positions")]
    return min([asked, *(int(limit) for limit in limits if limit)])


def _stored_names(rows: Any, label: str | None) -> tuple[str, ...]:
    """What a data set calls its own labels (`datasets.ClassLabel`), of rows or of words."""
    feature = (getattr(rows, "features", None) or {}).get(label)
    feature = getattr(feature, "feature", feature)
    return tuple(getattr(feature, "names", None) or ())


def _row_label(row: Row, reader: RowReader, task: Task) -> Tensor | None:
    """The label of a prepared row: one number, or one for each token; None: it has none."""
    value = row.get("labels", row.get("label"))
    if value is None:
        return None
    found = torch.as_tensor(value) if not isinstance(value, str) else None
    if found is not None and found.ndim:
        return found
    if not task.classifies:
        return None  # a number beside a text that is to be continued is about something else
    if reader.is_regression:
        return torch.as_tensor(value, dtype=torch.float32)
    return torch.tensor(reader.label_names.number(value, "a row"))


def _stacked(rows: Sequence[dict[str, Tensor]], reader: RowReader) -> dict[str, Any]:
    fill = {"labels": IGNORED}
    if "input_ids" in rows[0]:
        fill["input_ids"] = reader.pad_token_id
        rows = [{"attention_mask": torch.ones_like(row["input_ids"]), **row} for row in rows]
    missing = next((name for name in rows[0] for row in rows if name not in row), None)
    if missing is not None or any(len(row) != len(rows[0]) for row in rows):
        raise ValueError(f"some rows have {missing or 'labels'!r} and others do not.")
    return {name: _padded([row[name] for row in rows], fill.get(name, 0)) for name in rows[0]}


def _padded(values: Sequence[Tensor], fill: int) -> Tensor:
    if all(value.shape == values[0].shape for value in values):
        return torch.stack(list(values))
    return torch.nn.utils.rnn.pad_sequence(list(values), batch_first=True, padding_value=fill)


def _described(items: Sequence[Mapping[str, Any]], opened: Source, protocol: str) -> Batches:
    return Batches(
        items=tuple(dict(item) for item in items),
        source=opened.name,
        samples=sum(map(row_count, items)),
        tokens=sum(map(_tokens, items)),
        protocol=protocol,
        dataset_id=opened.dataset_id,
    )


def _tokens(batch: Mapping[str, Any]) -> int:
    ids = batch.get("input_ids")
    if ids is None:
        return row_count(batch)
    return int(batch["attention_mask"].sum()) if "attention_mask" in batch else ids.numel()


def _cut(items: Sequence[Mapping[str, Any]], length: int) -> str:
    """What the protocol says about rows that were longer."""
    longest = max((item["input_ids"].shape[1] for item in items if "input_ids" in item), default=0)
    return f", cut at {length} tokens" if longest >= length else ""
