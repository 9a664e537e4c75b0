"""One trial: a script with one change or none, for as many steps as are timed, in a process of its own."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradprobe_hf.estimation.machine import available_bytes, compute_device, process_bytes
from gradprobe_hf.estimation.peak import begin_peak, peak_bytes
from gradprobe_hf.profiling.as_main import Observed, run_as_main
from gradprobe_hf.profiling.fixing.changes import change_named
from gradprobe_hf.profiling.observing.batch_contents import Uncounted
from gradprobe_hf.profiling.observing.joined import watching
from gradprobe_hf.profiling.observing.loaders import TrainingLoaders
from gradprobe_hf.profiling.observing.observation import Observation
from gradprobe_hf.profiling.observing.stages import StageClock, Wait, marked_stages, models_of, watched_passes
from gradprobe_hf.runtime.device_time import now


@dataclass(frozen=True)
class Trial:
    """Attributes:
    done: what the change changed; empty: nothing.
    seconds: of each timed step, without the evaluations between them that were told apart.
    samples: a timed step, on average; None where batches do not tell.
    largest: of all batches of these, in samples.
    losses: what each backward pass began at, from the first step on; NaN where that is no number.
    memory: bytes behind the first step at their fullest: of the process, or allocated on the device.
    room: bytes that it could have had.
    """

    done: list[str]
    seconds: list[float]
    samples: float | None
    largest: int | None
    losses: list[float]
    memory: int
    room: int = 0


@dataclass
class _Watch:
    """Counts steps of the first optimizer that takes one, or those that a loop says, and ends the script behind the
    last.

    A step begins behind the passes of an evaluation, told as the recorder tells one: passes without gradients before
    the step has fetched a batch of its own. One on the loader that trains, behind the end of an epoch, is not told.
    """

    warmup: int
    timed: int
    seconds: list[float] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    memory: int = 0
    room: int = 0
    _steps: int = 0
    _samples: list[int | None] = field(default_factory=list)
    _loaders: TrainingLoaders = field(default_factory=TrainingLoaders)
    _foreign: list[int | None] = field(default_factory=list)  # of a loader that did not feed the last step
    _evaluates: bool = False
    marks: ExitStack = field(default_factory=ExitStack)
    _optimizer: Optimizer | None = None
    _says_steps_itself: bool = False
    _since: float = 0.0

    def waited(self, wait: Wait, batch: Any, iterator: Any) -> None:
        self._loaders.fetched(iterator, wait.processes)
        is_own = self._loaders.is_own
        if is_own and self._evaluates:
            self._begin_anew(now(compute_device()) - wait.seconds)
            self._loaders.fetched(iterator, wait.processes)
            self._evaluates = False
        # Of the steps that are timed, as their seconds are: batches differ, the last of an epoch for one.
        if self._steps >= self.warmup:
            found = Uncounted.of(batch)
            (self._samples if is_own else self._foreign).append(found.samples if found else None)

    def _pass_begins(self) -> None:
        if torch.is_grad_enabled():  # on another loader's batch too, where steps take turns
            self._evaluates = False
            self._samples += self._foreign
            self._foreign.clear()
        elif self._loaders.are_known and not self._loaders.has_batch:
            self._evaluates = True

    def _pass_ended(self) -> None:
        if self._evaluates:
            self._begin_anew(now(compute_device()))

    def _begin_anew(self, since: float) -> None:
        """What was before belongs to no step."""
        self._foreign.clear()
        self._loaders.begin_step()
        self._since = since

    def stepped(self, optimizer: Optimizer) -> None:
        if self._optimizer is None:
            self._optimizer = optimizer
            self.marks.enter_context(watched_passes(models_of(optimizer), self._pass_begins, self._pass_ended))
        if optimizer is self._optimizer and not self._says_steps_itself:
            self._end_step()

    def step(self) -> None:
        """A loop that says itself where its steps end."""
        self._says_steps_itself = True
        self._end_step()

    @property
    def done(self) -> bool:
        return len(self.seconds) == self.timed

    def follow(self, model: nn.Module) -> None:
        """Nothing is asked of it."""

    def observation(self) -> Observation:
        raise Observed  # a loop that ends by itself, with a report: a trial has none

    def _end_step(self) -> None:
        self._steps += 1
        self._loaders.end_step()
        self._foreign.clear()
        self._evaluates = False
        ended = now(compute_device())
        if self._steps > self.warmup:
            self.seconds.append(ended - self._since)
        if self._steps == 1:
            begin_peak(compute_device())
        else:
            self.memory = peak_bytes(compute_device())
        if self.done:
            self.room = _room()
            raise Observed
        self._since = now(compute_device())

    def samples(self) -> tuple[float | None, int | None]:
        """A step, and the most in one batch."""
        known = [one for one in self._samples if one is not None]
        if not known or len(known) < len(self._samples):
            return None, None
        return sum(known) / len(self.seconds), max(known)


def run_trial(script: str, arguments: list[str], change: str | None, warmup: int, timed: int) -> Trial:
    """The script for some steps. Its own errors are its own."""
    watch = _Watch(warmup, timed)
    row = change_named(change) if change else None
    made = row.made() if row else nullcontext([])
    marks = marked_stages(StageClock(), watch.waited, watch.stepped)
    with made as done, _kept_losses(watch.losses), marks, watching(watch), watch.marks:
        run_as_main(script, arguments)
    losses = [float(one) for one in watch.losses]
    return Trial(done, watch.seconds, *watch.samples(), losses, watch.memory, watch.room)


@contextmanager
def _kept_losses(losses: list[Tensor]) -> Iterator[None]:
    """What backward passes begin at, kept on its device: reading it would wait for it."""
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        first = tensors if isinstance(tensors, Tensor) else tensors[0]
        losses.append(first.detach() if first.numel() == 1 else torch.tensor(float("nan")))
        original(tensors, *args, **kwargs)

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = original


def _room() -> int:
    """What is free, and what this process has of it."""
    device = compute_device()
    own = torch.cuda.memory_reserved(device) if device.type == "cuda" else process_bytes()
    return own + available_bytes(device)


def main() -> None:
    """`python -m gradprobe_hf.profiling.fixing.trial RESULT CHANGE|- WARMUP TIMED SCRIPT ARGUMENTS...`"""
    result, change, warmup, timed, script, *arguments = sys.argv[1:]
    trial = run_trial(script, arguments, None if change == "-" else change, int(warmup), int(timed))
    Path(result).write_text(json.dumps(asdict(trial)), encoding="utf-8")


if __name__ == "__main__":
    main()
