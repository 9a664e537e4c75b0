"""The text of a recovery: rows that are trained on, rows that never are, and batches of them.

A row is what the model is called with, without the dimension of a batch: `input_ids` `[tokens]`, `pixel_values`
`[channels, height, width]`, ..., and its labels, which say where predictions count, and are never learned.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from gradprobe_hf.config.recovery import RecoveryConfig
from gradprobe_hf.data.batch_checks import check_batches, check_reads_text
from gradprobe_hf.data.batches import (
    SHARED,
    Batches,
    row_count,
    share_in_sketch,
    shared_passages,
    shared_rows,
    sketch,
)
from gradprobe_hf.data.evidence import check_evidence
from gradprobe_hf.data.labelled import TaskOptions
from gradprobe_hf.data.sources import is_plain_text
from gradprobe_hf.data.text.self_generated import KeptText
from gradprobe_hf.data.text.special_tokens import tokenizer_of
from gradprobe_hf.data.text.text_options import SELF, is_written
from gradprobe_hf.data.windows import TextOptions, WindowSpec, Writing, load_batches, window_length
from gradprobe_hf.model.families import (
    feels_padding,
    forward_arguments,
    is_causal,
    makes_decoder_inputs_of_source,
    without_cache,
)
from gradprobe_hf.model.passes.loss import next_token_labels
from gradprobe_hf.run.request.agreement import check_same_batches
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.tasks.columns import IGNORED
from gradprobe_hf.tasks.table import Task, task_for

logger = logging.getLogger(__name__)

Row = dict[str, Tensor]

# What a model writes costs it about as much time as to be trained on it: more of it is read twice instead.
OWN_WINDOWS = 512

LARGEST_HELD_OUT = 10  # one row in so many, where the text is short
SHARED_ROWS = 0.1  # of labelled rows that are measured on: fewer may be the same by chance, "great movie" say
READ = {"input_ids", "attention_mask", "labels"}  # of batches as they are given
# Of models that are no causal language models. What is in a row by itself is of one shape in all of them.
READ_BY_ITSELF = {"pixel_values", "input_values", "input_features"}
PADDED = {*READ, "token_type_ids"}
WINDOW = "window"  # the number of a row in the text
COUNTED = "shift_labels"  # where predictions count; Trainer counts these, where there are `labels`


@dataclass(frozen=True)
class Layout:
    """How rows become a batch, and which predictions of a model for it are compared.

    Attributes:
        is_causal: whether each token predicts the next one; otherwise predictions stand where labels are.
        takes_labels: whether the model is called with them: a decoder makes its inputs of them.
        pad_token_id: of tokens that are added on the right.
        call: what the model is called with beside a batch.
    """

    is_causal: bool = True
    takes_labels: bool = False
    pad_token_id: int = 0  # any will do where it is masked
    call: Mapping[str, bool] = field(default_factory=lambda: {"use_cache": False})

    @classmethod
    def of(cls, model: PreTrainedModel, processing_class: Any) -> Layout:
        if is_causal(model):
            return cls()
        # A decoder that classifies finds the last token of a row by its own.
        known = getattr(model.config.get_text_config(), "pad_token_id", None)
        pad = known if known is not None else getattr(tokenizer_of(processing_class), "pad_token_id", None)
        return cls(False, bool(model.config.is_encoder_decoder), pad or 0, without_cache(model))

    def inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the model is called with, of a batch that `collated` made."""
        beside = {COUNTED, WINDOW} if self.takes_labels else {COUNTED, WINDOW, "labels"}
        return {name: value for name, value in batch.items() if name not in beside}

    def labels(self, row: Mapping[str, Tensor]) -> Tensor:
        """Where predictions of a row, or of a batch, count: they are not -100."""
        return next_token_labels(row) if self.is_causal else row["labels"]

    def flat(self, logits: Tensor, counted: Tensor) -> Tensor:
        """Logits `[predictions, classes]`.

        Args:
            counted: the labels of a batch.

        Raises:
            ValueError: there is no prediction for each of them.
        """
        if logits.shape[:-1] != counted.shape:
            raise ValueError(
                f"recovery compares predictions where labels are, and the model predicts {list(logits.shape)} for "
                f"labels {list(counted.shape)}: rows of this kind cannot be recovered on."
            )
        return logits.flatten(0, -2)


NEXT_TOKENS = Layout()


@dataclass(frozen=True)
class Reading:
    """For whom text is read. Attributes: `kept`: where text that the model writes itself is kept, if it is."""

    model: PreTrainedModel
    processing_class: Any
    processes: Processes
    progress: bool
    kept: KeptText | None = None

    @property
    def layout(self) -> Layout:
        return Layout.of(self.model, self.processing_class)


@dataclass(frozen=True)
class RecoveryText:
    """Rows.

    Attributes:
        rows: what each is called with, and its labels; no two are the same, and each has a prediction that counts.
        held_out: how many of the last are never trained on.
        described: the text, as reports have it.
        layout: how they become batches.
    """

    rows: Sequence[Row]
    held_out: int
    described: Mapping[str, Any]
    layout: Layout = NEXT_TOKENS

    @classmethod
    def of(cls, batches: Batches, held_out: int, layout: Layout = NEXT_TOKENS) -> RecoveryText:
        """The rows of batches, `held_out` of them kept back, and at most a tenth.

        Raises:
            ValueError: batches without token ids of a causal language model, or of fewer than two different rows.
        """
        if layout.is_causal and not all("input_ids" in batch for batch in batches):
            raise ValueError(
                f"{batches.source}: recovery compares predictions of next tokens, and these batches have no input_ids."
            )
        # A chat's window without a word of the assistant has nothing to learn from, and a step of such alone no mean.
        counted = (row for row in _rows(batches, layout) if bool((_labels(row, layout) != IGNORED).any()))
        rows = list({_content(row, layout): row for row in counted}.values())
        if len(rows) < 2:
            what, shorter = "a prediction that counts", ""
            if layout.is_causal:
                what, shorter = "a token that counts", ", or shorter windows (sequence_length, --sequence-length)"
            raise ValueError(
                f"{batches.source} holds {len(rows)} different rows with {what}, and one is held out. Give more "
                f"text{shorter}."
            )
        return cls(
            rows,
            min(held_out, max(1, len(rows) // LARGEST_HELD_OUT)),
            {**batches.describe(), "sketch": sketch(batches)},
            layout,
        )

    @property
    def trained(self) -> list[dict[str, Any]]:
        return self._numbered(0, len(self.rows) - self.held_out)

    @property
    def kept_back(self) -> list[dict[str, Any]]:
        return self._numbered(len(self.rows) - self.held_out, len(self.rows))

    @property
    def longest(self) -> int:
        """Tokens in the longest row."""
        return max(len(row["input_ids"]) for row in self.rows)

    @property
    def tokens(self) -> int:
        """Of the rows that are trained on; one of each that has none."""
        return sum(_tokens(row) for row in self.rows[: len(self.rows) - self.held_out])

    def _numbered(self, first: int, end: int) -> list[dict[str, Any]]:
        return [{**self.rows[number], WINDOW: number} for number in range(first, end)]

    def check_apart(self, evaluation: Batches) -> None:
        """Raise ValueError where rows that are measured on are trained on too."""
        mine = Batches(tuple({name: row[name][None] for name in _telling(row)} for row in self.rows), "", 0, 0, "")
        if not self.layout.is_causal:
            self._check_rows_apart(mine, evaluation)
        elif shared := shared_rows(mine, evaluation):
            raise ValueError(
                f"{shared} of the {evaluation.samples} evaluation windows are part of the text that is trained on, and "
                "would show what was learned by heart: evaluate on another text (evaluation, --evaluation)."
            )
        elif (share := shared_passages(mine, evaluation)) >= SHARED:
            raise ValueError(
                f"{share:.0%} of the evaluation text is part of the text that is trained on, in windows cut otherwise, "
                "and would show what was learned by heart: evaluate on another text (evaluation, --evaluation)."
            )

    def _check_rows_apart(self, mine: Batches, evaluation: Batches) -> None:
        """The same of labelled rows: a few short texts may well stand in both."""
        share = share_in_sketch(sketch(mine), evaluation) if evaluation else 0.0
        if share >= SHARED_ROWS:
            raise ValueError(
                f"about {share:.0%} of the {evaluation.samples} evaluation rows are trained on, and would show what "
                "was learned by heart: evaluate on others (evaluation, --evaluation)."
            )
        if share > 0:
            logger.warning("about %.1f%% of the evaluation rows are trained on, too", 100 * share)


def task_options(model: PreTrainedModel, config: RecoveryConfig, most: int) -> TaskOptions | None:
    """How rows with labels, or images, are read; None for a model of text alone, which is cut into windows.

    Args:
        most: rows at most.

    Raises:
        ValueError: the model is for another task than was said.
    """
    task = task_of(model, config)
    is_of_windows = is_causal(model) and (task is None or task.batch_of is None)
    return None if is_of_windows else TaskOptions(task, config.label_column, most)


def task_of(model: PreTrainedModel, config: RecoveryConfig) -> Task | None:
    """What a model is for; raises as `task_for`."""
    return task_for(config.task, type(model).__name__, model.config.is_encoder_decoder)


def check_written(model: PreTrainedModel, source: Any) -> None:
    """Raise ValueError where a model that writes no text is to write some."""
    if is_written(source) and not is_causal(model):
        raise ValueError(
            f"text='self' is what a language model writes, and a {type(model).__name__} writes none: give rows of a "
            "data set like the one that it was trained on (text, --text)."
        )


def read_text(source: Any, config: RecoveryConfig, reading: Reading) -> RecoveryText:
    """The text that is trained on: fresh windows, or rows, for every step, or as many as there are.

    Raises:
        ValueError: nothing can be made of it, or it is too short; as `load_batches`.
    """
    model = reading.model
    check_written(model, source)
    if is_plain_text(source):
        check_reads_text(model, "text")
    samples = config.windows
    if is_written(source) and config.num_samples is None:
        weights = source if isinstance(source, Mapping) else {SELF: 1}
        samples = min(samples, round(OWN_WINDOWS * sum(weights.values()) / weights[SELF]))
    length = window_length(config.sequence_length, model)
    batches = load_batches(
        source,
        WindowSpec(samples, length, 1, config.seed, TextOptions.of(config), at_most=True),
        part="calibration",
        model=model,
        processing_class=reading.processing_class,
        task=task_options(model, config, samples),
        writing=Writing(reading.processes, reading.kept),
        progress=reading.progress,
    )
    check_same_batches(reading.processes, text=batches.fingerprint)
    check_batches(model, batches, "text", needs_loss=True)
    if is_causal(model):  # of others rows without a label that counts are left out
        check_evidence(model, batches, "text")
    _check_read(model, batches)
    found = RecoveryText.of(batches, config.held_out_samples, reading.layout)
    if feels_padding(model) and len({row[_main(row)].shape for row in found.rows}) > 1:
        raise ValueError(
            f"text: a {type(model).__name__} computes with padding, too, and rows of several lengths would be padded "
            "to train on them together. Give rows of one length."
        )
    epochs = config.steps * config.batch_size / len(found.trained)
    if epochs > 1:
        what = "windows" if found.layout.is_causal else "rows"
        logger.info("the text has %d %s to train on, which is %.1f epochs", len(found.trained), what, epochs)
    return found


def _check_read(model: PreTrainedModel, batches: Batches) -> None:
    """Raise ValueError for what is part of a batch and no part of a row here."""
    reads = READ if is_causal(model) else PADDED | READ_BY_ITSELF
    if any(isinstance(mask := batch.get("attention_mask"), Tensor) and mask.ndim != 2 for batch in batches):
        raise ValueError(
            "text: recovery reads an attention_mask of a number for each token, and one of these batches has another. "
            "Leave it out, and give texts in rows of their own."
        )
    if makes_decoder_inputs_of_source(model):
        raise ValueError(
            f"text: a {type(model).__name__} cannot be recovered: it makes its decoder's inputs of the source, not of "
            "the labels."
        )
    taken = forward_arguments(model) - reads
    if others := sorted({name for batch in batches for name in batch} & taken):
        raise ValueError(
            f"text: recovery reads {', '.join(sorted(reads))}, and the model would be called without the "
            f"{', '.join(others)} of these batches. Leave that out, or give rows that need none."
        )
    if not is_causal(model) and not all(isinstance(batch.get("labels"), Tensor) for batch in batches):
        raise ValueError(
            "text: recovery compares predictions where labels are, and one of these batches has no 'labels'. Give "
            "them with all of it; what they are plays no part, but for -100, where no prediction counts."
        )
    for name in sorted(READ_BY_ITSELF & reads):
        shapes = sorted({tuple(batch[name].shape[1:]) for batch in batches if name in batch})
        if len(shapes) > 1:
            raise ValueError(
                f"text: {name} of one batch have to be of one shape, and these rows have {shapes[0]} and {shapes[1]}: "
                "prepare all of one size, or length, as the model's processor does."
            )


def collated(rows: Sequence[Mapping[str, Any]], layout: Layout = NEXT_TOKENS) -> dict[str, Tensor]:
    """Rows as a batch: tokens padded on the right and masked where their lengths differ.

    `shift_labels` are where predictions count, -100: nowhere; of next tokens what each token is to predict.
    """
    batch: dict[str, Tensor] = {}
    if "input_ids" in rows[0]:
        ids = [row["input_ids"] for row in rows]
        batch["input_ids"] = _stacked(ids, layout.pad_token_id)
        if any("attention_mask" in row or len(row["input_ids"]) != len(ids[0]) for row in rows):
            masks = [row.get("attention_mask", torch.ones_like(row["input_ids"])) for row in rows]
            batch["attention_mask"] = _stacked(masks, 0)
    for name in rows[0]:
        if name not in batch and name not in ("labels", WINDOW) and (name != "attention_mask" or not batch):
            batch[name] = _stacked([row[name] for row in rows], 0)
    labels = {"labels": _stacked([row["labels"] if "labels" in row else row["input_ids"] for row in rows], IGNORED)}
    return {
        **batch,
        **labels,
        COUNTED: layout.labels({**batch, **labels}),
        WINDOW: torch.tensor([row[WINDOW] for row in rows]),
    }


def _labels(row: Row, layout: Layout) -> Tensor:
    """Where predictions of one row count."""
    return layout.labels({name: values[None] for name, values in row.items()})


def _telling(row: Row) -> tuple[str, ...]:
    """What the text of a row is known by: of one with masked tokens, the labels too."""
    return (_main(row), "labels") if isinstance(row.get("labels"), Tensor) else (_main(row),)


def _main(row: Row) -> str:
    """What a row is told from others by."""
    return "input_ids" if "input_ids" in row else next(name for name in row if name in READ_BY_ITSELF)


def _content(row: Row, layout: Layout) -> bytes:
    """What a row is called with: of a decoder that is given its labels, as of a caption, these too."""
    names = (_main(row), "labels") if layout.takes_labels else (_main(row),)
    return b"|".join(row[name].contiguous().flatten().view(torch.uint8).numpy().tobytes() for name in names)


def _tokens(row: Row) -> int:
    return len(row["input_ids"]) if "input_ids" in row else 1


def _stacked(parts: list[Tensor], fill: int) -> Tensor:
    if all(part.shape == parts[0].shape for part in parts):  # numbers, pixels, or rows of one length
        return torch.stack(parts)
    return pad_sequence(parts, batch_first=True, padding_value=fill)


def _rows(batches: Batches, layout: Layout) -> Iterator[Row]:
    """Each row by itself, without the padding on its right."""
    for batch in batches:
        mask = batch.get("attention_mask") if "input_ids" in batch else None
        for row in range(row_count(batch)):
            found: Row = {name: batch[name][row] for name in batch if name in PADDED | READ_BY_ITSELF}
            if layout.is_causal:
                found = {name: found[name] for name in ("input_ids", "labels") if name in found}
            if mask is not None:
                length = int(mask[row].nonzero().max()) + 1
                # What a decoder reads may be as wide as the source, and its padding is no matter of that one's mask.
                of_source = PADDED - {"labels"} if layout.takes_labels else PADDED
                for name, values in found.items():
                    if name in of_source and batch[name].shape == mask.shape:
                        found[name] = values[:length]
                # A mask that is all ones says nothing; one with padding on the left does.
                if bool(mask[row][:length].all()):
                    found.pop("attention_mask", None)
                else:
                    found["attention_mask"] = mask[row][:length]
            yield found
