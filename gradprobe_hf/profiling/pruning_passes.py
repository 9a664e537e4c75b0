"""Passes of a pruning run's probe at several sizes, with checkpointing and without, and what they say for its options.

They are the passes that `batch_size="auto"` decides by, made in turns, so that their speed can be compared too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from gradprobe_hf.checkpoint.result import PruneResult
from gradprobe_hf.data.batches import row_count
from gradprobe_hf.estimation.passes import activation_bytes
from gradprobe_hf.memory.accumulator_files import accumulator_files
from gradprobe_hf.memory.batch_size import LARGEST_BATCH
from gradprobe_hf.memory.measured_passes import SHARE, MeasuredPass, ProbePasses, free_bytes, leaves_room, promised_rows
from gradprobe_hf.memory.memory_errors import remedies_for
from gradprobe_hf.model.fsdp import is_sharded
from gradprobe_hf.model.parameters import input_device, is_offloaded
from gradprobe_hf.model.passes.patches import checkpointed_layers
from gradprobe_hf.model.passes.upcast import upcast_products
from gradprobe_hf.profiling.findings.finding import gigabytes
from gradprobe_hf.profiling.observing.observation import BatchSize, Observation, RunOption
from gradprobe_hf.report.against_estimate import Expectation, planned

logger = logging.getLogger(__name__)

_TIMES = (1, 2, 4)
_ROUNDS = 2
_LONGEST = 10.0  # seconds of one pass
_SHORT = 0.1  # of the memory, free at the fullest: then some should be saved
_FASTER = 1.05

Key = tuple[int, bool]  # times the batch, checkpointing


def with_passes(seen: Observation, result: PruneResult, batch: Mapping[str, Any]) -> Observation:
    """The observation of a run with passes at several sizes, where it has probes whose batches can be made larger.

    Args:
        batch: one of the probe's.
    """
    config, model = result.config, result.model
    if not config.needs.probes or is_sharded(model) or not _is_stackable(batch):
        return seen
    place = planned(result.report).accumulator_device
    # "auto" still: the run kept no statistics of single weights.
    device = "same" if place == "auto" else place
    with upcast_products(model), accumulator_files(model, result.targets, config, None, device) as storage:
        own = result.report.execution["checkpointing"].startswith("on")
        without = _estimated(result, batch, row_count(batch), checkpointing=False)
        logger.info("passes of the probe in batches of other sizes, with checkpointing and without ...")
        passes = _Passes(ProbePasses(model, result.targets, config, storage), batch, input_device(model), without)
        passes.measure([(times, own) for times in _TIMES], [(1, not own)] if checkpointed_layers(model) else [])
        limit = passes.look_for_largest(own)
    sizes = tuple(passes.size(key) for key in sorted(passes.asked) if key[1] == own)
    other = passes.size((1, not own)) if (1, not own) in passes.asked else None
    seen = replace(seen, batches=sizes, batch_limit=limit, other_checkpointing=other, checkpointing=own)
    expected = [_expectation(result, batch, passes, (times, own)) for times in _TIMES]
    known = [one for one in expected if one is not None]
    return replace(seen, expected=(*seen.expected, *known), options=_options(seen, result, passes))


class _Passes:
    """Passes by key, each as often as there are rounds.

    Args:
        without: bytes that the batch is estimated to take without checkpointing.

    Attributes:
        asked: what was to be measured.
        failed: key -> why it could not be.
    """

    def __init__(
        self, passes: ProbePasses, batch: Mapping[str, Any], device: torch.device, without: int | None
    ) -> None:
        self._passes, self._batch, self._device, self._without = passes, batch, device, without
        self.rows, self.room = row_count(batch), 0
        self.found: dict[Key, list[MeasuredPass]] = {}
        self.failed: dict[Key, str] = {}
        self.asked: list[Key] = []
        self._gains: dict[Key, list[float]] = {}
        self._ran: set[Key] = set()

    def measure(self, keys: Sequence[Key], others: Sequence[Key]) -> None:
        """Each once a round, with the first of all beside it."""
        first = keys[0]
        self._run(first)  # makes what is made once, which is in no figure
        self.found.clear()
        self.room = free_bytes(self._device)
        self.asked += [*keys, *others]
        for number in range(_ROUNDS):
            own = self._run(first)
            for key in [*keys[1:], *others] if number % 2 == 0 else [*others, *keys[:0:-1]]:
                self._beside(own, key)

    def look_for_largest(self, checkpointing: bool) -> str:
        """Try the largest batch that these promise; returns why no larger one is."""
        known = [self._median((times, checkpointing)) for times in _TIMES if (times, checkpointing) in self.found]
        most = promised_rows(known, self.room, LARGEST_BATCH)
        if most is None:
            return "what a larger one takes is not known"
        seconds = known[-1].seconds / known[-1].rows
        affordable = max(1, int(_LONGEST / seconds))
        times = min(most, affordable, LARGEST_BATCH) // self.rows
        if times > _TIMES[-1]:
            self.asked.append((times, checkpointing))
            for _ in range(_ROUNDS):
                self._beside(self._run((1, checkpointing)), (times, checkpointing))
        if affordable < min(most, LARGEST_BATCH):
            return f"a pass of a larger one would take more than {_LONGEST:.0f} s"
        if most >= LARGEST_BATCH:
            return f"none above {LARGEST_BATCH} sequences is tried"
        return "by what these took, no larger one would fit"

    def size(self, key: Key) -> BatchSize:
        """For the report."""
        if key in self.failed:
            return BatchSize(key[0], float(key[0] * self.rows), failed=self.failed[key])
        one, gains = self._median(key), self._gains.get(key, [])
        pays = bool(gains) and min(gains) > 1
        return BatchSize(key[0], float(one.rows), one.nbytes, self.room, None, median(gains) if gains else None, pays)

    def _beside(self, own: MeasuredPass | None, key: Key) -> None:
        """A pass, and how it compares with one that was just made."""
        if key in self.failed:
            return
        one = self._run(key)
        if one is not None and own is not None:
            self._gains.setdefault(key, []).append(one.rows / one.seconds / (own.rows / own.seconds))

    def _run(self, key: Key) -> MeasuredPass | None:
        times, checkpointing = key
        if why := self._too_large(key):
            self.failed[key] = why
            return None
        larger = {name: torch.cat([value] * times) for name, value in self._batch.items()}
        one = self._passes.run(larger, checkpointing)
        if one is None:
            self.failed[key] = "out of memory"
            return None
        self._ran.add(key)
        self.found.setdefault(key, []).append(one)
        return one

    def _too_large(self, key: Key) -> str | None:
        times, checkpointing = key
        smaller = [one for one in self.found if one[1] == checkpointing and one[0] < times]
        if key in self._ran or not self.room:
            return None
        if not smaller and not checkpointing and (self._without is None or self._without > SHARE * self.room):
            return "by estimate it would not fit"
        if not smaller:
            return None
        room = leaves_room(self._median(max(smaller)), times * self.rows, self.room)
        return None if room else "by what a smaller one takes, it would not fit"

    def _median(self, key: Key) -> MeasuredPass:
        found = self.found[key]
        known = [one.nbytes for one in found if one.nbytes is not None]
        return replace(
            found[0],
            nbytes=max(known) if known else None,
            seconds=median(one.seconds for one in found),
        )


def _is_stackable(batch: Mapping[str, Any]) -> bool:
    """Whether it can be repeated: its tensors have a row for each sequence."""
    values = list(batch.values())
    return all(isinstance(one, Tensor) and one.ndim for one in values) and len({len(one) for one in values}) == 1


def _expectation(result: PruneResult, batch: Mapping[str, Any], passes: _Passes, key: Key) -> Expectation | None:
    """What a pass was estimated to take, beside what it took."""
    measured = passes.size(key).memory if key in passes.found else None
    if measured is None:
        return None
    rows = key[0] * passes.rows
    return Expectation(f"activations of {rows} sequences", "bytes", _estimated(result, batch, rows, key[1]), measured)


def _estimated(result: PruneResult, batch: Mapping[str, Any], rows: int, checkpointing: bool) -> int | None:
    model, ids = result.model, batch.get("input_ids")
    length = ids.shape[1] if isinstance(ids, Tensor) else 1
    return activation_bytes(model, rows, length, checkpointed=checkpointing)


def _options(seen: Observation, result: PruneResult, passes: _Passes) -> tuple[RunOption, ...]:
    """What the passes say for each option that they can tell something of."""
    return (
        _batch_option(seen, passes),
        *_checkpointing_option(seen),
        *_accumulator_option(result),
        _placement_option(seen, result, passes.rows),
    )


def _batch_option(seen: Observation, passes: _Passes) -> RunOption:
    fitting = [one for one in seen.batches if one.failed is None]
    faster = [one for one in fitting if one.pays and (one.gain or 0.0) >= _FASTER]
    if not faster:
        tried = ", ".join(f"{one.samples:g}" for one in fitting if one.times > 1)
        why = f"no larger batch was faster in all rounds, of {tried}" if tried else "no larger batch fits"
        return RunOption("--batch-size", f"{passes.rows}, as it is", f"{why}; {seen.batch_limit}")
    best = max(faster, key=lambda one: one.gain or 0.0)
    return RunOption("--batch-size", f"{best.samples:g}", f"{best.gain:.2f} times as many sequences a second")


def _checkpointing_option(seen: Observation) -> list[RunOption]:
    other, own = seen.other_checkpointing, seen.batches[0]
    if other is None:
        return []
    now, then = ("on", "off") if seen.checkpointing else ("off", "on")
    if other.failed is not None or other.gain is None:
        return [RunOption("--checkpointing", f"{now}, as it is", f"{then}: {other.failed or 'it was not measured'}")]
    memory = (
        f"{_size(own.memory)} a pass; {then}: {_size(other.memory)}, {other.gain:.2f} times as many sequences a second"
    )
    better = other.pays and other.gain >= _FASTER
    if other.gain >= _FASTER and not other.pays:
        memory += ", but not in all rounds"
    return [RunOption("--checkpointing", then if better else f"{now}, as it is", f"{now}: {memory}")]


def _accumulator_option(result: PruneResult) -> list[RunOption]:
    place, _, why = result.report.execution.get("accumulators", "").partition(": ")
    return [RunOption("--accumulator-device", f"{place}, as it is", why)] if place else []


def _placement_option(seen: Observation, result: PruneResult, rows: int) -> RunOption:
    """As it is, unless the run left hardly any memory."""
    free = min(one.free for one in seen.memory)
    total = max(one.free + (one.reserved or one.process) for one in seen.memory)
    what, why = "placement", f"{_size(free)} of {_size(total)} were free at the fullest"
    if free >= _SHORT * total:
        return RunOption(what, f"{result.report.execution['placement']}, as it is", why)
    remedies = remedies_for(result.config, rows, seen.checkpointing is True, is_offloaded(result.model))
    return RunOption(what, remedies[0], why)


def _size(count: int | None) -> str:
    return "?" if count is None else gigabytes(count)
