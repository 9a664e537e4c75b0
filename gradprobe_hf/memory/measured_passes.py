"""Measured passes: one batch of a probe at some sizes, with the memory that it takes and its seconds.

`batch_size="auto"` decides by them, and `gradprobe profile prune` shows them. The statistics that they add to are
thrown away.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from accelerate.utils.memory import clear_device_cache
from transformers import PreTrainedModel

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.data.batches import row_count
from gradprobe_hf.estimation.growth import line_through, most_that_fit
from gradprobe_hf.estimation.machine import available_bytes, process_bytes
from gradprobe_hf.estimation.peak import begin_peak, peak_bytes
from gradprobe_hf.memory.memory_errors import is_out_of_memory
from gradprobe_hf.model.parameters import input_device
from gradprobe_hf.model.passes.loss import Batch, LossFunction
from gradprobe_hf.model.targets import Target
from gradprobe_hf.probe.accumulation.storage import AccumulatorStorage
from gradprobe_hf.probe.engine import ProbePass, Workload, run_probe
from gradprobe_hf.probe.statistics import Statistics
from gradprobe_hf.runtime.device_time import now
from gradprobe_hf.runtime.stopwatch import return_free_memory
from gradprobe_hf.scores.terms import Term

SHARE = 0.8  # of free memory, that what was measured of smaller batches may promise a larger one


@dataclass(frozen=True)
class MeasuredPass:
    """Attributes:
    rows: sequences in the batch.
    checkpointing: whether blocks were recomputed.
    nbytes: the most that it held beside weights and statistics; None: this system does not tell.
    seconds: that it took.
    """

    rows: int
    checkpointing: bool
    nbytes: int | None
    seconds: float


class ProbePasses:
    """Passes of a run's probe, beside all statistics that the run keeps.

    Args:
        storage: where accumulators are kept.
        shares_probe: the first probe's statistics are kept for other configurations, beside those of each.
        terms: that are measured in place of the configuration's.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        targets: Sequence[Target],
        config: GradProbeConfig,
        storage: AccumulatorStorage,
        loss_fn: LossFunction | None = None,
        shares_probe: bool = False,
        terms: frozenset[Term] | None = None,
    ) -> None:
        row = config.decision_row
        # A second probe that keeps its own, or a shared first one that the others add to in a copy.
        second: frozenset[Term] = frozenset(row.terms if row.keeps_second and terms is None else ())
        terms = config.needs.terms if terms is None else terms
        self._model, self._targets, self._loss_fn = model, targets, loss_fn
        self._statistics = Statistics(targets, terms, model, storage)
        self._beside = Statistics(targets, terms if shares_probe else second, model, storage)

    def run(self, batch: Batch, checkpointing: bool) -> MeasuredPass | None:
        """One pass; None: out of memory."""
        work = Workload(self._model, [batch], self._loss_fn, checkpointing, progress=False)
        try:
            return measured_pass(work, ProbePass(self._targets, self._statistics))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        # The error's frames hold tensors: only behind it they can be freed.
        clear_device_cache(garbage_collection=True)
        return None


def measured_pass(work: Workload, one: ProbePass) -> MeasuredPass:
    """One pass over the first batch of `work`. What a first pass makes besides, such as statistics, counts with it."""
    (batch,) = work.batches
    device = input_device(work.model)
    return_free_memory()
    known = begin_peak(device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else process_bytes()
    start = now(device)
    run_probe(work, one)
    seconds = now(device) - start
    taken = max(0, peak_bytes(device) - before) if known else None
    return MeasuredPass(row_count(batch), work.checkpointing, taken, seconds)


def free_bytes(device: torch.device) -> int:
    """What a pass could have: free memory, and what the allocator keeps without using it."""
    if device.type != "cuda":
        return_free_memory()
        return available_bytes(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return available_bytes(device) + kept


def leaves_room(one: MeasuredPass, rows: int, room: int) -> bool:
    """Whether a pass of more rows has room if it takes as much more as it has rows."""
    return one.nbytes is not None and one.nbytes * rows <= SHARE * room * one.rows


def promised_rows(found: Iterable[MeasuredPass], room: int, most: int) -> int | None:
    """The largest batch, of `most` rows at most, that measured passes promise room for; None: they tell nothing."""
    taken = {one.rows: one.nbytes for one in found if one.nbytes is not None}
    return most_that_fit(taken, SHARE * room, most) if len(taken) > 1 else None


def promised_bytes(found: Iterable[MeasuredPass], rows: int) -> float | None:
    """What a batch takes without checkpointing, on the line through measured passes; None: they tell nothing."""
    taken = {one.rows: one.nbytes for one in found if one.nbytes is not None and not one.checkpointing}
    if len(taken) < 2:
        return None
    begin, slope = line_through(taken)
    return max(0.0, begin + slope * rows)
