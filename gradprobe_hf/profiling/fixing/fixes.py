"""Trials side by side: each change beside unchanged runs before and behind it, in several rounds."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from gradprobe_hf.estimation.machine import available_bytes
from gradprobe_hf.profiling.fixing.changes import Change, change_named
from gradprobe_hf.profiling.fixing.fix import Fix
from gradprobe_hf.profiling.fixing.trial import Trial
from gradprobe_hf.profiling.observing.observation import Observation
from gradprobe_hf.profiling.observing.schedule import Schedule

logger = logging.getLogger(__name__)
_LOOKS = 0.1  # seconds between two looks at the machine's memory
_LEAST_FREE = 0.05  # of what was free before a trial
_ROUNDING = 1e-4  # relative; one float32 sum in another order differs by less, over some steps


Runs = Callable[[str | None], Trial]


@dataclass(frozen=True)
class Tried:
    """What came of changes; interrupted: by Ctrl-C, so that some rounds are missing."""

    fixes: tuple[Fix, ...]
    interrupted: bool = False


def try_changes(runs: Runs, seen: Observation, names: Sequence[str], rounds: int) -> Tried:
    """Try changes one at a time; none together with another.

    Args:
        runs: one trial with a change, or with None.
        seen: the unchanged run under the profiler.
        names: of changes; those that make no sense for `seen` are not tried.
        rounds: how often each is tried; fewer times where the unchanged script fails.
    """
    trials = _Trials(runs, {name: why for name in names if (why := _row(name).needless(seen))}, rounds)
    tried = [name for name in names if name not in trials.failed]
    interrupted = False
    try:
        for number in range(rounds if tried else 0):
            trials.round(number, tried if number % 2 == 0 else tried[::-1])
    except KeyboardInterrupt:
        interrupted = True
    except _UnchangedError as error:
        logger.warning("%s: no further change is tried", error)
        trials.leave(tried, str(error))
    return Tried(tuple(trials.fix(name) for name in names), interrupted)


class _UnchangedError(Exception):
    """A run without a change has failed: there is nothing to compare with."""


class _Trials:
    """Trials so far.

    Attributes:
        failed: change -> why it is not tried, or not any more.
    """

    def __init__(self, runs: Runs, needless: dict[str, str], rounds: int) -> None:
        self.failed = needless
        self._runs, self._rounds = runs, rounds
        self._beside: dict[str, list[_Beside]] = {}

    def round(self, number: int, names: Sequence[str]) -> None:
        """Each change once, in this order; an unchanged run behind one is the one before the next."""
        before = self._unchanged()
        for name in (one for one in names if one not in self.failed):
            logger.info("round %d of %d: %s ...", number + 1, self._rounds, name)
            try:
                changed = self._runs(name)
            except RuntimeError as error:
                self.failed[name] = str(error)
                continue
            if not changed.done:
                self.failed[name] = "it found nothing to change"
                continue
            if _goes_wrong(changed) and not _goes_wrong(before):
                self.failed[name] = "a loss is no number with it"  # however fast it is
                continue
            after = self._unchanged()
            self._beside.setdefault(name, []).append(_Beside(before, changed, after))
            logger.info("%s: %.2f times as fast", name, self._beside[name][-1].gain)
            before = after

    def leave(self, names: Sequence[str], why: str) -> None:
        """Those of some changes that have no round yet will have none."""
        self.failed |= {name: why for name in names if name not in self.failed and name not in self._beside}

    def _unchanged(self) -> Trial:
        try:
            return self._runs(None)
        except RuntimeError as error:
            raise _UnchangedError(f"a run without any change failed: {error}") from error

    def fix(self, name: str) -> Fix:
        row, found = _row(name), self._beside.get(name, [])
        if name in self.failed or not found:
            return Fix(name, "", (), None, "", self.failed.get(name, "interrupted before its turn"), row.remedy)
        done = ", ".join(dict.fromkeys(found[0].changed.done))
        loss = _losses(found) if row.same_batches else "other batches: not comparable step by step"
        memory = [one.memory for one in found if one.memory is not None]
        return Fix(
            name, done, tuple(one.gain for one in found), median(memory) if memory else None, loss, None, row.remedy
        )


@dataclass(frozen=True)
class _Beside:
    """A trial with a change, and the unchanged ones before and behind it."""

    before: Trial
    changed: Trial
    after: Trial

    @property
    def gain(self) -> float:
        return _rate(self.changed) / fmean([_rate(self.before), _rate(self.after)])

    @property
    def memory(self) -> float | None:
        """None of a script that allocates nothing on the device that is looked at."""
        unchanged = max(self.before.memory, self.after.memory)
        return self.changed.memory / unchanged if unchanged else None


def in_processes(script: str, arguments: Sequence[str], schedule: Schedule) -> Runs:
    """Trials of a script, each in a process of its own."""

    def run(change: str | None) -> Trial:
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "trial.json"
            steps = [str(max(2, schedule.warmup)), str(schedule.timed)]
            module = "gradprobe_hf.profiling.fixing.trial"
            command = [sys.executable, "-m", module, str(result), change or "-", *steps, script, *arguments]
            code, errors = _ended(command)
            if code or not result.exists():
                said = errors.strip().splitlines() or ["no error was said"]
                raise RuntimeError(f"the script ended with {code}: {said[-1]}")
            trial = Trial(**json.loads(result.read_text(encoding="utf-8")))
        if len(trial.seconds) < schedule.timed:
            raise RuntimeError(f"the script ended by itself after {len(trial.seconds)} of {schedule.timed} timed steps")
        return trial

    return run


def _ended(command: list[str]) -> tuple[int, str]:
    """A command's exit status, and what it wrote to stderr.

    A process that takes the last of the host's memory is not told so: the system kills one, maybe another. So it is
    ended before.

    Raises:
        RuntimeError: it was.
    """
    host = torch.device("cpu")
    least = _LEAST_FREE * available_bytes(host)
    # What an earlier trial has compiled would make a later one faster, and not for its change.
    environment = {**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            while True:
                try:
                    _, errors = process.communicate(timeout=_LOOKS)
                except subprocess.TimeoutExpired:
                    if available_bytes(host) < least:
                        raise RuntimeError("out of memory: hardly any was left to the machine") from None
                else:
                    return process.returncode, errors
        finally:
            process.kill()


def _row(name: str) -> Change:
    row = change_named(name)
    assert row is not None
    return row


def _rate(trial: Trial) -> float:
    """Samples a second; steps, where batches do not tell.

    By the mean: workers hand out several batches at once, and behind these a step waits for all of them.
    """
    return (trial.samples or 1.0) / fmean(trial.seconds)


def _losses(found: list[_Beside]) -> str:
    own = max(_difference(one.before, one.after) for one in found)
    changed = max(_difference(one.before, one.changed) for one in found)
    if math.isnan(own) or math.isnan(changed):
        return "not comparable: a loss is no number"
    if own > _ROUNDING:
        return f"differs by up to {changed:.2g} (relative), the unchanged script from itself by {own:.2g}: seed it"
    return f"the same within {changed:.1g}" if changed <= _ROUNDING else f"differs by up to {changed:.2g} (relative)"


def _goes_wrong(trial: Trial) -> bool:
    return not all(map(math.isfinite, trial.losses))


def _difference(one: Trial, other: Trial) -> float:
    """Largest relative difference of two losses of one step."""
    pairs: list[Any] = list(zip(one.losses, other.losses, strict=False))
    if not pairs or _goes_wrong(one) or _goes_wrong(other):
        return math.nan
    return max(abs(a - b) / max(abs(a), abs(b), 1e-12) for a, b in pairs)
