"""The text of a recovery: rows that are trained on, rows that never are, and batches of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from gradprobe_hf.config.recovery import RecoveryConfig
from gradprobe_hf.data.batch_checks import check_batches, check_reads_text
from gradprobe_hf.data.batches import SHARED, Batches, row_count, shared_passages, shared_rows, sketch
from gradprobe_hf.data.evidence import check_evidence
from gradprobe_hf.data.self_generated import KeptText
from gradprobe_hf.data.sources import is_plain_text
from gradprobe_hf.data.text_options import SELF, is_written
from gradprobe_hf.data.windows import TextOptions, WindowSpec, Writing, load_batches, window_length
from gradprobe_hf.model.families import forward_arguments
from gradprobe_hf.model.loss import next_token_labels
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.tasks.columns import IGNORED

logger = logging.getLogger(__name__)

Row = dict[str, Tensor]

# What a model writes costs it about as much time as to be trained on it: more of it is read twice instead.
OWN_WINDOWS = 512

LARGEST_HELD_OUT = 10  # one row in so many, where the text is short
READ = {"input_ids", "attention_mask", "labels"}  # of batches as they are given
WINDOW = "window"  # the number of a row in the text


@dataclass(frozen=True)
class Reading:
    """For whom text is read. Attributes: `kept`: where text that the model writes itself is kept, if it is."""

    model: PreTrainedModel
    processing_class: Any
    processes: Processes
    progress: bool
    kept: KeptText | None = None


@dataclass(frozen=True)
class RecoveryText:
    """Rows of token ids.

    Attributes:
        rows: `input_ids` `[tokens]` of each, and what else belongs to its tokens; no two are the same, and each has a
            token that counts.
        held_out: how many of the last are never trained on.
        described: the text, as reports have it.
    """

    rows: Sequence[Row]
    held_out: int
    described: Mapping[str, Any]

    @classmethod
    def of(cls, batches: Batches, held_out: int) -> RecoveryText:
        """The rows of batches, `held_out` of them kept back, and at most a tenth.

        Raises:
            ValueError: batches without token ids, or of fewer than two different rows.
        """
        if not all("input_ids" in batch for batch in batches):
            raise ValueError(
                f"{batches.source}: recovery compares predictions of next tokens, and these batches have no input_ids."
            )
        # A chat's window without a word of the assistant has nothing to learn from, and a step of such alone no mean.
        rows = list({row["input_ids"].numpy().tobytes(): row for row in _rows(batches) if _predicts(row)}.values())
        if len(rows) < 2:
            raise ValueError(
                f"{batches.source} holds {len(rows)} different rows with a token that counts, and one is held out. "
                "Give more text, or shorter windows (sequence_length, --sequence-length)."
            )
        return cls(
            rows,
            min(held_out, max(1, len(rows) // LARGEST_HELD_OUT)),
            {**batches.describe(), "sketch": sketch(batches)},
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
        """Of the rows that are trained on."""
        return sum(len(row["input_ids"]) for row in self.rows[: len(self.rows) - self.held_out])

    def _numbered(self, first: int, end: int) -> list[dict[str, Any]]:
        return [{**self.rows[number], WINDOW: number} for number in range(first, end)]

    def check_apart(self, evaluation: Batches) -> None:
        """Raise ValueError where rows that are measured on are trained on too."""
        mine = Batches(tuple({"input_ids": row["input_ids"][None]} for row in self.rows), "", 0, 0, "")
        if shared := shared_rows(mine, evaluation):
            raise ValueError(
                f"{shared} of the {evaluation.samples} evaluation windows are part of the text that is trained on, and "
                "would show what was learned by heart: evaluate on another text (evaluation, --evaluation)."
            )
        if (share := shared_passages(mine, evaluation)) >= SHARED:
            raise ValueError(
                f"{share:.0%} of the evaluation text is part of the text that is trained on, in windows cut otherwise, "
                "and would show what was learned by heart: evaluate on another text (evaluation, --evaluation)."
            )


def read_text(source: Any, config: RecoveryConfig, reading: Reading) -> RecoveryText:
    """The text that is trained on: fresh windows for every step, or as many as there are.

    Raises:
        ValueError: nothing can be made of it, or it is too short; as `load_batches`.
    """
    model = reading.model
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
        writing=Writing(reading.processes, reading.kept),
        progress=reading.progress,
    )
    check_batches(model, batches, "text", needs_loss=True)
    check_evidence(model, batches, "text")
    _check_read(model, batches)
    found = RecoveryText.of(batches, config.held_out_samples)
    epochs = config.steps * config.batch_size / (len(found.rows) - found.held_out)
    if epochs > 1:
        logger.info("the text has %d windows to train on, which is %.1f epochs", len(found.rows), epochs)
    return found


def _check_read(model: PreTrainedModel, batches: Batches) -> None:
    """Raise ValueError for what is part of a batch and no part of a row here."""
    if any(isinstance(mask := batch.get("attention_mask"), Tensor) and mask.ndim != 2 for batch in batches):
        raise ValueError(
            "text: recovery reads an attention_mask of a number for each token, and one of these batches has another. "
            "Leave it out, and give texts in rows of their own."
        )
    taken = forward_arguments(model) - READ
    if others := sorted({name for batch in batches for name in batch} & taken):
        raise ValueError(
            f"text: recovery reads {', '.join(sorted(READ))}, and the model would be called without the "
            f"{', '.join(others)} of these batches. Leave that out, or give rows that need none."
        )


def collated(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Rows as a batch: padded on the right and masked where their lengths differ.

    `shift_labels` are what each token is to predict, -100: nothing. Trainer counts these, where there are `labels`.
    """
    first = rows[0]["input_ids"]
    padded = any("attention_mask" in row or len(row["input_ids"]) != len(first) for row in rows)
    batch = {"input_ids": _stacked([row["input_ids"] for row in rows], 0)}
    if padded:
        masks = [row.get("attention_mask", torch.ones_like(row["input_ids"])) for row in rows]
        batch["attention_mask"] = _stacked(masks, 0)
    labels = {"labels": _stacked([row.get("labels", row["input_ids"]) for row in rows], IGNORED)}
    return {
        **batch,
        **labels,
        "shift_labels": next_token_labels({**batch, **labels}),
        WINDOW: torch.tensor([row[WINDOW] for row in rows]),
    }


def _predicts(row: Row) -> bool:
    """Whether a token of a row counts."""
    return bool((next_token_labels({name: values[None] for name, values in row.items()}) != IGNORED).any())


def _stacked(parts: list[Tensor], fill: int) -> Tensor:
    return pad_sequence(parts, batch_first=True, padding_value=fill)


def _rows(batches: Batches) -> Iterator[Row]:
    """Each row of token ids by itself, without the padding on its right."""
    for batch in batches:
        for row in range(row_count(batch)):
            mask = batch.get("attention_mask")
            length = batch["input_ids"].shape[1] if mask is None else int(mask[row].nonzero().max()) + 1
            found: Row = {name: batch[name][row][:length] for name in ("input_ids", "labels") if name in batch}
            # A mask that is all ones says nothing; one with padding on the left does.
            if mask is not None and not bool(mask[row][:length].all()):
                found["attention_mask"] = mask[row][:length]
            yield found
