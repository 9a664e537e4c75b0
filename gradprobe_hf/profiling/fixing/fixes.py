"""Trials side by side: each change beside unchanged runs before and behind it, in several rounds."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from gradprobe_hf.profiling.fixing.changes import CHANGES
from gradprobe_hf.profiling.fixing.fix import Fix
from gradprobe_hf.profiling.fixing.trial import Trial
from gradprobe_hf.profiling.observing.observation import Observation
from gradprobe_hf.profiling.observing.schedule import Schedule

logger = logging.getLogger(__name__)
_ROUNDING = 1e-4  # relative; one float32 sum in another order differs by less, over some steps


Runs = Callable[[str | None], Trial]


def try_changes(runs: Runs, seen: Observation, names: Sequence[str], rounds: int) -> list[Fix]:
    """Try changes one at a time; none together with another.

    Args:
        runs: one trial with a change, or with None.
        seen: the unchanged run under the profiler.
        names: of changes; those that make no sense for `seen` are not tried.
        rounds: how often each is tried.

    Raises:
        RuntimeError: the unchanged script fails.
    """
    needless = {name: why for name in names if (why := CHANGES[name].needless(seen))}
    tried = [name for name in names if name not in needless]
    failed: dict[str, str] = {}
    pairs: dict[str, list[tuple[Trial, Trial, Trial]]] = {name: [] for name in tried}
    for number in range(rounds if tried else 0):
        before = runs(None)
        for name in [one for one in (tried if number % 2 == 0 else tried[::-1]) if one not in failed]:
            logger.info("round %d of %d: %s ...", number + 1, rounds, name)
            try:
                changed = runs(name)
            except RuntimeError as error:
                failed[name] = str(error)
                continue
            if not changed.done:
                failed[name] = "it found nothing to change"
                continue
            after = runs(None)
            pairs[name].append((before, changed, after))
            before = after
    return [
        _untried(name, (needless | failed)[name]) if name in needless | failed else _fix(name, pairs[name])
        for name in names
    ]


def in_processes(script: str, arguments: Sequence[str], schedule: Schedule) -> Runs:
    """Trials of a script, each in a process of its own."""

    def run(change: str | None) -> Trial:
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "trial.json"
            steps = [str(max(2, schedule.warmup)), str(schedule.timed)]
            module = "gradprobe_hf.profiling.fixing.trial"
            command = [sys.executable, "-m", module, str(result), change or "-", *steps, script, *arguments]
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
            if ended.returncode or not result.exists():
                said = ended.stderr.strip().splitlines() or ["no error was said"]
                raise RuntimeError(f"the script ended with {ended.returncode}: {said[-1]}")
            trial = Trial(**json.loads(result.read_text(encoding="utf-8")))
        if len(trial.seconds) < schedule.timed:
            raise RuntimeError(f"the script ended behind {len(trial.seconds)} of {schedule.timed} timed steps")
        return trial

    return run


def _fix(name: str, pairs: list[tuple[Trial, Trial, Trial]]) -> Fix:
    row = CHANGES[name]
    gains = tuple(_rate(changed) / fmean([_rate(before), _rate(after)]) for before, changed, after in pairs)
    memory = median(changed.memory / max(before.memory, after.memory) for before, changed, after in pairs)
    loss = _losses(pairs) if row.same_batches else "other batches: not comparable step by step"
    return Fix(name, ", ".join(dict.fromkeys(pairs[0][1].done)), gains, memory, loss, None, row.remedy)


def _untried(name: str, why: str) -> Fix:
    return Fix(name, "", (), None, "", why, CHANGES[name].remedy)


def _rate(trial: Trial) -> float:
    """Samples a second, by the median step; steps, where batches do not tell."""
    return (trial.samples or 1.0) / median(trial.seconds)


def _losses(pairs: list[tuple[Trial, Trial, Trial]]) -> str:
    own = max(_difference(before, after) for before, _, after in pairs)
    changed = max(_difference(before, with_change) for before, with_change, _ in pairs)
    if math.isnan(own) or math.isnan(changed):
        return "not comparable: a loss is no number"
    if own > _ROUNDING:
        return f"differs by up to {changed:.2g} (relative), the unchanged script from itself by {own:.2g}: seed it"
    return f"the same within {changed:.1g}" if changed <= _ROUNDING else f"differs by up to {changed:.2g} (relative)"


def _difference(one: Trial, other: Trial) -> float:
    """Largest relative difference of two losses of one step."""
    pairs: list[Any] = list(zip(one.losses, other.losses, strict=False))
    if not pairs or any(not (math.isfinite(a) and math.isfinite(b)) for a, b in pairs):
        return math.nan
    return max(abs(a - b) / max(abs(a), abs(b), 1e-12) for a, b in pairs)
