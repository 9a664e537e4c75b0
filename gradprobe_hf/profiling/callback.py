"""Profile a run of a Trainer."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from gradprobe_hf.profiling.observing.joined import Watch, watch_of_script
from gradprobe_hf.profiling.observing.recorder import Recorder
from gradprobe_hf.profiling.observing.schedule import Schedule
from gradprobe_hf.profiling.report import ProfileReport
from gradprobe_hf.profiling.writing import make_folder, write


class ProfileCallback(TrainerCallback):
    """Observe some steps of `trainer.train()`, and leave the others alone.

    A step is an optimizer step, with all the batches that are accumulated for it, and without evaluations.

    Args:
        schedule: how many steps are observed, and how.
        save: file for the report, Markdown if it ends in .md, a page if in .html, JSON otherwise; the main process
            writes it, as soon as all steps were seen, or when training ends. Its folder is made when training begins;
            what cannot be written then is a warning.

    Use it as a context manager around a `trainer.train()` that may fail or be interrupted: Trainer tells no callback of
    that, so without the `with` the watch goes on, and nothing is written, until the next training begins.

    In a script under `gradprobe profile script` its steps count there, with the schedule of the command, and nothing is
    saved here.

    Example:
        >>> Trainer(model, args, train_dataset=rows, callbacks=[ProfileCallback(save="report.md")])  # doctest: +SKIP
    """

    _watching: ClassVar[ProfileCallback | None] = None  # the one whose hooks are set: one training is under way

    def __init__(self, schedule: Schedule | None = None, *, save: str | Path | None = None) -> None:
        self._schedule, self._save = schedule or Schedule(), save
        self._recorder: Recorder | None = None
        self._script: Watch | None = None
        self._writes = True

    def report(self) -> ProfileReport:
        """Of what was seen so far.

        Raises:
            RuntimeError: training has not begun.
        """
        watch = self._script or self._recorder
        if watch is None:
            raise RuntimeError("Training has not begun: call trainer.train() first.")
        return ProfileReport(watch.observation())

    def finish(self) -> None:
        """Observe no more. Harmless at any time."""
        if ProfileCallback._watching is self:
            ProfileCallback._watching = None
        if self._recorder is not None:
            was_watching = not self._recorder.done
            self._recorder.stop()  # behind its last step, too: it may have left its hooks until now
            if was_watching:
                self._write()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.finish()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if ProfileCallback._watching is not None:  # of a training that failed
            ProfileCallback._watching.finish()
        self._script = watch_of_script()
        if self._script is not None:
            return
        self._writes = state.is_world_process_zero
        if self._save is not None and self._writes:
            make_folder(self._save)
        self._recorder = Recorder(self._schedule, finished=self._write)
        self._recorder.start()
        ProfileCallback._watching = self

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._recorder is not None:
            self._recorder.evaluated()

    def on_predict(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> None:
        self.on_evaluate(args, state, control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.finish()

    def _write(self) -> None:
        if self._save is not None and self._writes:
            write(self.report(), self._save)
