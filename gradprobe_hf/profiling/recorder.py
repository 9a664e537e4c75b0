"""The recorder: walks through the schedule, step by step, and puts everything back."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import profile

from gradprobe_hf.profiling.batch_contents import added, contents_of
from gradprobe_hf.profiling.call_watch import CallWatch, Seen, summed
from gradprobe_hf.profiling.compilations import compiled_frames, since
from gradprobe_hf.profiling.observation import Contents, LoaderWait, Observation, Operator
from gradprobe_hf.profiling.places import Place
from gradprobe_hf.profiling.schedule import Schedule
from gradprobe_hf.profiling.stages import STAGES, StageClock, Wait, marked_forward, marked_stages, models_of

Phase = Literal["warmup", "timed", "traced", "located"]
_ORDER: tuple[Phase, ...] = ("warmup", "timed", "traced", "located")
_OPERATORS = 20  # that are kept


class Recorder:
    """From `start` to `stop`, or to the end of its schedule, whichever comes first.

    A step ends with an optimizer step of the first optimizer that takes one, until `step` is called: from then on the
    loop says itself where its steps end.

    Args:
        model: whose forward pass is a stage. Default: what holds the parameters of the first optimizer.
        finished: called behind the last step of the schedule.
    """

    def __init__(
        self, schedule: Schedule, model: nn.Module | None = None, finished: Callable[[], None] | None = None
    ) -> None:
        self.schedule = schedule
        self.phase: Phase | None = None
        self._model, self._finished = model, finished
        self._optimizer: Optimizer | None = None
        self._says_steps_itself = False
        self._marks, self._of_phase = ExitStack(), ExitStack()
        self._seconds: dict[Phase, list[float]] = {phase: [] for phase in _ORDER}
        self._stages: Counter[str] = Counter()
        self._waits: list[Wait] = []
        self._step_waits: list[Wait] = []
        self._contents: list[Contents] = []
        self._step_contents: list[Contents] = []
        self._steps_with_contents = 0
        self._calls: list[list[Seen]] = []
        self._operators: tuple[Operator, ...] = ()
        self._compiled: list[Any] = []
        self._compilations: tuple[Any, ...] = ()
        self._missing: dict[str, str] = {}
        self._device = "cpu"
        self._complete = False

    def start(self) -> None:
        """Begin with the warm-up."""
        self.clock = StageClock()
        self._watch = CallWatch(self._parameters, lambda: self.clock.stage == "data loading")
        self._marks.enter_context(marked_stages(self.clock, self._waited, self._stepped))
        if self._model is not None:
            self._mark_forward([self._model])
        self._open("warmup")

    def step(self) -> None:
        """The loop has come to the end of a step."""
        if not self._says_steps_itself and self._optimizer is not None:
            self._begin_again()  # the optimizer's steps were counted so far
        self._says_steps_itself = True
        self._end_step()

    def stop(self) -> None:
        """Leave no hook behind. Harmless at any time; a step that has begun does not count."""
        if self.phase is not None:
            self._close()
            self.phase = None
        self._marks.close()
        self._optimizer = self._model = None  # its state is twice the model

    def observation(self) -> Observation:
        """What was seen so far."""
        return Observation(
            warmup=len(self._seconds["warmup"]),
            timed=tuple(self._seconds["timed"]),
            traced=tuple(self._seconds["traced"]),
            located=len(self._calls),
            stages={stage: self._stages[stage] for stage in STAGES} if self._seconds["timed"] else {},
            loaders=_by_line(self._waits),
            calls=summed(self._calls),
            operators=self._operators,
            compilations=self._compilations,
            contents=added(self._contents, self._steps_with_contents),
            device=self._device,
            versions={"torch": torch.__version__, "transformers": transformers.__version__},
            missing=dict(self._missing),
            complete=self._complete,
        )

    def _begin_again(self) -> None:
        if self.phase is not None:
            self._close()
            self._seconds = {phase: [] for phase in _ORDER}
            self._waits, self._contents, self._calls = [], [], []
            self._stages.clear()
            self._steps_with_contents = 0
            self._open("warmup")

    def _end_step(self) -> None:
        if self.phase is None:
            return
        seconds = self._seconds[self.phase]
        seconds.append(time.perf_counter() - self._began)
        self._keep_step(self.phase, first=len(seconds) == 1)
        if len(seconds) == getattr(self.schedule, self.phase):
            self._next()
        self._drop_step()

    def _keep_step(self, phase: Phase, first: bool) -> None:
        """What was seen in a step counts once the step has come to its end."""
        if phase == "timed":
            self._stages.update(self.clock.cut())
            self._waits += self._step_waits
        elif phase == "located":
            self._calls.append(self._watch.cut())
        # The first step of all may have fetched more than its own batches.
        if phase == "located" or (phase == "warmup" and not first):
            self._contents += self._step_contents
            self._steps_with_contents += 1

    def _drop_step(self) -> None:
        self._step_waits, self._step_contents = [], []
        self._watch.cut()
        self.clock.cut()
        self._began = time.perf_counter()

    def _next(self) -> None:
        assert self.phase is not None
        self._close()
        following = _ORDER.index(self.phase) + 1
        self.phase = None
        if following < len(_ORDER) and self._can_open(_ORDER[following]):
            self._open(_ORDER[following])
            return
        self.stop()
        self._complete = True
        if self._finished is not None:
            self._finished()

    def _can_open(self, phase: Phase) -> bool:
        if phase == "located" and compiled_frames():
            # Its compiler would compile the watch with the loop, and say so, or refuse.
            self._missing["calls"] = (
                "torch.compile was used in this process: run it with TORCHDYNAMO_DISABLE=1 to find lines"
            )
            return False
        return True

    def _open(self, phase: Phase) -> None:
        self.phase = phase
        if phase == "timed":
            self._compiled = compiled_frames()
        elif phase == "traced":
            self._start_trace()
        elif phase == "located":
            self._of_phase.callback(self._watch.stop)
            self._watch.start()
        self._drop_step()

    def _close(self) -> None:
        """End the phase; what it has measured is kept."""
        if self.phase == "timed":
            self._compilations = since(self._compiled)
        self._of_phase.close()

    def _start_trace(self) -> None:
        trace = profile()
        try:
            trace.start()
        except RuntimeError as error:  # only one profiler can run
            self._missing["operators"] = f"torch.profiler did not start: {str(error).splitlines()[0]}"
        else:
            self._of_phase.callback(self._end_trace, trace)

    def _end_trace(self, trace: profile) -> None:
        trace.stop()
        if len(self._seconds["traced"]) < self.schedule.traced:
            return  # a part of a step would count as one
        rows = sorted(trace.key_averages(), key=lambda row: (-row.self_cpu_time_total, row.key))
        named = [row for row in rows if not row.key.startswith(("Optimizer.", "enumerate(", "ProfilerStep"))]
        self._operators = tuple(
            Operator(row.key, row.count, row.self_cpu_time_total / 1e6) for row in named[:_OPERATORS]
        )

    def _waited(self, wait: Wait, batch: Any) -> None:
        self._step_waits.append(wait)
        if self.phase in ("warmup", "located") and (found := contents_of(batch)):
            self._step_contents.append(found)

    def _stepped(self, optimizer: Optimizer) -> None:
        if self._optimizer is None:
            self._optimizer = optimizer
            if self._model is None:
                self._mark_forward(models_of(optimizer))
        if optimizer is self._optimizer and not self._says_steps_itself:
            self._end_step()

    def _mark_forward(self, models: list[nn.Module]) -> None:
        self._marks.enter_context(marked_forward(self.clock, models))
        first = next((parameter for model in models for parameter in model.parameters()), None)
        self._device = str(first.device) if first is not None else self._device

    def _parameters(self) -> list[Tensor]:
        if self._optimizer is None:
            return list(self._model.parameters()) if self._model is not None else []
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]


def _by_line(waits: list[Wait]) -> tuple[LoaderWait, ...]:
    groups: dict[tuple[Place | None, str, int], list[float]] = {}
    for wait in waits:
        groups.setdefault((wait.place, wait.dataset, wait.workers), []).append(wait.seconds)
    return tuple(
        LoaderWait(place, dataset, workers, len(seconds), sum(seconds))
        for (place, dataset, workers), seconds in groups.items()
    )
