"""The memory plan: what decides where and in what portions a run is computed, and never what comes out of it.

Whether blocks are recomputed, how many sequences make a batch, where accumulators are kept; and what to say when memory
is not enough.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from accelerate.utils import find_executable_batch_size
from accelerate.utils.memory import should_reduce_batch_size
from transformers import PreTrainedModel

from gradprobe_hf.config import GradProbeConfig
from gradprobe_hf.data.batches import Batches, row_count
from gradprobe_hf.estimation.estimate import accumulator_bytes
from gradprobe_hf.estimation.machine import available_bytes
from gradprobe_hf.estimation.passes import activation_bytes
from gradprobe_hf.model.fsdp import is_sharded, plain_class
from gradprobe_hf.model.parameters import input_device, is_offloaded, is_on_disk
from gradprobe_hf.model.patches import checkpointed_layers
from gradprobe_hf.model.targets import Target, is_routed
from gradprobe_hf.probe.accumulator_storage import AccumulatorStorage
from gradprobe_hf.probe.engine import ProbePass, Workload, run_probe
from gradprobe_hf.probe.page_cache import PageCacheTrail
from gradprobe_hf.probe.statistics import Statistics
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.runtime.stopwatch import Stopwatch
from gradprobe_hf.scores.evidence import MATRIX_TERMS, Term
from gradprobe_hf.scores.fisher import FISHER_ESTIMATES

logger = logging.getLogger(__name__)

LARGEST_BATCH = 64
CACHE_SHARE = 0.7  # of free memory: a run takes some itself
ACTIVATIONS_SHARE = 0.6  # of free memory: the rest is for temporaries, and for an estimate that is off


@dataclass(frozen=True)
class MemoryPlan:
    """How a run is computed.

    Attributes:
        calibration: the batches in their final sizes; empty when nothing is read.
        checkpointing: whether blocks are recomputed in backward.
        notes: what was chosen and why, for the report.
        remedies: what would take less memory, the cheapest first.
    """

    calibration: Batches
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
        accumulator_files(context.model, context.targets, context.config, context.folder) as storage,
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
        return MemoryPlan(batches, False, notes, remedies_for(config, 1, False, offloaded))
    if rows is not None:
        batches, notes["batch_size"] = batches.in_batches_of(rows), f"{rows} (as before)"
    elif config.batch_size == "auto" and config.needs.probes:
        remedies = remedies_for(config, 1, config.checkpointing is True, offloaded)
        with memory_errors(context.stopwatch, remedies), context.stopwatch("batch size"):
            batches, notes["batch_size"] = largest_batch(context, shares_probe)
    passes = batches.samples if is_routed(context.targets) else len(batches)
    if passes < processes.count:
        raise ValueError(
            f"{processes.count} processes and {passes} calibration batches: every process needs one. Set a "
            "smaller batch_size, a larger num_samples, or start fewer processes."
        )
    most = max(map(row_count, batches))
    checkpointing = False
    if config.needs.probes:
        checkpointing, notes["checkpointing"] = choose_checkpointing(model, config, most, batches.longest)
        logger.info("checkpointing is %s", notes["checkpointing"])
    return MemoryPlan(batches, checkpointing, notes, remedies_for(config, most, checkpointing, offloaded))


def choose_checkpointing(model: PreTrainedModel, config: GradProbeConfig, rows: int, length: int) -> tuple[bool, str]:
    """Whether to recompute blocks, and why.

    Args:
        rows, length: sequences in a batch, tokens in a sequence.

    Raises:
        ValueError: it was asked for, and no layer of the model can be recomputed.
    """
    layers = checkpointed_layers(model)
    if config.checkpointing is False:
        return False, "off, as asked"
    if not layers:
        reason = f"{type(model).__name__} has no layer that transformers can checkpoint (GradientCheckpointingLayer)"
        if config.checkpointing is True:
            raise ValueError(f"checkpointing=True: {reason}. Use checkpointing=False, and a smaller batch_size.")
        return False, f"off: {reason}"
    if config.checkpointing is True:
        return True, "on, as asked"
    free = available_bytes(input_device(model))
    needed = activation_bytes(model.config, plain_class(model), rows, length, model.dtype, checkpointed=False)
    if needed is None:
        return True, "on: what activations would take cannot be told for this architecture"
    sizes = f"activations of {rows} x {length} tokens take about {_gb(needed)}, and {_gb(free)} are free"
    if needed > ACTIVATIONS_SHARE * free:
        return True, f"on: {sizes}"
    if is_offloaded(model):
        return True, f"on: the model is offloaded, and blocks are kept out of memory with their weights ({sizes})"
    return False, f"off: {sizes}"


def largest_batch(context: RunContext, shares_probe: bool = False) -> tuple[Batches, str]:
    """The same rows in the largest batches that one pass has memory for, and what was tried; alike in all processes.

    Raises:
        MemoryError: there is not even room for one sequence.
    """
    model, targets, config, batches = context.model, context.targets, context.config, context.calibration
    processes = context.processes
    start = int(processes.min_(torch.tensor(first_guess(model, config, batches.samples, batches.longest))))
    if is_sharded(model):  # a process that runs out of memory would leave the others waiting for its shards
        return batches.in_batches_of(start), f"{start} (by estimate)"
    row, terms = config.decision_row, config.needs.terms
    # A second probe that keeps its own, or a shared first one that the others add to in a copy.
    second: frozenset[Term] = frozenset(row.terms if row.keeps_second else ())
    tried: list[int] = []

    def attempt(batch_size: int) -> int:
        tried.append(batch_size)
        first = batches.in_batches_of(batch_size).items[0]
        checkpointing, _ = choose_checkpointing(model, config, row_count(first), batches.longest)
        # Everything is in memory that the probe will have there.
        with accumulator_files(model, targets, config, context.folder) as storage:
            statistics = Statistics(targets, terms, model, storage)
            beside = Statistics(targets, terms if shares_probe else second, model, storage)
            work = Workload(model, [first], context.loss_fn, checkpointing, progress=False)
            run_probe(work, ProbePass(targets, statistics))
            del statistics, beside
        return batch_size

    def halved() -> int:
        if tried[-1] == 1:
            raise MemoryError("not even one sequence fits")
        return tried[-1] // 2

    fits = find_executable_batch_size(attempt, starting_batch_size=start, reduce_batch_size_fn=halved)()
    fits = int(processes.min_(torch.tensor(fits)))
    portioned = batches.in_batches_of(fits)
    return portioned, f"{row_count(portioned.items[0])} (tried {', '.join(map(str, tried))})"


def first_guess(model: PreTrainedModel, config: GradProbeConfig, samples: int, length: int) -> int:
    """The largest power of two whose activations fit by estimate: a CPU does not fail to allocate, it is killed."""
    free = ACTIVATIONS_SHARE * available_bytes(input_device(model))
    recomputed = config.checkpointing is True or is_offloaded(model)

    def fits(rows: int) -> bool:
        taken = activation_bytes(model.config, plain_class(model), rows, length, model.dtype, checkpointed=recomputed)
        return taken is not None and taken <= free

    size = 1
    while 2 * size <= min(samples, LARGEST_BATCH) and fits(2 * size):
        size *= 2
    return size


@contextmanager
def accumulator_files(
    model: PreTrainedModel, targets: Sequence[Target], config: GradProbeConfig, folder: Path | None
) -> Iterator[AccumulatorStorage]:
    """How accumulators are kept; their files, if they are on disk, are gone afterwards.

    Raises:
        OSError: the folder cannot be written.
    """
    if config.accumulator_device != "disk":
        yield AccumulatorStorage(config.accumulator_dtype, config.accumulator_device)
        return
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    own = Path(tempfile.mkdtemp(prefix="gradprobe-accumulators-", dir=folder))
    try:
        page_cache = PageCacheTrail() if outgrows_cache(model, targets, config) else None
        yield AccumulatorStorage(config.accumulator_dtype, "disk", own, page_cache)
    finally:
        shutil.rmtree(own, ignore_errors=True)


def outgrows_cache(model: PreTrainedModel, targets: Sequence[Target], config: GradProbeConfig) -> bool:
    """Whether the accumulators and the weights that are read from disk are more than memory has room for."""
    weights = sum(value.nbytes for name, value in model.named_parameters() if is_on_disk(model, name))
    files = weights + accumulator_bytes(config, sum(target.numel for target in targets))
    return files > CACHE_SHARE * available_bytes(torch.device("cpu"))


@contextmanager
def memory_errors(stopwatch: Stopwatch, remedies: list[str]) -> Iterator[None]:
    """Out of memory, with the stage it happened in and the first three settings that would help."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        stage = stopwatch.failed or "loading"
        advice = "; ".join(f"{number}. {remedy}" for number, remedy in enumerate(remedies[:3], start=1))
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise MemoryError(
            f"out of memory in the stage {stage!r}: {said}. "
            f"The model is as it was. What would help, in this order: {advice}."
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """On an accelerator, or in the memory of the host."""
    return isinstance(error, MemoryError) or (isinstance(error, Exception) and should_reduce_batch_size(error))


def remedies_for(config: GradProbeConfig, batch_size: int, checkpointing: bool, offloaded: bool) -> list[str]:
    """Settings that take less memory than the ones in use, those that cost the least time first."""
    found = []
    if batch_size > 1:
        found.append("batch_size=1 (--batch-size 1)")
    if not checkpointing:
        found.append("checkpointing=True (--checkpointing on)")
    if config.accumulator_dtype != "int8":
        found.append("accumulator_dtype='int8' (--accumulator-dtype int8)")
    if not offloaded:
        found.append("device_map='disk' (--device-map disk)")
    if config.accumulator_device != "disk":
        found.append("accumulator_device='disk' (--accumulator-device disk)")
    lean = [name for name, row in FISHER_ESTIMATES.items() if not set(row.terms) & set(MATRIX_TERMS)]
    if config.uses_fisher and config.fisher not in lean:
        found += [f"fisher={name!r} (--fisher {name})" for name in lean]
    return [*found, "a shorter sequence_length (--sequence-length)"]


def _placement(model: PreTrainedModel) -> str:
    if is_sharded(model):
        return "sharded by FSDP2"
    return "offloaded by Accelerate" if is_offloaded(model) else "in memory"


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB"
