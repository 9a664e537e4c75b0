"""Where statistics are kept: beside the weights, in host memory or in files. It never changes a result."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradprobe_hf.config.values import PLACES, AccumulatorDevice
from gradprobe_hf.data.batches import row_count
from gradprobe_hf.estimation.machine import available_bytes
from gradprobe_hf.estimation.passes import activation_bytes
from gradprobe_hf.estimation.sizes import accumulator_bytes
from gradprobe_hf.memory.measured_passes import SHARE, ProbePasses, free_bytes
from gradprobe_hf.model.fsdp import is_sharded, plain_class
from gradprobe_hf.model.parameters import input_device
from gradprobe_hf.model.patches import checkpointed_layers
from gradprobe_hf.probe.accumulator_storage import AccumulatorStorage
from gradprobe_hf.run.context import RunContext

# Of free memory: statistics that take no more leave room enough, and no pass has to be measured to know it.
_SMALL = 0.25


@dataclass(frozen=True)
class ChosenPlace:
    """Attributes:
    device: where statistics are kept.
    why: how it was chosen, for the report; "": nothing had to be.
    held: bytes of them where a pass has its activations.
    """

    device: AccumulatorDevice
    why: str = ""
    held: int = 0


def choose_place(context: RunContext, shares_probe: bool = False) -> ChosenPlace:
    """The first place that has room for the statistics beside a pass, alike in all processes.

    Args:
        shares_probe: the first probe's statistics are kept for other configurations, beside those of each.

    Raises:
        MemoryError: there is not even room for one sequence.
    """
    config, processes = context.config, context.processes
    weights = sum(target.numel for target in context.targets)
    needed = accumulator_bytes(config, weights) * (2 if shares_probe else 1) if config.needs.accumulates else 0
    if is_sharded(context.model):
        needed //= processes.count
    device = input_device(context.model)
    if not needed:
        return ChosenPlace("same")
    found, why = config.accumulator_device, "as asked"
    if found == "auto":
        own, why = _first_with_room(context, needed, device)
        found = PLACES[int(processes.max_(torch.tensor(PLACES.index(own))))]
    in_the_way = found == "same" or (found == "cpu" and device.type == "cpu")
    return ChosenPlace(found, f"{found}: {why}", needed if in_the_way else 0)


def _first_with_room(context: RunContext, needed: int, device: torch.device) -> tuple[AccumulatorDevice, str]:
    free, takes = free_bytes(device), f"they take {_gb(needed)}"
    # Processes without a GPU share one memory, and so do the hosts' parts of those with one.
    on_host = needed * context.processes.count
    beside = on_host if device.type == "cpu" else needed
    if beside <= _SMALL * free:
        return "same", f"{takes}, and {_gb(free)} are free"
    taken, how = _pass_bytes(context)
    told = f"{takes}, a pass {how} {_gb(taken)}, and {_gb(free)} are free"
    if beside + taken <= SHARE * free:
        return "same", told
    if device.type == "cpu":
        return "disk", told
    host = available_bytes(torch.device("cpu"))
    return ("cpu" if on_host <= SHARE * host else "disk"), f"{told}; {_gb(host)} of the host's memory"


def _pass_bytes(context: RunContext) -> tuple[int, str]:
    """What a pass over the first batch takes, its blocks recomputed where they can be, and how that is known.

    Activations can be recomputed, batches be smaller: both cost less time than statistics that are somewhere else.
    """
    model, config, batches = context.model, context.config, context.calibration
    recomputed = config.checkpointing is not False and bool(checkpointed_layers(model))
    rows = 1 if config.batch_size == "auto" else max(map(row_count, batches))
    estimated = activation_bytes(
        model.config, plain_class(model), rows, batches.longest, model.dtype, checkpointed=recomputed
    )
    if is_sharded(model):  # a process that runs out of memory would leave the others waiting for its shards
        return estimated or 0, "is estimated at"
    one = batches.in_batches_of(1).items[0]
    # Vectors alone are summed: what a pass keeps for backward is that of the run's own.
    passes = ProbePasses(
        model, context.targets, config, AccumulatorStorage(), context.loss_fn, terms=frozenset({"marginals"})
    )
    with context.stopwatch("accumulators"):
        measured = passes.run(one, recomputed)
    if measured is None:
        raise MemoryError("not even one sequence fits")
    if measured.nbytes is None:
        return estimated or 0, "is estimated at"
    return measured.nbytes * rows // measured.rows, f"of {rows} takes"


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3g} GB"
