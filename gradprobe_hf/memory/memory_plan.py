"""The memory plan: what decides where and in what portions a run is computed, and never what comes out of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.config.values import AccumulatorDevice
from gradprobe_hf.data.batches import Batches, row_count
from gradprobe_hf.memory.accumulator_files import accumulator_files
from gradprobe_hf.memory.accumulator_place import choose_place
from gradprobe_hf.memory.batch_size import largest_batch
from gradprobe_hf.memory.checkpointing import choose_checkpointing
from gradprobe_hf.memory.measured_passes import MeasuredPass
from gradprobe_hf.memory.memory_errors import memory_errors, remedies_for
from gradprobe_hf.model.fsdp import is_sharded
from gradprobe_hf.model.parameters import is_offloaded
from gradprobe_hf.model.targets import is_routed
from gradprobe_hf.run.context import RunContext

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MemoryPlan:
    """How a run is computed.

    Attributes:
        calibration: the batches in their final sizes; empty when nothing is read.
        accumulator_device: where statistics are kept.
        checkpointing: whether blocks are recomputed in backward.
        notes: what was chosen and why, for the report.
        remedies: what would take less memory, the cheapest first.
    """

    calibration: Batches
    accumulator_device: AccumulatorDevice
    checkpointing: bool
    notes: dict[str, str]
    remedies: list[str]


@contextmanager
def open_run(
    context: RunContext, plan_for: GradProbeConfig | None = None, rows: int | None = None, shares_probe: bool = False
) -> Iterator[RunContext]:
    """The context with batches that fit into memory and a place for accumulators, for the body of the `with`.

    Args:
        plan_for: what has to fit, where other configurations share the context; default: its own.
        rows: sequences in a batch, where an earlier part of the run has found that out.
        shares_probe: the first probe's statistics are kept for other configurations, beside those of each.

    Raises:
        ValueError: fewer batches than processes, or checkpointing of a model that has no layers for it.
        MemoryError: not even one sequence fits; or the body has run out of memory.
    """
    planned = replace(context, config=plan_for or context.config)
    plan = plan_memory(planned, rows, shares_probe)
    with (
        memory_errors(context.stopwatch, plan.remedies),
        accumulator_files(
            context.model, context.targets, context.config, context.folder, plan.accumulator_device
        ) as storage,
    ):
        yield replace(
            context,
            calibration=plan.calibration,
            checkpointing=plan.checkpointing,
            notes=plan.notes,
            storage=storage,
        )


def plan_memory(context: RunContext, rows: int | None = None, shares_probe: bool = False) -> MemoryPlan:
    """Decide from memory alone; arguments and errors are those of `open_run`."""
    model, config, processes = context.model, context.config, context.processes
    batches, offloaded = context.calibration, is_offloaded(model)
    notes = {"placement": _placement(model), "processes": str(processes.count)}
    if not batches:
        return MemoryPlan(batches, "same", False, notes, remedies_for(config, 1, False, offloaded))
    remedies = remedies_for(config, 1, config.checkpointing is True, offloaded)
    with memory_errors(context.stopwatch, remedies):
        place = choose_place(context, shares_probe)
    if place.why:
        notes["accumulators"] = place.why
        logger.info("accumulators are kept in: %s", place.why)
    measured: tuple[MeasuredPass, ...] = ()
    if rows is not None:
        batches, notes["batch_size"] = batches.in_batches_of(rows), f"{rows} (as before)"
    elif config.batch_size == "auto" and config.needs.probes:
        with memory_errors(context.stopwatch, remedies), context.stopwatch("batch size"):
            chosen = largest_batch(context, place, shares_probe)
        batches, notes["batch_size"], measured = chosen.calibration, chosen.why, chosen.measured
    passes = batches.samples if is_routed(context.targets) else len(batches)
    if passes < processes.count:
        raise ValueError(
            f"{processes.count} processes and {passes} calibration batches: every process needs one. Set a "
            "smaller batch_size, a larger num_samples, or start fewer processes."
        )
    most = max(map(row_count, batches))
    checkpointing = False
    if config.needs.probes:
        checkpointing, notes["checkpointing"] = choose_checkpointing(
            model, config, most, batches.longest, measured, place.held
        )
        logger.info("checkpointing is %s", notes["checkpointing"])
    return MemoryPlan(batches, place.device, checkpointing, notes, remedies_for(config, most, checkpointing, offloaded))


def _placement(model: PreTrainedModel) -> str:
    if is_sharded(model):
        return "sharded by FSDP2"
    return "offloaded by Accelerate" if is_offloaded(model) else "in memory"
