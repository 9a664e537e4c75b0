"""The batch size: the most sequences that one pass has memory for. It never changes a result."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradprobe_hf.data.batches import Batches, row_count
from gradprobe_hf.estimation.machine import available_bytes
from gradprobe_hf.estimation.passes import activation_bytes
from gradprobe_hf.memory.accumulator_files import accumulator_files
from gradprobe_hf.memory.accumulator_place import ChosenPlace
from gradprobe_hf.memory.checkpointing import ACTIVATIONS_SHARE, choose_checkpointing
from gradprobe_hf.memory.measured_passes import MeasuredPass, ProbePasses, free_bytes, leaves_room, promised_rows
from gradprobe_hf.model.fsdp import is_sharded
from gradprobe_hf.model.parameters import input_device, is_offloaded
from gradprobe_hf.probe.accumulation.storage import AccumulatorStorage
from gradprobe_hf.probe.steps import most_rows
from gradprobe_hf.run.context import RunContext

LARGEST_BATCH = 64
FIRST = (1, 2, 4)  # rows that memory is measured at
_CLOSE = 4  # times as much as is free, or a fourth of it: where an estimate lies between, passes are measured


@dataclass(frozen=True)
class ChosenBatch:
    """Attributes:
    calibration: the same rows, in batches of that size.
    why: how it was chosen, for the report; "": nothing had to be.
    measured: passes whose memory has decided, the smallest first; empty: an estimate has.
    """

    calibration: Batches
    why: str
    measured: tuple[MeasuredPass, ...] = ()


def largest_batch(context: RunContext, place: ChosenPlace, shares_probe: bool = False) -> ChosenBatch:
    """The same rows in the largest batches that one pass has memory for, alike in all processes.

    Passes of one, two and four rows are measured, and what they promise is tried: half of it where it does not fit.

    Args:
        place: of the statistics.
        shares_probe: the first probe's statistics are kept for other configurations, beside those of each.

    Raises:
        MemoryError: there is not even room for one sequence.
    """
    model, config, batches, processes = context.model, context.config, context.calibration, context.processes
    if is_sharded(model):  # a process that runs out of memory would leave the others waiting for its shards
        start = int(processes.min_(torch.tensor(first_guess(context, place.held))))
        return ChosenBatch(batches.in_batches_of(start), f"{start} (by estimate)")
    # Everything is in memory that the probe will have there.
    with accumulator_files(model, context.targets, config, context.folder, place.device) as storage:
        passes = _Passes(context, storage, shares_probe)
        passes.measure()
        start = int(processes.min_(torch.tensor(passes.promised())))
        fits = int(processes.min_(torch.tensor(passes.largest(start))))
    portioned = batches.in_batches_of(fits)
    return ChosenBatch(portioned, f"{row_count(portioned.items[0])} ({passes.told()})", tuple(passes.measured))


def passes_that_tell(context: RunContext, place: ChosenPlace, shares_probe: bool = False) -> tuple[MeasuredPass, ...]:
    """Passes of a few rows, where by estimate it is close whether a batch of the given size fits as it is.

    Arguments and errors are those of `largest_batch`.
    """
    model, config, batches = context.model, context.config, context.calibration
    if config.checkpointing != "auto" or is_sharded(model) or is_offloaded(model):
        return ()
    free = available_bytes(input_device(model)) - place.held
    rows = max(map(row_count, batches))
    expected = activation_bytes(model, rows, batches.longest, checkpointed=False)
    if expected is None or not 1 / _CLOSE <= expected / max(1, free) <= _CLOSE:
        return ()
    with accumulator_files(model, context.targets, config, context.folder, place.device) as storage:
        passes = _Passes(context, storage, shares_probe)
        with context.stopwatch("batch size"):
            passes.measure()
    return tuple(passes.measured)


class _Passes:
    """Passes of a run's probe, beside all statistics that the run will keep.

    Attributes:
        measured: those of `FIRST` that fit.
        failed: rows that did not.
        tried: rows that did, behind the measured ones.
        room: bytes that a pass could have had.
    """

    def __init__(self, context: RunContext, storage: AccumulatorStorage, shares_probe: bool) -> None:
        model, config = context.model, context.config
        self._context = context
        self._passes = ProbePasses(model, context.targets, config, storage, context.loss_fn, shares_probe)
        self._checkpointing, _ = choose_checkpointing(model, config, 1, context.calibration.longest)
        self.measured: list[MeasuredPass] = []
        self.failed: list[int] = []
        self.tried: list[int] = []
        self.room = 0

    def measure(self) -> None:
        """At `FIRST`, as long as there is room for the next.

        Raises:
            MemoryError: there is none for the first.
        """
        if self._pass(1) is None:  # it also makes what is made once, which is in no figure
            raise MemoryError("not even one sequence fits")
        self.room = free_bytes(input_device(self._context.model))
        for rows in (rows for rows in FIRST if rows <= _most(self._context)):
            if self.measured and not leaves_room(self.measured[-1], rows, self.room):
                break
            found = self._pass(rows)
            if found is None or found.rows != rows:  # rows of different lengths cannot be stacked
                break
            self.measured.append(found)

    def promised(self) -> int:
        """The largest power of two that has room, by what was measured; else by estimate."""
        if self.failed or not self.measured:
            return self._ran
        if self.measured[0].nbytes is None:
            return first_guess(self._context)  # the statistics are there
        most = promised_rows(self.measured, self.room, _most(self._context)) or 1
        return max(self._ran, 1 << most.bit_length() - 1)

    def largest(self, start: int) -> int:
        """The first that fits of a size, its half, and so on."""
        while start > self._ran and self._pass(start) is None:
            start //= 2
        self.tried += [start] * (start > self._ran)
        return start

    def told(self) -> str:
        """In words."""
        words = []
        taken = ", ".join(f"{one.nbytes / 1e6:.3g}" for one in self.measured if one.nbytes is not None)
        if self.measured and not taken:
            words.append("by estimate: this system does not tell what a pass takes")
        elif self.measured:
            rows = ", ".join(str(one.rows) for one in self.measured)
            words.append(f"passes of {rows} take {taken} MB, {self.room / 1e9:.3g} GB are free")
        words += [f"{rows} does not fit" for rows in self.failed]
        words += [f"{rows} was tried" for rows in self.tried]
        return "; ".join(words) or "rows cannot be stacked"

    @property
    def _ran(self) -> int:
        return max((one.rows for one in self.measured), default=1)

    def _pass(self, rows: int) -> MeasuredPass | None:
        """None: out of memory."""
        first = self._context.calibration.in_batches_of(rows).items[0]
        found = self._passes.run(first, self._checkpointing)
        self.failed += [rows] * (found is None)
        return found


def first_guess(context: RunContext, held: int = 0) -> int:
    """The largest power of two whose activations fit by estimate: a CPU does not fail to allocate, it is killed.

    Args:
        held: bytes that are free now, and will not be.
    """
    model, config, batches = context.model, context.config, context.calibration
    free = ACTIVATIONS_SHARE * (available_bytes(input_device(model)) - held)
    recomputed = config.checkpointing is True or is_offloaded(model)

    def fits(rows: int) -> bool:
        taken = activation_bytes(model, rows, batches.longest, checkpointed=recomputed)
        return taken is not None and taken <= free

    size = 1
    while 2 * size <= _most(context) and fits(2 * size):
        size *= 2
    return size


def _most(context: RunContext) -> int:
    """Rows that a batch may have if memory has no end."""
    return min(LARGEST_BATCH, most_rows(context.model, context.targets, context.calibration, context.processes))
