"""The batch size: the most sequences that one pass has memory for. It never changes a result."""

from __future__ import annotations

import torch
from accelerate.utils import find_executable_batch_size
from transformers import PreTrainedModel

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.data.batches import Batches, row_count
from gradprobe_hf.estimation.machine import available_bytes
from gradprobe_hf.estimation.passes import activation_bytes
from gradprobe_hf.memory.accumulator_files import accumulator_files
from gradprobe_hf.memory.checkpointing import ACTIVATIONS_SHARE, choose_checkpointing
from gradprobe_hf.model.fsdp import is_sharded, plain_class
from gradprobe_hf.model.parameters import input_device, is_offloaded
from gradprobe_hf.probe.engine import ProbePass, Workload, run_probe
from gradprobe_hf.probe.statistics import Statistics
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.scores.evidence import Term

LARGEST_BATCH = 64


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
