"""Reading: texts and data sets -> the batches of one run, by its configuration, for its model."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.data.batch_checks import check_batches, check_reads_text
from gradprobe_hf.data.batches import Batches
from gradprobe_hf.data.evidence import check_evidence
from gradprobe_hf.data.held_out import HeldOut
from gradprobe_hf.data.labelled import ROWS_MEASURED, TaskOptions
from gradprobe_hf.data.sources import is_plain_text
from gradprobe_hf.data.text.paper_protocol import PaperSpec, paper_batches
from gradprobe_hf.data.text.pydoc_text import Part
from gradprobe_hf.data.text.text_options import PYDOC
from gradprobe_hf.data.windows import WINDOWS_MEASURED, TextOptions, WindowSpec, Writing, load_batches, window_length
from gradprobe_hf.tasks.table import Task

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reading:
    """How the texts of a run are read: what they have in common.

    Attributes:
        task: what the model is for, if that is known.
        writing: who writes the model's own text, and where it is kept.
        has_own_loss: whether the loss is a function of the user's, which may make of a batch what it likes.
        evaluates_alone: whether no calibration text is read: options about chats are then about the evaluation's.
        progress: show progress bars.
    """

    config: GradProbeConfig
    model: PreTrainedModel
    processing_class: Any
    task: Task | None
    writing: Writing
    has_own_loss: bool
    evaluates_alone: bool
    progress: bool

    def calibration(self, source: Any) -> Batches:
        """Raises ValueError or OSError: nothing can be made of the source."""
        found = self._load(source, self._windows(self.config.num_samples), "calibration", None)
        self._check(found, "calibration")
        return found

    def evaluation(self, source: Any) -> Batches:
        """By the configuration's protocol. Raises as `calibration`."""
        if self.config.evaluation_protocol == "paper":
            return self._whole(source)
        most = ROWS_MEASURED if self.config.evaluation_samples is None else None
        found = self._load(source, self._windows(self._measured), "evaluation", most)
        self._check(found, "evaluation")
        return found

    def on_manual_if_possible(self) -> Batches:
        """An evaluation that nobody asked for: none where it cannot be, for want of a tokenizer, say."""
        if self.task is None or not self.task.cuts_windows:
            return Batches.none()
        try:
            return self.evaluation(PYDOC)
        except ValueError as error:
            logger.info("the Python manual is not measured on: %s", error)
            return Batches.none()

    def held_out(self, source: Any) -> Batches:
        """What may be measured on of a text that calibrates, none where too little is left. Raises as `calibration`."""
        # Nobody asked to read more than calibrates, of images or speech say.
        most = self.config.evaluation_samples or min(ROWS_MEASURED, self.config.num_samples)
        load = partial(self._load, most=most)
        check = partial(self._check, part="evaluation")
        is_left = not self.config.recovery_steps  # which trains on more of the same text
        windows = self._windows(self.config.num_samples)
        return HeldOut(windows, load, check, is_left).of(source, self._measured)

    @property
    def _measured(self) -> int:
        """Windows of an evaluation."""
        return self.config.evaluation_samples or WINDOWS_MEASURED

    def _windows(self, samples: int) -> WindowSpec:
        config = self.config
        batch_size = 4 if config.batch_size == "auto" else config.batch_size
        length = window_length(config.sequence_length, self.model)
        return WindowSpec(samples, length, batch_size, config.seed, TextOptions.of(config))

    def _load(self, source: Any, windows: WindowSpec, part: Part, most: int | None) -> Batches:
        """Batches of a source, whether they can be measured or not.

        Args:
            most: rows with labels at most; None: as many as windows.
        """
        if is_plain_text(source):
            check_reads_text(self.model, part)
        # A loss of the user's own is called without labels that nobody gave.
        takes_loss = not self.has_own_loss and bool(windows.held_out or self._needs_loss(part))
        return load_batches(
            source,
            windows,
            part=part,
            model=self.model,
            processing_class=self.processing_class,
            task=TaskOptions(self.task, self.config.label_column, most, takes_loss),
            writing=self.writing,
            is_alone=self.evaluates_alone,
            progress=self.progress,
        )

    def _check(self, batches: Batches, part: Part) -> None:
        """Raise ValueError for batches that the model cannot be called with, or that lack a loss that is needed."""
        if self.has_own_loss:
            return
        needs_loss = self._needs_loss(part)
        check_batches(self.model, batches, part, needs_loss)
        if needs_loss:
            check_evidence(self.model, batches, part)

    def _needs_loss(self, part: Part) -> bool:
        """Whether the model's own loss is taken of batches."""
        if self.has_own_loss:
            return False
        return part == "evaluation" or self.config.needs.probes or self.config.drops_blocks

    def _whole(self, source: Any) -> Batches:
        """The text by the paper protocol, in batches of about as many tokens as those of calibration."""
        config = self.config
        spec = PaperSpec(text_column=config.text_column, add_special_tokens=config.add_special_tokens)
        found = paper_batches(source, self.model, self.processing_class, spec)
        rows = 1 if config.batch_size == "auto" else config.batch_size * config.window_length // found.longest
        return found.in_batches_of(max(1, rows))
