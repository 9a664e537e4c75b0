"""The largest batch that fits: memory measured at one, two and four times the batch, then tried.

It is bounded: at most three sizes that memory promises are tried behind these, none above 64 times the batch, and none
whose step would take ten seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch

from gradprobe_hf.estimation.growth import most_that_fit
from gradprobe_hf.profiling.fixing.changes import CHANGES, LARGEST, of_batch
from gradprobe_hf.profiling.fixing.fix import Fix
from gradprobe_hf.profiling.fixing.fixes import Runs
from gradprobe_hf.profiling.fixing.trial import Trial
from gradprobe_hf.profiling.observing.observation import BatchSize, Observation

logger = logging.getLogger(__name__)
FIRST = (1, 2, 4)
_MOST = 64  # times the batch
_LONGEST = 10.0  # seconds of a step
_SHARE = 0.9  # of the room: what is measured is not the peak of every batch to come
_TRIES = 3


@dataclass(frozen=True)
class BatchSizes:
    """What was tried, the smallest first; limit: why nothing larger than what fits was."""

    tried: tuple[BatchSize, ...]
    limit: str

    @property
    def largest(self) -> int:
        """How many times the run's own batch fit; 1 if nothing else did."""
        return max((one.times for one in self.tried if one.failed is None), default=1)


def unknown_room(seen: Observation) -> str | None:
    """Why the largest batch of a run cannot be looked for; None if it can."""
    kind = torch.device(seen.device).type
    if kind not in ("cpu", "cuda"):
        return f"the free memory of {seen.device} is not known"
    return CHANGES[of_batch(2)].needless(seen)


def try_batch_sizes(runs: Runs) -> BatchSizes:
    """Look for the largest batch that fits.

    Args:
        runs: a trial of a few steps with a change, or with None; RuntimeError says why it failed.
    """
    found: dict[int, BatchSize] = {}
    seconds = 0.0
    own: Trial | None = None
    for times in FIRST:
        found[times], trial = _tried(runs, times, own)
        if trial is None or found[times].failed is not None:
            return BatchSizes(tuple(found.values()), _limit(found, times, _MOST))
        own = own or trial
        seconds = fmean(trial.seconds) / times
    affordable = int(_LONGEST / seconds) if seconds else _MOST
    most = max(FIRST[-1], min(_MOST, affordable))
    memory = {times: one.memory or 0 for times, one in found.items()}
    promised = most_that_fit(memory, _SHARE * (found[1].room or 0), most)
    for _ in range(_TRIES):
        if promised <= FIRST[-1]:
            break
        logger.info("a batch %d times as large ...", promised)
        found[promised], _ = _tried(runs, promised, own)
        if found[promised].failed is None:
            break
        promised = (promised + FIRST[-1]) // 2
    return BatchSizes(tuple(found[times] for times in sorted(found)), _limit(found, most, affordable))


def with_gains(sizes: BatchSizes, fixes: Sequence[Fix], seen: Observation) -> Observation:
    """The observation with the sizes, and of each the gain that the rounds measured."""
    by_name = {one.change: one for one in fixes if one.gain is not None}
    rows = [
        replace(one, gain=fix.gain, pays=fix.pays) if (fix := by_name.get(of_batch(one.times))) else one
        for one in sizes.tried
    ]
    return replace(seen, batches=tuple(rows), batch_limit=sizes.limit)


def _tried(runs: Runs, times: int, own: Trial | None) -> tuple[BatchSize, Trial | None]:
    """And the trial, if it came to its end.

    Args:
        own: that of the run's own batch.
    """
    try:
        trial = runs(None if times == 1 else of_batch(times))
    except RuntimeError as error:
        return BatchSize(times, None, failed=str(error)), None
    return BatchSize(times, trial.samples, trial.memory, trial.room, _missed(trial, times, own)), trial


def _missed(trial: Trial, times: int, own: Trial | None) -> str | None:
    """Why no batch had as many samples as it was to have: the last of an epoch has fewer anyway."""
    if own is None:
        return None
    if not trial.done:
        return "no DataLoader was made with a batch_size"
    if trial.largest is None or own.largest is None or trial.largest > 0.99 * times * own.largest:
        return None
    return f"the largest batch that the data set gave has {trial.largest:,} samples"


def _limit(found: dict[int, BatchSize], most: int, affordable: int) -> str:
    if failed := [one for one in found.values() if one.failed is not None]:
        least = min(failed, key=lambda one: one.times)
        return f"{least.times} times as large: {least.failed}"
    if max(found) < most:
        return "by what smaller ones took, no larger one would fit"
    if affordable < _MOST:
        return f"a step of a larger one would take more than {_LONGEST:.0f} s"
    return f"none above {_MOST} times is tried"


def expanded(names: Sequence[str], sizes: BatchSizes) -> list[str]:
    """Changes to try, with the batches that fit in the place of `largest-batch`."""
    fitting = [one.times for one in sizes.tried if one.failed is None and one.times in {2, 4, sizes.largest} - {1}]
    larger = [of_batch(times) for times in fitting]
    replaced = [other for name in names for other in (larger if name == LARGEST else [name])]
    return list(dict.fromkeys(replaced))
