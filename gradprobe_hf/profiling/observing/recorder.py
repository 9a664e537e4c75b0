"""The recorder: walks through the schedule, step by step, and puts everything back."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from torch.optim import Optimizer

from gradprobe_hf.profiling.observing.batch_contents import Uncounted, added, contents_of
from gradprobe_hf.profiling.observing.call_watch import CallWatch, Seen, Trained, summed
from gradprobe_hf.profiling.observing.compilations import CompilationWatch, compiled_frames
from gradprobe_hf.profiling.observing.loaders import TrainingLoaders
from gradprobe_hf.profiling.observing.memory import memory_now
from gradprobe_hf.profiling.observing.modules import ModuleWatch
from gradprobe_hf.profiling.observing.observation import (
    Contents,
    LoaderWait,
    MemorySample,
    Observation,
    RankStages,
    Setup,
    Span,
)
from gradprobe_hf.profiling.observing.places import Place
from gradprobe_hf.profiling.observing.ranks import Ranks
from gradprobe_hf.profiling.observing.schedule import Schedule
from gradprobe_hf.profiling.observing.setup import SetupWatch, parameters_of
from gradprobe_hf.profiling.observing.stages import (
    STAGES,
    StageClock,
    Wait,
    called_instead,
    marked_forward,
    marked_stages,
    models_of,
    watched_passes,
)
from gradprobe_hf.profiling.observing.step_trace import StepTrace
from gradprobe_hf.runtime.device_time import now

Phase = Literal["warmup", "timed", "traced", "located"]
_ORDER: tuple[Phase, ...] = ("warmup", "timed", "traced", "located")
_PICTURED = 3  # steps of which every stretch is kept
_SEVERAL_AFTER = 3  # steps of several loaders in a row with more batches than passes; one that fetches ahead has one
_OVER_AFTER = 10  # steps of another optimizer without one of the first: more than a discriminator takes for one
_BESIDE = "a thread of the script's own fetches the batches, beside the steps"


class Recorder:
    """From `start` to `stop`, or to the end of its schedule, whichever comes first.

    A step ends with an optimizer step of the first optimizer that takes one, until `step` is called: from then on the
    loop says itself where its steps end. Where another optimizer goes on without the first, a phase of the training is
    over before the schedule was: observing begins again, with the other. An evaluation between two steps is a part of
    none: passes without gradients before the step has asked for a batch of its own, and what is made of them until it
    does. A step with one behind its own passes does not count.

    Args:
        model: whose forward pass is a stage. Default: what holds the parameters of the first optimizer.
        finished: called behind the last step of the schedule.
    """

    def __init__(
        self, schedule: Schedule, model: nn.Module | None = None, finished: Callable[[], None] | None = None
    ) -> None:
        self.schedule = schedule
        self.phase: Phase | None = None
        self._models, self._finished = [model] if model is not None else [], finished
        self._optimizer: Optimizer | None = None
        self._others: Counter[int] = Counter()  # steps of other optimizers since its last one
        self._models_were_given = model is not None
        self._calls_seen: bool | None = None  # of the models, in this step; None: they were marked within it
        self._looked_inside = False
        self._earlier: list[Observation] = []  # one for each phase of the training that was over too soon
        self._says_steps_itself = False
        self._marks, self._of_phase = ExitStack(), ExitStack()
        self._seconds: dict[Phase, list[float]] = {phase: [] for phase in _ORDER}
        self._stages: Counter[str] = Counter()
        self._spans: tuple[Span, ...] = ()
        self._begins: deque[float] = deque(maxlen=_PICTURED)
        self._waits: list[Wait] = []
        self._step_waits: list[Wait] = []
        self._loaders = TrainingLoaders()
        self._evaluations = 0
        self._evaluates = False  # between two steps
        self._is_spoiled = False  # an evaluation was made within the step
        self._contents: list[Contents] = []
        self._timed_contents: list[Contents | Uncounted] = []
        # Of batches that no pass has taken; None: nobody looked into it.
        self._ahead: deque[Contents | Uncounted | None] = deque()
        self._there_before = 0  # of these before the step, or the evaluation, began
        self._step_contents: list[Contents | Uncounted | None] = []
        self._takes_passes = False  # whether a training pass was seen in this step
        self._left_over = 0  # steps in a row behind which more of these were there than before
        self._steps_with_contents = self._timed_with_contents = 0
        self._calls: list[list[Seen]] = []
        self._trace = StepTrace()
        self._compilations = CompilationWatch()
        self._memory: list[MemorySample] = []
        self._setup_watch, self._ranks = SetupWatch(), Ranks()
        self._setup: Setup | None = None
        self._told: tuple[RankStages, ...] = ()
        self._processes = 1
        self._missing: dict[str, str] = {}
        self._device = "cpu"
        self._complete = self._is_over = self._in_step = False

    def start(self) -> None:
        """Begin with the warm-up."""
        self.clock = StageClock()
        trained = Trained(self._parameters, self._weights)
        self._watch = CallWatch(trained, lambda: self.clock.stage == "data loading")
        self._modules = ModuleWatch(lambda: self.clock.in_backward)
        self._compilations.start()
        self._marks.enter_context(marked_stages(self.clock, self._waited, self._stepped))
        if self._models:
            self._mark_forward(self._models)
        self._open("warmup")

    def step(self) -> None:
        """The loop has come to the end of a step."""
        if not self._says_steps_itself and self._optimizer is not None:
            self.begin_again()  # the optimizer's steps were counted so far
        self._says_steps_itself = True
        self._end_step()

    def follow(self, model: nn.Module) -> None:
        """The model whose forward pass is a stage, if it was not known at the start."""
        if not self._models and self.phase is not None:
            self._models, self._models_were_given = [model], True
            self._mark_forward(self._models)

    def saw(self, batch: Any) -> None:
        """A batch of this step that no data loader handed out."""
        self._step_contents.append(self._contents_of(batch))

    def _contents_of(self, batch: Any) -> Contents | Uncounted | None:
        """None in a phase that looks into none, too."""
        if self.phase == "timed":
            return Uncounted.of(batch, self._has_decoder)
        return contents_of(batch, self._has_decoder) if self.phase in ("warmup", "located") else None

    @property
    def located_seconds(self) -> tuple[float, ...]:
        """Of each step under the watch for lines. They are no measurement."""
        return tuple(self._seconds["located"])

    def begin_again(self) -> None:
        """With the warm-up; what was seen of steps so far is dropped."""
        if self.phase is not None:
            self._close()
            self._seconds = {phase: [] for phase in _ORDER}
            self._waits, self._calls = [], []
            self._forget_contents()
            self._stages.clear()
            self._begins.clear()
            self._memory.clear()
            self._setup_watch.begin_again()
            self._modules = ModuleWatch(lambda: self.clock.in_backward)
            self._trace, self._missing = StepTrace(), {}
            self._evaluations = self._left_over = 0
            self._open("warmup")

    @property
    def done(self) -> bool:
        """Whether nothing is observed any more."""
        return self.phase is None

    @property
    def has_timed(self) -> bool:
        """Whether a step was measured."""
        return bool(self._seconds["timed"])

    def begin_step_anew(self) -> None:
        """What was done since the last step belongs to none."""
        if self.phase is not None:
            self._drop_step()

    def evaluated(self) -> None:
        """What was done since the last step was an evaluation. Harmless where that was noticed."""
        if self.phase is not None:
            if not self._evaluates and self.phase == "traced":  # it is in the trace, which has to begin again
                self._seconds["traced"].clear()
            self._evaluate()

    def stop(self) -> None:
        """Leave no hook behind. Harmless at any time; a step that has begun does not count."""
        if self.phase is not None:
            self._close()
            self.phase = None
        self._marks.close()
        self._optimizer, self._models = None, []  # its state is twice the model
        self._setup_watch.forget()

    def observation(self) -> Observation:
        """What was seen so far; of the phase of the training before it, where only that one was measured."""
        measured = [one for one in self._earlier if one.timed]
        return measured[-1] if measured and not self.has_timed else self._observed()

    def _observed(self) -> Observation:
        return Observation(
            warmup=len(self._seconds["warmup"]),
            timed=tuple(self._seconds["timed"]),
            traced=tuple(self._seconds["traced"]),
            located=len(self._calls),
            stages={stage: self._stages[stage] for stage in STAGES} if self._seconds["timed"] else {},
            loaders=_by_line(self._waits),
            calls=summed(self._calls),
            operators=self._trace.found.operators,
            compilations=self._compilations.compiled,
            contents=added(self._contents, self._steps_with_contents, self._loaders.dealt_to),
            timed_contents=added(
                [_counted(one) for one in self._timed_contents], self._timed_with_contents, self._loaders.dealt_to
            ),
            device=self._device,
            versions={"torch": torch.__version__, "transformers": transformers.__version__},
            missing={**self._missing, **self._unseen()},
            complete=self._complete,
            modules=self._modules.times(),
            graph_breaks=self._compilations.breaks,
            setup=self._setup,
            memory=tuple(self._memory),
            recomputed=_share(self._modules.recomputed, self._seconds["located"]),
            collectives=self._share_of_trace(self._trace.found.collectives) if self._processes > 1 else None,
            busy=self._share_of_trace(self._trace.found.busy) if self._is_on_gpu else None,
            ranks=self._told,
            processes=self._processes,
            spans=self._spans,
            gradient_norms=self._setup_watch.norms(),
            evaluations=self._evaluations,
            training_phase=1 + len(self._earlier),
        )

    def _unseen(self) -> dict[str, str]:
        """Stages that took place, and no time: what calls them is not marked."""
        if not self._seconds["timed"]:
            return {}
        why = {
            "forward": "no call of the model was seen, nor of what is directly inside of it: it is in `other`",
            "backward": "neither `Tensor.backward` nor `torch.autograd.grad` was called: it is in `other`",
        }
        return {stage: told for stage, told in why.items() if not self._stages[stage]}

    def _end_step(self) -> None:
        if self.phase is None:
            return
        self._look_inside()
        self._evaluates = self._modules.rests = False
        if self._trace.waits:  # no pass has begun it: those of a model that is compiled are not seen
            self._start_trace()
            self._is_spoiled = True
        if self._is_spoiled:
            self._drop_step()
            return
        seconds = self._seconds[self.phase]
        seconds.append(now(self._device) - self._began)
        self._keep_step(self.phase, first=len(seconds) == 1)
        self._memory.append(memory_now(self._device))
        self._loaders.end_step()
        is_traced = self.phase == "traced"
        if len(seconds) == getattr(self.schedule, self.phase) or (is_traced and self._trace.is_full):
            self._trace.is_whole |= is_traced
            self._next()
        self._drop_step()

    def _keep_step(self, phase: Phase, first: bool) -> None:
        """What was seen in a step counts once the step has come to its end."""
        if phase == "timed":
            self._stages.update(self.clock.cut())
            self._begins.append(self._began)
            self._waits += self._step_waits
        elif phase == "located":
            self._calls.append(self._watch.cut())
            self._modules.keep()
        more = len(self._ahead) - self._there_before
        self._left_over = self._left_over + 1 if more > 0 and self._loaders.are_several else 0
        if not self._takes_passes:  # they are not seen of a model that is compiled: as fetched
            self._take(len(self._ahead))
        elif self._left_over >= _SEVERAL_AFTER:  # a pass takes one of each
            if self._left_over == _SEVERAL_AFTER:  # the steps so far had more than was counted
                self._forget_contents()
            self._take(more)
        # The first step of all may have fetched more than its own batches. A batch that was fetched ahead, in a phase
        # that looks into none, is not known.
        known = [one for one in self._step_contents if one is not None]
        is_known = len(known) == len(self._step_contents)
        if is_known and phase == "timed":
            self._timed_contents += known
            self._timed_with_contents += bool(known)
        elif is_known and (phase == "located" or (phase == "warmup" and not first)):
            self._contents += map(_counted, known)
            self._steps_with_contents += 1

    def _forget_contents(self) -> None:
        self._contents, self._timed_contents = [], []
        self._steps_with_contents = self._timed_with_contents = 0

    def _take(self, batches: int) -> None:
        """The first so many batches that were fetched are this step's: Accelerate's loader fetches one ahead."""
        self._step_contents += [self._ahead.popleft() for _ in range(min(batches, len(self._ahead)))]

    def _drop_step(self) -> None:
        self._step_waits, self._step_contents = [], []
        self._is_spoiled = self._takes_passes = False
        self._there_before = len(self._ahead)
        self._loaders.begin_step()
        self._modules.drop()
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
        self._complete = self._is_over = True
        if not self._in_step:  # torch goes through its hooks of a step right now
            self.stop()
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
            self._compilations.begin_timed()
        elif phase == "traced":
            self._start_trace()
        elif phase == "located":
            self._of_phase.callback(self._watch.stop)
            self._of_phase.callback(self._modules.stop)
            self._modules.start(self._models)
            self._watch.start()
        self._drop_step()

    def _close(self) -> None:
        """End the phase; what it has measured is kept."""
        if self.phase == "warmup":
            self._setup = self._setup_watch.setup(self._models)
            self._processes = self._ranks.count()
        elif self.phase == "timed":
            self._compilations.end_timed()
            timed = self._seconds["timed"]
            self._spans = self.clock.spans_since(self._begins[0]) if self._begins else ()
            self._ranks.tell({stage: seconds / len(timed) for stage, seconds in self._stages.items()} if timed else {})
        elif self.phase == "traced" and self._trace.is_whole:
            self._ask_ranks()
        elif self.phase == "located" and self._setup is not None:
            self._setup = replace(self._setup, asked=self._setup.asked or self._watch.autocast)
        self._compilations.end_phase()
        self._of_phase.close()

    def _ask_ranks(self) -> None:
        try:
            self._told = self._ranks.told()
        except RuntimeError as error:  # a process that is not profiled, or has ended
            self._missing["imbalance between ranks"] = f"another process told nothing: {str(error).splitlines()[0]}"

    def _start_trace(self) -> None:
        try:
            self._trace.start()
        except RuntimeError as error:  # only one profiler can run
            self._missing["operators"] = f"torch.profiler did not start: {str(error).splitlines()[0]}"
        else:
            self._of_phase.callback(lambda: self._trace.stop(self._is_on_gpu))

    def _share_of_trace(self, seconds: float | None) -> float | None:
        return None if seconds is None else _share(seconds, self._seconds["traced"])

    def _waited(self, wait: Wait, batch: Any, iterator: Any) -> None:
        if self._is_over:
            self.stop()
            return
        if not self.clock.is_mine:  # what a step waits for that thread is "other", and which step has the batch unknown
            self._missing |= dict.fromkeys(("data loading", "padding"), _BESIDE)
            self._step_waits.append(replace(wait, seconds=0.0, starting=0.0))
            return
        self._loaders.fetched(iterator, wait.processes)
        if self._evaluates and self._loaders.is_own:  # what was computed of an evaluation belongs to it
            self._evaluates = False
            self._drop_step()
            self._loaders.fetched(iterator, wait.processes)
            self.clock.begin_in(wait.seconds)
            self._began -= wait.seconds
        self._step_waits.append(wait)
        if self._loaders.is_own:
            self._ahead.append(self._contents_of(batch))

    def _pass_begins(self) -> None:
        if self._is_over:
            self.stop()
        self._calls_seen = True
        if self.phase is None:
            return
        if torch.is_grad_enabled():
            self._evaluates = self._modules.rests = False
            self._takes_passes = True
            self._take(1)
            if self._trace.waits:
                self._start_trace()
                self._began = time.perf_counter()
        elif self._is_spoiled or not self._loaders.are_known:
            return
        elif not self._loaders.has_batch:
            self._evaluate()
        elif not self._loaders.is_own:
            self._is_spoiled = self._modules.rests = True
            self._evaluations += 1
            if self.phase == "traced":  # all of the step is in the trace, and it ends here
                self._seconds["traced"].append(time.perf_counter() - self._began)
                self._end_trace_early()
                self._is_spoiled = True  # what is left of it is no located one

    def _pass_ended(self) -> None:
        if self.phase is not None and self._evaluates:
            self._drop_step()

    def _evaluate(self) -> None:
        """An evaluation between steps has begun, or goes on; what came before it since the last step belongs to it."""
        if not self._evaluates:
            self._evaluates = self._modules.rests = True
            self._evaluations += 1
            self._begins.clear()  # a picture across it would show it
            if self.phase == "traced":
                self._end_trace_early()
        while len(self._ahead) > self._there_before:  # the evaluation's own; a training batch may lie ready
            self._ahead.pop()
        self._drop_step()

    def _end_trace_early(self) -> None:
        """Behind whole steps, if there are any; it begins again with the next step otherwise."""
        if self._seconds["traced"]:
            self._trace.is_whole = True
            self._next()
        else:
            self._of_phase.close()
            self._trace.waits = True

    def _stepped(self, optimizer: Optimizer) -> None:
        if self._optimizer is None:
            self._count_steps_of(optimizer)
        elif optimizer is self._optimizer:
            self._others.clear()
        elif not self._says_steps_itself:
            self._others[id(optimizer)] += 1
            if self._others[id(optimizer)] == _OVER_AFTER:
                self._earlier.append(self._observed())
                self._setup_watch.forget()
                self.begin_again()
                self._count_steps_of(optimizer)
        if self.phase == "warmup":
            self._setup_watch.note(optimizer)
        if self.phase in ("warmup", "located") and optimizer is self._optimizer:
            self._setup_watch.note_norm(optimizer)
        if self.phase not in (None, "warmup") and self._setup is not None and self._setup_watch.is_new(optimizer):
            # What the warm-up took for gradients that nobody steps may be its own.
            self._setup = replace(self._setup, without_optimizer=(), wasted_bytes=0)
        if optimizer is self._optimizer and not self._says_steps_itself:
            self._in_step = True
            try:
                self._end_step()
            finally:
                self._in_step = False

    def _count_steps_of(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._others.clear()
        if not self._models_were_given:
            known, self._models = self._models, models_of(optimizer)
            self._looked_inside = False
            self._mark_forward([one for one in self._models if all(one is not other for other in known)])

    @property
    def _has_decoder(self) -> bool:
        """Whether the model reads one text and writes another."""
        plain = [getattr(model, "module", model) for model in self._models]
        return any(getattr(getattr(one, "config", None), "is_encoder_decoder", False) for one in plain)

    @property
    def _is_on_gpu(self) -> bool:
        return self._device.startswith("cuda")

    def _look_inside(self) -> None:
        """Mark what is called in place of the models, where a whole step has called none of them."""
        if self._calls_seen is False and self._models and not self._looked_inside:
            self._mark_forward([one for model in self._models for one in called_instead(model)])
            self._looked_inside = True
        else:
            self._calls_seen = False

    def _mark_forward(self, models: list[nn.Module]) -> None:
        self._calls_seen = None
        self._marks.enter_context(marked_forward(self.clock, models))
        self._marks.enter_context(watched_passes(models, self._pass_begins, self._pass_ended))
        first = next((parameter for model in self._models for parameter in model.parameters()), None)
        self._device = str(first.device) if first is not None else self._device

    def _parameters(self) -> list[Tensor]:
        return parameters_of(self._optimizer) if self._optimizer is not None else self._weights()

    def _weights(self) -> list[Tensor]:
        return [one for model in self._models for one in (*model.parameters(), *model.buffers())]


def _counted(found: Contents | Uncounted) -> Contents:
    return found.count() if isinstance(found, Uncounted) else found


def _share(seconds: float, steps: list[float]) -> float:
    return min(1.0, seconds / sum(steps)) if steps else 0.0


def _by_line(waits: list[Wait]) -> tuple[LoaderWait, ...]:
    groups: dict[tuple[Place | None, str, int], list[Wait]] = {}
    for wait in waits:
        groups.setdefault((wait.place, wait.dataset, wait.workers), []).append(wait)
    return tuple(
        LoaderWait(*line, len(found), sum(one.seconds for one in found), sum(one.starting for one in found))
        for line, found in groups.items()
    )
