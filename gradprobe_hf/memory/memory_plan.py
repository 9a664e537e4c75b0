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
from gradprobe_hf.memory.accumulator_place import ChosenPlace, choose_place
from gradprobe_hf.memory.batch_size import ChosenBatch, largest_batch, passes_that_tell
from gradprobe_hf.memory.checkpointing import choose_checkpointing
from gradprobe_hf.memory.memory_errors import memory_errors, remedies_for
from gradprobe_hf.model.fsdp import is_sharded
from gradprobe_hf.model.parameters import is_offloaded
from gradprobe_hf.model.passes.upcast import upcast_note, upcast_products
from gradprobe_hf.probe.steps import step_count
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.run.shapes.search import rows_apart

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
    with upcast_products(context.model):  # the largest batch is found with passes like those of the run
        plan = plan_memory(planned, rows, shares_probe)
    with (
        upcast_products(context.model),
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
    model, config, offloaded = context.model, context.config, is_offloaded(context.model)
    notes = {"placement": _placement(model), "processes": str(context.processes.count)}
    if (products := upcast_note(model)) is not None:
        notes["products"] = products
        logger.info("products: %s", products)
    remedies = remedies_for(config, 1, config.checkpointing is True, offloaded)
    if not context.calibration:
        return MemoryPlan(context.calibration, "same", False, notes, remedies)
    # Statistics first, then the batch beside them, then whether to recompute what is left no room.
    with memory_errors(context.stopwatch, remedies):
        place = choose_place(context, rows, shares_probe)
        batch = _portioned(context, place, rows, shares_probe)
    _check_share(context, batch.calibration)
    notes |= {name: why for name, why in (("accumulators", place.why), ("batch_size", batch.why)) if why}
    most, longest = max(map(row_count, batch.calibration)), batch.calibration.longest
    checkpointing = False
    if config.needs.probes:
        checkpointing, notes["checkpointing"] = choose_checkpointing(
            model, config, most, longest, batch.measured, place.held
        )
    for what in ("accumulators", "checkpointing"):
        if what in notes:
            logger.info("%s: %s", what, notes[what])
    return MemoryPlan(
        batch.calibration, place.device, checkpointing, notes, remedies_for(config, most, checkpointing, offloaded)
    )


def _portioned(context: RunContext, place: ChosenPlace, rows: int | None, shares_probe: bool) -> ChosenBatch:
    if not context.config.needs.probes:  # batches stay as they came, in a run that goes on, too
        return ChosenBatch(context.calibration, "")
    if rows is not None:
        return ChosenBatch(context.calibration.in_batches_of(rows), f"{rows} (as before)")
    if context.config.batch_size != "auto":
        return ChosenBatch(context.calibration, "", passes_that_tell(context, place, shares_probe))
    with context.stopwatch("batch size"):
        return largest_batch(context, place, shares_probe)


def _check_share(context: RunContext, batches: Batches) -> None:
    """Raise ValueError for fewer batches than processes, or too few beside those that shapes are measured on."""
    steps, count = step_count(context.model, context.targets, batches), context.processes.count
    if steps < count:
        raise ValueError(
            f"{count} processes and {steps} calibration batches: every process needs one. Set a "
            "smaller batch_size, a larger num_samples, or start fewer processes."
        )
    if context.config.shape_budget is not None:
        rows_apart(replace(context, calibration=batches))


def _placement(model: PreTrainedModel) -> str:
    if is_sharded(model):
        return "sharded by FSDP2"
    return "offloaded by Accelerate" if is_offloaded(model) else "in memory"
