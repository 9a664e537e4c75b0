"""Where statistics are kept: beside the weights, in host memory or in files. It never changes a result."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gradprobe_hf.config.values import PLACES, AccumulatorDevice
from gradprobe_hf.data.batches import row_count
from gradprobe_hf.estimation.machine import available_bytes, free_disk_bytes
from gradprobe_hf.estimation.passes import activation_bytes
from gradprobe_hf.estimation.sizes import accumulator_bytes
from gradprobe_hf.memory.measured_passes import SHARE, ProbePasses, free_bytes
from gradprobe_hf.model.files.offload_store import existing_parent
from gradprobe_hf.model.fsdp import is_sharded
from gradprobe_hf.model.parameters import execution_device, input_device
from gradprobe_hf.model.passes.patches import checkpointed_layers
from gradprobe_hf.probe.accumulation.storage import AccumulatorStorage
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.scores.terms import MARGINALS

# Of free memory: statistics that take no more leave room enough, and no pass has to be measured to know it.
_SMALL = 0.25
_HOST = torch.device("cpu")


@dataclass(frozen=True)
class ChosenPlace:
    """Attributes:
    device: where statistics are kept.
    why: how it was chosen, for the report; "": nothing had to be.
    held: bytes of them, of all processes that share it, in the memory that a pass takes its own from.
    """

    device: AccumulatorDevice
    why: str = ""
    held: int = 0


def choose_place(context: RunContext, rows: int | None = None, shares_probe: bool = False) -> ChosenPlace:
    """The first place that has room for the statistics beside a pass, alike in all processes.

    Args:
        rows: sequences in a batch, where that is settled.
        shares_probe: the first probe's statistics are kept for other configurations, beside those of each.

    Raises:
        MemoryError: there is not even room for one sequence.
    """
    config, processes = context.config, context.processes
    needed = _needed(context, 2 if shares_probe else 1) if config.needs.accumulates else Counter()
    if not needed.total():
        return ChosenPlace("same")
    found, why = config.accumulator_device, "as asked"
    if found == "auto":
        own, why = _first_with_room(context, needed, rows)
        found = PLACES[int(processes.max_(torch.tensor(PLACES.index(own))))]
    device = input_device(context.model)
    held = {"same": needed[device], "cpu": needed.total() if device == _HOST else 0, "disk": 0}[found]
    return ChosenPlace(found, f"{found}: {why}", held * _sharing(context, device))


def _needed(context: RunContext, times: int) -> Counter[torch.device]:
    """Bytes of the statistics that would be beside the weights of each device: a model may be spread over several."""
    weights = Counter[torch.device]()
    for target in context.targets:
        weights[execution_device(context.model, target.parameter)] += target.numel
    shards = context.processes.count if is_sharded(context.model) else 1
    return Counter(
        {device: times * accumulator_bytes(context.config, count) // shards for device, count in weights.items()}
    )


def _sharing(context: RunContext, device: torch.device) -> int:
    """Processes that take theirs from one memory: all of them on CPUs, as far as one can tell on one machine."""
    return context.processes.count if device.type == "cpu" else 1


def _first_with_room(
    context: RunContext, needed: Counter[torch.device], rows: int | None
) -> tuple[AccumulatorDevice, str]:
    """The place, and why."""
    free = {device: free_bytes(device) for device in needed}
    beside = {device: count * _sharing(context, device) for device, count in needed.items()}
    told = f"they take {_gb(needed.total())}"
    room = f"{' + '.join(_gb(each) for each in free.values())} are free"
    if all(beside[device] <= _SMALL * free[device] for device in needed):
        return "same", f"{told}, and {room}"
    taken = _pass_bytes(context, rows)
    told += ", what a pass takes cannot be told" if taken is None else f", a pass {_gb(taken)}"
    told += f", and {room}"
    # Unknown: half of the memory is left to it. On several devices each has a part of the pass, at most all of it.
    beside = {
        device: count + (free[device] // 2 if taken is None else taken * _sharing(context, device))
        for device, count in beside.items()
    }
    if all(beside[device] <= SHARE * free[device] for device in needed):
        return "same", told
    every, host = needed.total() * context.processes.count, available_bytes(_HOST)
    if _HOST not in needed and every <= SHARE * host:
        return "cpu", f"{told}; {_gb(host)} of the host's memory"
    disk = free_disk_bytes(existing_parent(context.folder or Path(tempfile.gettempdir())))
    if every <= SHARE * disk:
        return "disk", f"{told}; {_gb(disk)} on the disk"
    return "same", f"{told}; on the disk {_gb(disk)}, too few"


def _pass_bytes(context: RunContext, rows: int | None) -> int | None:
    """What a pass over a batch takes, its blocks recomputed where they can be; None: nobody can tell.

    Activations can be recomputed, batches be smaller: both cost less time than statistics that are somewhere else.
    """
    model, config, batches = context.model, context.config, context.calibration
    recomputed = config.checkpointing is not False and bool(checkpointed_layers(model))
    if rows is None:
        rows = 1 if config.batch_size == "auto" else max(map(row_count, batches))
    if not is_sharded(model):  # there a process that runs out of memory would leave the others waiting for its shards
        longest = max(batches.in_batches_of(1).items, key=_length)
        # Vectors alone are summed: what a pass keeps for backward is that of the run's own.
        passes = ProbePasses(
            model, context.targets, config, AccumulatorStorage(), context.loss_fn, terms=frozenset({MARGINALS})
        )
        with context.stopwatch("accumulators"):
            # The first also makes what is made once.
            measured = passes.run(longest, recomputed) and passes.run(longest, recomputed)
        if measured is None:
            raise MemoryError("not even one sequence fits")
        if measured.nbytes is not None:
            return measured.nbytes * rows // measured.rows
    return activation_bytes(model, rows, batches.longest, checkpointed=recomputed)


def _length(batch: Any) -> int:
    return max((value.numel() for value in batch.values() if isinstance(value, torch.Tensor)), default=0)


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3g} GB"
