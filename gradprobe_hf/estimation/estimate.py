"""estimate: what a run will take, before any of it: from the configuration and a model on the meta device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gradprobe_hf.config import GradProbeConfig
from gradprobe_hf.estimation.expected_passes import expected_passes
from gradprobe_hf.estimation.footprint import FLOAT32_BYTES, Device, Placement, PlacementName, Sizes, footprint_of
from gradprobe_hf.estimation.formula import active_weights, loss_bytes
from gradprobe_hf.estimation.machine import available_bytes, compute_device, free_disk_bytes, process_bytes
from gradprobe_hf.estimation.passes import PassCost, cost_of_batch
from gradprobe_hf.model.families import block_of, text_attribute
from gradprobe_hf.model.targets import Target, is_routed
from gradprobe_hf.probe.accumulators import BYTES_PER_WEIGHT
from gradprobe_hf.scores.evidence import MATRIX_TERMS


@dataclass(frozen=True)
class Work:
    """What one placement computes.

    Attributes:
        forwards, backwards: passes over the whole calibration set, recomputation included.
        flops: floating-point operations.
        bytes_read: weights that are read from disk on the way.
    """

    forwards: float
    backwards: float
    flops: int
    bytes_read: int = 0


@dataclass(frozen=True)
class Estimate:
    """What a run will take.

    Attributes:
        architecture: the model's class.
        parameters, target_weights, matrices, blocks: how many.
        active_target_weights: of them those that a token passes; fewer in a mixture of experts.
        dtype, device: of the weights, and what they compute on.
        batches, rows, length: passes of `[rows, length]` tokens that make one walk over the calibration set.
        placements, work: by name: memory and disk, passes and operations.
        notes: what to know about the figures.
    """

    architecture: str
    parameters: int
    target_weights: int
    active_target_weights: int
    matrices: int
    blocks: int
    dtype: str
    device: str
    batches: int
    rows: int
    length: int
    placements: tuple[Placement, ...]
    work: dict[PlacementName, Work]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        placements = [{**one.to_dict(), "work": asdict(self.work[one.name])} for one in self.placements]
        plain = asdict(replace(self, placements=(), work={}))
        del plain["work"]  # it stands with its placement
        return {**plain, "placements": placements, "notes": list(self.notes)}


def estimate(
    model: PreTrainedModel,
    targets: Sequence[Target],
    config: GradProbeConfig,
    *,
    device: torch.device | None = None,
    base: int | None = None,
    snapshots: bool = False,
) -> Estimate:
    """What `prune_pretrained` will take for this model and configuration.

    Args:
        model: on the meta device (`loading.skeleton`), in the dtype it will be loaded in.
        targets: what will be pruned.
        device: what the model will compute on; default: the first CUDA device, or the CPU.
        base: bytes of the process before it loads a model; default: those of this one.
        snapshots: the run will write its state, to be resumed.
    """
    device = device or compute_device()
    base = process_bytes() if base is None else base
    needed = config.needs
    rows = 1 if config.batch_size == "auto" or is_routed(targets) else min(config.batch_size, config.num_samples)
    length = config.sequence_length
    batches = math.ceil(config.num_samples / rows) if needed.passes != "none" else 0
    costs = {
        checkpoint: PassCost(0, 0, 0)
        if needed.passes == "none"
        else cost_of_batch(model, targets, rows, length, checkpoint=checkpoint, backward=needed.probes)
        for checkpoint in (False, True)
    }
    loss = 0 if not needed.probes else loss_bytes(model, rows, length)
    sizes = sizes_of(model, targets, config, base=base, loss=loss, snapshots=snapshots)
    room = room_of(device, base)
    names: dict[PlacementName, bool] = {"resident": False, "checkpointed": True, "offloaded": True}
    placements = tuple(
        footprint_of(name, sizes, costs[again].peak_bytes, room, costs[again].heap_bytes)
        for name, again in names.items()
    )
    work = {name: work_of(config, model, targets, costs[again], batches, rows, again) for name, again in names.items()}
    work["offloaded"] = replace(
        work["offloaded"], bytes_read=int(2 * work["offloaded"].backwards * batches * sizes.weights)
    )
    return Estimate(
        architecture=type(model).__name__,
        parameters=model.num_parameters(),
        target_weights=sizes.targets,
        active_target_weights=active_weights(model, targets),
        matrices=len(targets),
        blocks=len({target.block for target in targets if target.block}),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(device),
        batches=batches,
        rows=rows,
        length=length,
        placements=placements,
        work=work,
        notes=notes_on(config, targets, costs[False], placements, sizes),
    )


def _embedding(model: PreTrainedModel, end: str) -> Tensor | None:
    """The weight of the input or output embedding, of a model that has one."""
    try:
        found = getattr(model, f"get_{end}_embeddings")()
    except NotImplementedError:  # patches are not looked up
        return None
    weight = getattr(found, "weight", None)
    return weight if isinstance(weight, Tensor) else None


def sizes_of(
    model: PreTrainedModel, targets: Sequence[Target], config: GradProbeConfig, *, base: int, loss: int, snapshots: bool
) -> Sizes:
    """What decides the footprint of this run, in bytes and elements."""
    sizes = [target.numel for target in targets]
    elements, largest, itemsize = sum(sizes), max(sizes), model.dtype.itemsize
    stored = getattr(model.config, "dtype", None) or torch.float32
    ends = [weight.numel() for get in ("input", "output") if (weight := _embedding(model, get)) is not None]
    blocks = bytes_by_block(model)
    squares = [FLOAT32_BYTES * target.shape[1] ** 2 for target in targets] if config.updates else [0]
    by_block: dict[str, int] = {}
    for target, square in zip(targets, squares, strict=False):
        by_block[target.block] = by_block.get(target.block, 0) + square
    sets = 2 if config.dense_target else 1  # of a block's inputs: as pruned so far, and as they were
    tokens = config.num_samples * config.sequence_length
    width = text_attribute(model.config, "hidden_size", 0)
    return Sizes(
        base=base,
        vocabulary=text_attribute(model.config, "vocab_size", 0),
        weights=sum(blocks.values()),
        stored=0 if stored == model.dtype else model.num_parameters() * stored.itemsize,
        block=max((size for name, size in blocks.items() if name), default=0),
        ends=max(ends, default=0) * itemsize,
        largest_target=largest,
        targets=elements,
        itemsize=itemsize,
        sparsity=config.sparsity or 0.0,
        accumulators=accumulator_bytes(config, elements),
        accumulator_device=config.accumulator_device,
        loss=loss,
        snapshots=snapshots,
        hessians=sets * max(by_block.values(), default=0),
        largest_hessian=max(squares),
        solved=config.update_row.workspace * FLOAT32_BYTES * largest,
        hidden=sets * tokens * width * itemsize if config.updates else 0,
    )


def accumulator_bytes(config: GradProbeConfig, weights: int) -> int:
    """Bytes of the statistics `[out, in]`; the threshold decision compares those of two probes."""
    row = config.decision_row
    kept = len(config.needs.terms & set(MATRIX_TERMS)) + len(row.terms) * row.keeps_second
    return round(kept * weights * BYTES_PER_WEIGHT[config.accumulator_dtype])


def bytes_by_block(model: nn.Module) -> dict[str, int]:
    """Bytes of the parameters of each block; what lies outside of them has the name `""`."""
    sizes: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        block = block_of(model, name.rpartition(".")[0])
        sizes[block] = sizes.get(block, 0) + parameter.nbytes
    return sizes


def room_of(device: torch.device, base: int) -> dict[Device, int]:
    """Free bytes of each device that a run uses; what this process holds already is its own to use."""
    room: dict[Device, int] = {"host": available_bytes(torch.device("cpu")) + base}
    if device.type != "cpu":
        room["accelerator"] = available_bytes(device)
    return room | {"disk": free_disk_bytes()}


def work_of(
    config: GradProbeConfig,
    model: PreTrainedModel,
    targets: Sequence[Target],
    cost: PassCost,
    batches: int,
    rows: int,
    checkpoint: bool,
) -> Work:
    """Passes and operations. A simulated pass makes every weight's gradient once; the terms say how many are needed."""
    needed = config.needs
    forwards, backwards = expected_passes(config, len({target.block for target in targets}))
    gradients = 2 * rows * config.sequence_length * active_weights(model, targets)
    products = bool(needed.terms & {"sequence", "peak"}) + ("token" in needed.terms)
    # A pass forward is one of its three products: outputs, gradients of the inputs, gradients of the weights.
    probes = backwards * (cost.flops + (products - 1) * gradients) + max(0.0, forwards - backwards) * cost.flops / 3
    operations = probes * batches + reconstruction_operations(config, targets)
    return Work(forwards + checkpoint * backwards, backwards, round(operations))


def reconstruction_operations(config: GradProbeConfig, targets: Sequence[Target]) -> int:
    """Hessians of all tokens, their factors, and the sweeps, or the steps of least squares."""
    if not config.updates:
        return 0
    tokens, sets = config.num_samples * config.sequence_length, 2 if config.dense_target else 1
    shapes = [target.shape for target in targets]
    products = sets + config.update_row.products
    return sum(2 * sets * tokens * inner**2 + 2 * inner**3 + 2 * products * out * inner**2 for out, inner in shapes)


def notes_on(
    config: GradProbeConfig, targets: Sequence[Target], cost: PassCost, placements: Sequence[Placement], sizes: Sizes
) -> tuple[str, ...]:
    notes = []
    if not cost.simulated:
        notes.append("this architecture cannot be run without data: activations are from a formula, and rough")
    if config.batch_size == "auto":
        notes.append("batch_size='auto': counted for batches of one")
    if is_routed(targets):
        notes.append("experts mix the tokens of a batch: one sequence at a time, tokens shared evenly by the experts")
    if 2 * sizes.loss > cost.peak_bytes > 0:
        notes.append("the logits and their loss are the larger part of a batch; a smaller batch size shrinks them")
    if not any(one.fits for one in placements):
        notes.append(_remedy(config, placements[-1], sizes))
    return tuple(notes)


def _remedy(config: GradProbeConfig, smallest: Placement, sizes: Sizes) -> str:
    for device, free in smallest.room.items():
        needed = smallest.needed(device)
        if needed <= free:
            continue
        if device == "disk":
            return f"no placement fits: it would write {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free"
        if sizes.accumulators > free and config.accumulator_device != "disk":
            return "no placement fits: try --accumulator-device disk, --accumulator-dtype int8, or --fisher factored"
    return "no placement fits: try --batch-size 1, a shorter --sequence-length, or another machine"
