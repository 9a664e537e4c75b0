"""Profile a pruning run: its stages, and a few batches of its probes as the steps of a loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from gradprobe_hf.checkpoint.result import PruneResult
from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.estimation.machine import process_bytes
from gradprobe_hf.profiling.observing.observation import Observation, RunStage
from gradprobe_hf.profiling.observing.recorder import Recorder
from gradprobe_hf.profiling.observing.schedule import Schedule
from gradprobe_hf.profiling.pruning_passes import with_passes
from gradprobe_hf.profiling.report import ProfileReport
from gradprobe_hf.report.against_estimate import Expectation, against_estimate, estimate_of
from gradprobe_hf.runtime.stopwatch import listening

SHORT = Schedule(warmup=2, timed=6, traced=2, located=2)


@dataclass(frozen=True)
class PruningProfile:
    """Attributes:
    report: of what was seen, however the run ended.
    interrupted: by Ctrl-C.
    """

    report: ProfileReport
    interrupted: bool = False


def shortened(config: GradProbeConfig, schedule: Schedule) -> GradProbeConfig:
    """The same run on as few windows as the schedule has batches.

    Raises:
        ValueError: the size of a batch is not known beforehand.
    """
    if config.batch_size == "auto":
        raise ValueError(
            "batch_size='auto' is chosen while a run goes: give the size of a batch to profile, like 4. Larger ones "
            "are measured beside it."
        )
    samples = min(config.num_samples, schedule.steps * config.batch_size)
    return GradProbeConfig.from_dict(config.to_dict() | {"num_samples": samples})


def profile_pruning(prune: Callable[[], Any], schedule: Schedule = SHORT) -> PruningProfile:
    """What `prune` does, which returns what `prune_pretrained` does, and which need not come to its end; behind it
    passes of its probe at several sizes.

    A step is a batch of a probe, or of a pass that observes inputs. Whatever it raises but Ctrl-C is raised here.
    """
    watch, base = _RunWatch(Recorder(schedule)), process_bytes()
    result = None
    try:
        with watch:
            result = prune()
    except KeyboardInterrupt:
        return PruningProfile(ProfileReport(watch.observation(complete=False)), interrupted=True)
    seen = replace(watch.observation(complete=True), expected=_expected(result, base))
    if result is None or watch.last_batch is None:
        return PruningProfile(ProfileReport(seen))
    try:
        return PruningProfile(ProfileReport(with_passes(seen, result, watch.last_batch)))
    except KeyboardInterrupt:
        return PruningProfile(ProfileReport(seen), interrupted=True)


def _expected(result: PruneResult | None, base: int) -> tuple[Expectation, ...]:
    """What was to be expected of a run, beside what it took."""
    if result is None:
        return ()
    try:
        return against_estimate(result.report, estimate_of(result.report, result.model, base))
    except ValueError:  # what is decided on the way cannot be estimated
        return ()


class _RunWatch:
    """A listener to a run's stages and batches, from `__enter__` to `__exit__`; it keeps the last batch."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._stack = ExitStack()
        self._began = time.perf_counter()
        self._stages: list[RunStage] = []
        self._open: list[str] = []
        self._of_batches: str | None = None
        self.last_batch: Any = None

    def __enter__(self) -> None:
        self._began = time.perf_counter()
        self._stack.callback(self._recorder.stop)
        self._recorder.start()
        self._stack.enter_context(listening(self))

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def begin(self, stage: str) -> None:
        self._open.append(stage)
        self._recorder.begin_step_anew()

    def end(self, stage: str, seconds: float) -> None:
        self._open.pop()
        end = time.perf_counter() - self._began
        self._stages.append(RunStage(stage, end - seconds, end, process_bytes()))

    def batch(self, model: Any, batch: Any) -> None:
        stage = self._open[-1] if self._open else ""
        if stage != self._of_batches:
            if self._recorder.has_timed:
                return  # a second probe does what the first did
            # The batch that only tells what the text reaches comes before any probe.
            self._of_batches = stage
            self._recorder.begin_again()
        self.last_batch = batch
        self._recorder.saw(batch)
        self._recorder.follow(model)
        self._recorder.step()

    def observation(self, complete: bool) -> Observation:
        seen = self._recorder.observation()
        added = self._added(seen)
        run = tuple(
            replace(one, end=one.end - min(added, one.end - one.begin)) if one.name == self._of_batches else one
            for one in self._stages
        )
        no_optimizer = {"optimizer": "a pruning run has no optimizer"}
        missing = {**seen.missing, **no_optimizer, "data loading": "batches of a pruning run are ready beforehand"}
        return replace(seen, run=run, missing=missing, complete=complete and seen.complete)

    def _added(self, seen: Observation) -> float:
        """Seconds that watching has added to the batches: more than they take when they are only timed."""
        if not seen.timed:
            return 0.0
        watched = [*seen.traced, *self._recorder.located_seconds]
        return max(0.0, sum(watched) - len(watched) * median(seen.timed))
