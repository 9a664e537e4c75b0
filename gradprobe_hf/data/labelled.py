"""Labelled: rows of a data set -> batches of a task: texts with a class, images, speech with what is said, ...

Rows are shuffled with the seed and the first `samples` taken; none is cut in two, and none joined to another.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from numbers import Integral
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gradprobe_hf.data.batches import Batches, row_count, token_count
from gradprobe_hf.data.embedding_labels import with_embeddings
from gradprobe_hf.data.prepared_rows import prepared_batches, teacher_forced, tell_one_by_one
from gradprobe_hf.data.sources import Source, at_rate, class_names, columns_of, is_streamed, shuffled
from gradprobe_hf.data.text.packing import WindowSpec, held_out_words
from gradprobe_hf.data.text.text_options import TextOptions, template_columns
from gradprobe_hf.data.unread_media import check_all_read
from gradprobe_hf.model.config_names import text_attribute
from gradprobe_hf.model.families import feels_padding, longest_text
from gradprobe_hf.tasks.columns import (
    AUDIO,
    IGNORED,
    TEXT,
    WORDS,
    LabelNames,
    Row,
    checked_column,
    is_beside,
    named_classes,
    value_of,
)
from gradprobe_hf.tasks.media_batches import hears_padding, pads_to_one_length
from gradprobe_hf.tasks.media_tokens import words_of
from gradprobe_hf.tasks.row_reader import RowReader
from gradprobe_hf.tasks.table import OF_MEDIA, Task
from gradprobe_hf.tasks.text_batches import glues_words

logger = logging.getLogger(__name__)
Item = TypeVar("Item")

FEWEST_OF_ONE_LABEL = 16  # rows: of fewer, chance has all of one label now and then
MOST_UNKNOWN = 0.2  # of the tokens of texts to write: a sign or two may be none of a vocabulary, and no letters
_TIME = re.compile(r"\d:\d\d|\d{4}-\d\d-\d\d")
FEWEST_WORDS = 3  # of a text: a name or a kind has fewer
ROWS_MEASURED = 1000  # at most, where no number was asked for: it takes 1,000 to tell accuracies apart by 3%


@dataclass(frozen=True)
class TaskOptions:
    """What a model is for, and where its labels are.

    Attributes:
        task: None: not known.
        label_column: None: it is looked for.
        most: rows at most, where no number was asked for; None: exactly as many as windows.
        takes_loss: False where embeddings, which are made as labels, would be made for nobody.
    """

    task: Task | None = None
    label_column: str | None = None
    most: int | None = None
    takes_loss: bool = True


@dataclass(frozen=True, kw_only=True)
class RowSpec:
    """Which rows to read, and how.

    Attributes:
        task: that the rows are for.
        samples: rows.
        exactly: False where there may be fewer.
        behind: rows of the seeded order that are left out before these, for a run calibrates on them.
        length: tokens of a row at most.
        batch_size: rows in a batch.
        seed: shuffles the rows, and draws what is drawn.
        text: the columns of what goes in.
        label_column: None: it is looked for.
        takes_loss: as in `TaskOptions`.
    """

    task: Task
    samples: int
    exactly: bool = True
    behind: int = 0
    length: int
    batch_size: int
    seed: int
    text: TextOptions
    label_column: str | None = None
    takes_loss: bool = True

    @property
    def words(self) -> str:
        """What a protocol says of rows that are held out."""
        return held_out_words(self.behind)


@dataclass(frozen=True)
class Labels:
    """Reads rows with labels, for one model."""

    spec: RowSpec
    model: PreTrainedModel
    processing_class: Any

    @classmethod
    def of(
        cls, options: TaskOptions, windows: WindowSpec, model: PreTrainedModel, processing_class: Any
    ) -> Labels | None:
        """As many rows as windows are asked for, unless `options` say otherwise; None where the task is not known."""
        if options.task is None:
            return None
        spec = RowSpec(
            task=options.task,
            samples=(windows.held_out or windows.samples) if options.most is None else options.most,
            exactly=options.most is None and not windows.held_out,
            behind=windows.drawn.start,
            length=windows.sequence_length,
            batch_size=windows.batch_size,
            seed=windows.seed,
            text=windows.text,
            label_column=options.label_column,
            takes_loss=options.takes_loss,
        )
        return cls(spec, model, processing_class)

    def check_texts(self, opened: Iterable[Source]) -> None:
        """Raise ValueError for a source of a mixture that holds more than text."""
        for one in opened:
            first = _first_row(one)
            check_all_read(one, first, self.spec.task, self.model)
            if self.spec.task.reads(first):
                raise ValueError(
                    f"a mixture is of texts, and {one.name} holds more than that, of which nothing would be read: give "
                    "it alone."
                )

    def batches(self, opened: Source) -> Batches | None:
        """The rows of a source as batches; None if it is text to cut into windows.

        Raises:
            ValueError: too few rows, no such column, or a value that is not what it should be.
        """
        task = self.spec.task
        self._check_label_column()
        if not task.cuts_windows and self._is_prepared(opened) and not self.spec.text.names_text:
            return self._embedded(media_in_dtype(self._prepared(opened), self.model.dtype))
        first = _first_row(opened)
        would_be_left_out = task.medium is not None and task.medium.is_in(first)
        if task.prepared and (would_be_left_out or not self._reads_text(opened, first)):
            raise ValueError(
                f"{opened.name} has the columns {', '.join(map(repr, first))}, and for {task.name} no batches are made "
                f"of such rows: prepare rows that hold {task.prepared} (dataset.map), or give batches of that."
            )
        check_all_read(opened, first, task, self.model)
        if not task.reads(first):
            if self.spec.label_column is not None:
                raise ValueError(
                    f"label_column={self.spec.label_column!r} has no effect here: of {opened.name} windows of text are "
                    "made, without labels. Leave label_column unset."
                )
            return None
        _check_text_options(self.spec)
        return self._embedded(media_in_dtype(self._read(opened), self.model.dtype))

    def of_windows(self, found: Batches) -> Batches:
        """Windows as the task needs them: with masked tokens, or the model's embeddings, as labels."""
        self._check_label_column()
        found, prepare = self._embedded(found), self.spec.task.prepare
        if prepare is None or any("labels" in batch for batch in found):
            return found
        reader = self._reader((), None, ())
        items = tuple(prepare(batch, reader) for batch in found)
        masked = f"; 15% of the tokens masked with seed {self.spec.seed}"
        return replace(found, items=items, protocol=found.protocol + masked)

    def _embedded(self, found: Batches) -> Batches:
        """With the model's embeddings as labels, whatever labels the rows have: those of tokens, of a chat say."""
        is_asked = self.spec.task.embeds and self.spec.takes_loss
        return with_embeddings(found, self.model, self.spec.seed) if is_asked else found

    def _check_label_column(self) -> None:
        if self.spec.task.embeds and self.spec.label_column is not None:
            raise ValueError(
                f"label_column={self.spec.label_column!r} has no effect here: for {self.spec.task.name} no labels are "
                "read. Leave label_column unset."
            )

    def _read(self, opened: Source) -> Batches:
        """Texts, images or speech."""
        spec = self.spec
        assert spec.task.batch_of is not None, "the task reads rows"
        if opened.is_plain:
            raise ValueError(
                f"{opened.name} is plain text, and {spec.task.name} needs {spec.task.data}: give a data set with a "
                "column of them (calibration, evaluation), or batches that the model returns a loss for."
            )
        if AUDIO in spec.task.inputs:
            opened = at_rate(opened, self._reader((), None, ()).feature_extractor.sampling_rate)
        rows, order = _taken(opened, spec)
        if not rows:
            return Batches.none()
        inputs, label = _columns(spec, rows[0])
        rows = _with_names(rows, opened, spec, inputs, label)
        reader = self._reader(inputs, label, class_names(opened.rows, label))
        items = [spec.task.batch_of(part, reader) for part in _parts(rows, spec.batch_size)]
        hears = AUDIO in spec.task.inputs and spec.batch_size > 1
        feels = feels_padding(self.model) and any(_pads(item, reader) for item in items)
        felt = feels or (hears and hears_padding(rows, reader))
        if felt:
            tell_one_by_one()
        if felt or any(_mixes_rows(item, self.model.config) for item in items):
            items = [spec.task.batch_of([row], reader) for row in rows]
        items = [teacher_forced(item, self.model) for item in items]
        if label and spec.task.compares == "texts":
            _check_texts([str(value_of(row, label)) for row in rows], items, reader, f"{opened.name}, {label}")
        if label:
            if not reader.is_regression:
                reader.label_names.check_numbers([value_of(row, label) for row in rows], opened.name)
            _check_one_label(opened, reader, [value_of(row, label) for row in rows])
            _warn_of_one_label(opened, spec.task, [value_of(row, label) for row in rows])
        if spec.task.inputs == (TEXT,) and len(inputs) == 1 and not (spec.text.text_column or spec.text.text_template):
            _warn_of_unread(opened, rows, inputs[0], label)
        if spec.task.inputs == (TEXT,) and spec.task.compares == "texts":
            _warn_of_prefixes(self.model.config, [reader.input(row) for row in rows])
        if spec.task.inputs == (WORDS,) and glues_words(reader.tokenizer):
            logger.warning(
                "the tokenizer joins the words of a row without a blank, unlike those of a text: unless the model was "
                "trained so, load it with add_prefix_space=True (processing_class=)"
            )
        columns = ", ".join(filter(None, (*inputs, label)))
        by_name = _by_name(reader.label_names, opened.name) if label else ""
        protocol = f"{len(rows)} {spec.task.row} ({columns}{by_name}), {order}{spec.words}"
        return _described(items, opened, protocol + _cut(items, reader))

    def _prepared(self, opened: Source) -> Batches:
        """Rows that hold what the model is called with: tokens, or pixels. Padded on the right within each batch."""
        spec = self.spec
        rows, order = _taken(opened, spec)
        if not rows:
            return Batches.none()
        _check_text_options(spec)
        # As `prepared_batches` takes them: numbers that were made of other ones are the model's own.
        label = next((name for name in ("labels", "label") if name in rows[0]), None)
        if spec.label_column is not None:
            named = checked_column(rows[0], spec.label_column, "label_column")
            rows = [{**row, "label": row[named], "labels": row[named]} for row in rows]
            label = "label"
        names = class_names(opened.rows, spec.label_column or label)
        reader = self._reader((), None, names)
        keep = [name for name in rows[0] if name in reader.accepts and name not in ("labels", "return_loss")]
        items = prepared_batches(rows, keep, reader, spec.task, self.model, spec.batch_size)
        if label:
            _check_one_label(opened, reader, [row.get(label) for row in rows])
            _warn_of_one_label(opened, spec.task, [row.get(label) for row in rows])
        kind = "tokenised rows" if "input_ids" in keep else spec.task.row
        by_name = _by_name(reader.label_names, opened.name) if label else ""
        return _described(items, opened, f"{len(rows)} {kind}{by_name}, {order}{spec.words}")

    def _is_prepared(self, opened: Source) -> bool:
        """Whether rows hold what the model is called with already."""
        names = [] if isinstance(opened.rows, list) else columns_of(opened.rows)
        return self.model.main_input_name in names or "input_ids" in names

    def _reads_text(self, opened: Source, first: Row) -> bool:
        """Whether it is text that the model can be given without a loss, which some scores do without."""
        text = self.spec.text
        named = opened.is_plain or "text" in first or text.text_column is not None or text.text_template is not None
        return named and self.model.main_input_name == "input_ids"

    def _reader(self, inputs: tuple[str, ...], label: str | None, stored_names: tuple[str, ...]) -> RowReader:
        return RowReader(
            config=self.model.config,
            processing_class=self.processing_class,
            # Of the class: Accelerate hangs a wrapper that takes anything on an offloaded model.
            accepts=frozenset(inspect.signature(type(self.model).forward).parameters),
            inputs=inputs,
            label=label,
            text_template=self.spec.text.text_template,
            length=_length(self.spec.length, self.model, self.processing_class),
            stored_names=stored_names,
            generator=torch.Generator().manual_seed(self.spec.seed),
            generation=getattr(self.model, "generation_config", None),
        )


def media_in_dtype(found: Batches, dtype: torch.dtype) -> Batches:
    """Pixels and recordings in a model's dtype: not every model converts them by itself."""

    def of(name: str, value: Any) -> Any:
        is_media = isinstance(value, Tensor) and value.is_floating_point() and name.startswith(OF_MEDIA)
        return value.to(dtype) if is_media else value

    return replace(found, items=tuple({name: of(name, value) for name, value in item.items()} for item in found))


def _by_name(names: LabelNames, source: str) -> str:
    """What the protocol says of labels that a data set numbers in its own order; a warning where it is the order of
    text, and nothing tells how the model numbers them."""
    if names.sorted_as_text and not names.renumbered:
        place = next(number for number, name in enumerate(names.stored) if str(number) != re.sub(r"\D", "", name))
        logger.warning(
            "%s calls its classes by numbers, in the order of text: %r is label %d, and so it is taken. If the model "
            "numbers them by their value, name them so that both are one order (001, 002, ...)",
            source,
            names.stored[place],
            place,
        )
    if not names.renumbered:
        return ""
    shown = [f"{name!r} is {own!r}" for name, own in list(names.in_other_words.items())[:4]]
    more = ", ..." * (len(names.in_other_words) > len(shown))
    return ", labels matched to the model's by name" + (f": {', '.join(shown)}{more}" if shown else "")


def _check_text_options(spec: RowSpec) -> None:
    """Raise ValueError for options that are about windows of text."""
    columns = ("text_column", "text_template")
    for option in fields(TextOptions):
        value = getattr(spec.text, option.name)
        if option.name not in columns and value != option.default:
            raise ValueError(
                f"{option.name}={value!r} has no effect here: it is about windows of text, and {spec.task.name} reads "
                f"rows. Leave {option.name} unset."
            )
    named = next((name for name in columns if getattr(spec.text, name) is not None), None)
    if named and TEXT not in spec.task.inputs and WORDS not in spec.task.inputs:
        raise ValueError(f"{named} has no effect here: {spec.task.name} reads no text. Leave {named} unset.")


def _first_row(opened: Source) -> Row:
    """The first row of a source, that tells its columns; plain texts have one column.

    Raises:
        ValueError: there is none, or it cannot be decoded.
    """
    if opened.is_plain:
        return {"text": ""}
    try:
        if opened.first_row is None:
            raise ValueError(f"{opened.name} is empty: it holds no rows.")
        return dict(opened.first_row)
    except ImportError as error:  # a column of audio or video, and no library that decodes it
        raise ValueError(f"{opened.name} cannot be decoded: {error}") from error


def _columns(spec: RowSpec, first: Row) -> tuple[tuple[str, ...], str | None]:
    """The columns of what goes in, and that of the labels."""
    template = spec.text.text_template
    if template is None:
        return spec.task.columns(first, spec.text.text_column, spec.label_column)
    named = tuple(template_columns(template))
    for name in named:
        checked_column(first, name, "text_template")
    found, label = spec.task.columns(first, named[0], spec.label_column)
    # Beside an image the text is one input of several, and stands for the template in its first column.
    return found if len(spec.task.inputs) > 1 else named, label


def _taken(opened: Source, spec: RowSpec) -> tuple[list[Row], str]:
    """Rows in the seeded order, and that in words; none where all of them are left out."""
    rows, order = shuffled(opened, spec.seed)
    taken = list(islice(rows, spec.behind, spec.behind + spec.samples))
    if not taken and not spec.behind:
        raise ValueError(f"{opened.name} is empty: it holds no rows.")
    if spec.exactly and len(taken) < spec.samples:
        raise ValueError(
            f"{opened.name} holds {len(taken)} rows and {spec.samples} were asked for: give more rows, or ask for at "
            f"most {len(taken)} samples."
        )
    return taken, order


def _check_one_label(opened: Source, reader: RowReader, labels: Sequence[Any]) -> None:
    """Raise ValueError for measures that are all the same: splits for tests are published with -1 in their place."""
    if not reader.is_regression:
        is_named = not reader.label_names.has_numbers and any(isinstance(label, Integral) for label in labels)
        if is_named and getattr(opened.rows, "features", {}) is None:
            logger.warning(
                "%s does not tell what its classes are called, as of a stream that was mapped: their numbers are taken "
                "for the model's own",
                opened.name,
            )
    if len(labels) >= FEWEST_OF_ONE_LABEL and reader.is_regression and len(set(map(str, labels))) == 1:
        raise ValueError(
            f"{opened.name}: all {len(labels)} rows have the label {labels[0]}, where a measure is to be predicted: "
            "its labels seem not to be published. Give a split that has some."
        )


def _warn_of_one_label(opened: Source, task: Task, labels: Sequence[Any]) -> None:
    """Rows that are sorted by their class leave those of one together, wider apart than a stream is mixed."""
    alike = len(labels) >= FEWEST_OF_ONE_LABEL and len(set(map(str, labels))) == 1  # some are lists, or tensors
    if alike and task.one_label and is_streamed(opened.rows):
        logger.warning(
            "%s: all %d rows that were drawn of this stream have the label %s, as if it were sorted by them. Shuffle "
            "it before, or give a data set that is no stream",
            opened.name,
            len(labels),
            labels[0],
        )


def _warn_of_unread(opened: Source, rows: Sequence[Row], given: str, label: str | None) -> None:
    """A text beside the one of a usual name, which may be half of what the model was trained on: a title, a context."""
    others = [name for name in rows[0] if name != given and not is_beside(name)]
    others = [name for name in others if label is None or not name.startswith(label)]  # label_text says it in words
    unread = [name for name in others if all(_is_more(row.get(name), str(value_of(row, given))) for row in rows)]
    if unread:
        logger.warning(
            "%s: text is read from %r alone, not from %s: --text-template '%s' gives the model all of it, and "
            "--text-column %s says that this is what was meant",
            opened.name,
            given,
            " or ".join(map(repr, unread)),
            " ".join(f"{{{name}}}" for name in (*unread, given)),
            given,
        )


def _is_more(value: Any, read: str) -> bool:
    """Whether it is text that a model may be given beside what is read: no name, no time, and no part of that."""
    is_text = isinstance(value, str) and len(value.split()) >= FEWEST_WORDS
    return is_text and _TIME.search(value) is None and value not in read


def _warn_of_prefixes(config: Any, texts: Sequence[Any]) -> None:
    """T5's way to say what a text is for: without its words a model reads what it was not trained on."""
    tasks = (getattr(config, "task_specific_params", None) or {}).values()
    known = [getattr(config, "prefix", None), *(task.get("prefix") for task in tasks if isinstance(task, Mapping))]
    prefixes = list(dict.fromkeys(one.strip() for one in known if isinstance(one, str) and one.strip()))
    if prefixes and not any(str(text).startswith(tuple(prefixes)) for text in texts):
        logger.warning(
            "the model's config.json has prefixes that say what a text is for (%s), and no row begins with one: "
            '--text-template "%s {column}" puts it there',
            ", ".join(map(repr, prefixes[:4])),
            prefixes[0],
        )


def _check_texts(texts: Sequence[str], items: Sequence[Mapping[str, Any]], reader: RowReader, name: str) -> None:
    """Raise ValueError for texts to write that are empty, or that the tokenizer does not know the letters of."""
    if not any(text.strip() for text in texts):
        raise ValueError(f"{name}: all of the {len(texts)} texts to write are empty.")
    tokenizer = reader.tokenizer
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown in (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id):
        return  # of bytes, which are all known
    labels = torch.cat([item["labels"].flatten() for item in items])
    share = float((labels == unknown).sum() / (labels != IGNORED).sum().clamp_min(1))
    if share > MOST_UNKNOWN:
        example = next(text for text in texts if unknown in tokenizer(text_target=text)["input_ids"])
        raise ValueError(
            f"{name}: the tokenizer does not know {share:.0%} of the tokens to write, as of {example[:60]!r}: give "
            "texts as the model was trained to write them (in capitals, say), or its own tokenizer (processing_class)."
        )


def _length(asked: int, model: PreTrainedModel, processing_class: Any) -> int:
    """Tokens of a row at most: as asked, or as many as the model has positions for."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    limits = [getattr(tokenizer, "model_max_length", None), longest_text(model)]
    limits.append(text_attribute(model.config, "max_target_positions"))
    return min([asked, *(int(limit) for limit in limits if limit)])


def _with_names(rows: list[Row], opened: Source, spec: RowSpec, inputs: Sequence[str], label: str | None) -> list[Row]:
    """Rows in which a class that is read as a text, or is to be written, has its name."""
    template = spec.text.text_template
    columns = [*(template_columns(template) if template else inputs), *([label] if spec.task.writes_label else [])]
    names = {column: class_names(opened.rows, column) for column in columns if column is not None}
    return [named_classes(row, names) for row in rows]


def _described(items: Sequence[Mapping[str, Any]], opened: Source, protocol: str) -> Batches:
    return Batches(
        items=tuple(dict(item) for item in items),
        source=opened.name,
        samples=sum(map(row_count, items)),
        tokens=sum(map(token_count, items)),
        protocol=protocol,
        dataset_id=opened.dataset_id,
    )


def _parts(rows: Sequence[Item], size: int) -> list[Sequence[Item]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _pads(item: Mapping[str, Any], reader: RowReader) -> bool:
    """Whether rows of a batch were padded, also for a model that takes no mask."""
    mask, ids = item.get("attention_mask"), item.get("input_ids")
    if isinstance(mask, Tensor):
        return not bool(mask.all())
    return isinstance(ids, Tensor) and bool((ids[:, -1] == reader.pad_token_id).any())


def _mixes_rows(item: Mapping[str, Any], config: Any) -> bool:
    """Whether a batch has the patches of all images one after the other (Qwen-VL), or images of some rows alone."""
    if len({len(value) for value in item.values() if isinstance(value, Tensor)}) > 1:
        return True
    if "pixel_values" not in item or "input_ids" not in item:
        return False
    # As many images as rows, by chance: then one has several, and another none.
    of_images = (words_of(item["input_ids"], config) == IGNORED).any(1)
    return bool(of_images.any()) and not bool(of_images.all())


def _cut(items: Sequence[Mapping[str, Any]], reader: RowReader) -> str:
    """What the protocol says about texts that were longer."""
    length = reader.length
    read = max((item["input_ids"].shape[1] for item in items if "input_ids" in item), default=0)
    if read and pads_to_one_length(reader.config):
        return f", padded to {read} tokens"
    if read > length:  # cut, it would have places for images that no pixels belong to
        logger.warning(
            "a text around images is never cut: the longest row has %d tokens, and sequence_length=%d is not kept "
            "to. Smaller images, or batch_size=1, take less memory.",
            read,
            length,
        )
        return f", of up to {read} tokens, none cut"
    found = f", cut at {length} tokens" if read == length else ""
    if not reader.config.is_encoder_decoder:
        return found
    written = max(item["labels"].shape[1] for item in items)
    return found + (f", texts to write cut at {length} tokens" if written >= length else "")
