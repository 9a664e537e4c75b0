"""estimate: what a run will take, before any of it: from the configuration and a model on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.data.windows import window_length
from gradprobe_hf.estimation.footprint import Device, Placement, PlacementName, footprint_of
from gradprobe_hf.estimation.formula import active_weights, loss_bytes
from gradprobe_hf.estimation.machine import available_bytes, compute_device, free_disk_bytes, process_bytes
from gradprobe_hf.estimation.notes import notes_on
from gradprobe_hf.estimation.passes import PassCost, cost_of_batch
from gradprobe_hf.estimation.recovery import Training, recovery_of
from gradprobe_hf.estimation.sizes import BatchSizes, sizes_of
from gradprobe_hf.estimation.texts import Measured, Written, measured, written
from gradprobe_hf.estimation.work import RECOMPUTES, Walk, Work, walk_of, work_of
from gradprobe_hf.model.families import is_causal, tokens_of_an_image
from gradprobe_hf.model.targets import Target

_NOTHING = PassCost(0, 0, 0)


@dataclass(frozen=True)
class Estimate:
    """What a run will take.

    Attributes:
        architecture: the model's class.
        parameters, target_weights, matrices, blocks: how many.
        active_target_weights: target weights that one token passes; fewer in a mixture of experts.
        dtype, device: of the weights, and what they compute on.
        batches, rows, length: passes of `[rows, length]` tokens that make one walk over the calibration set.
        reads_text: whether these are tokens of a text; else rows are images, or recordings.
        placements, work: by name: memory and disk, passes and operations.
        written: the model's own text, which it is calibrated on by default; an offloaded model writes none.
        measured: the evaluation that is made by default.
        recovery: the training that `recovery_steps` ask for.
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
    reads_text: bool
    placements: tuple[Placement, ...]
    work: dict[PlacementName, Work]
    written: Written | None = None
    measured: Measured | None = None
    recovery: Training | None = None
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
        targets: the matrices to prune.
        device: what the model will compute on; default: the first CUDA device, or the CPU.
        base: bytes of the process before it loads a model; default: those of this one.
        snapshots: whether the run will write snapshots, to be resumed.
    """
    check_estimable(config)
    length = tokens_of_an_image(model) or window_length(config.sequence_length, model)
    config = replace(config, sequence_length=length)
    device = device or compute_device()
    base = process_bytes() if base is None else base
    walk = walk_of(model, config, targets)
    costs = {recomputes: _cost(model, targets, config, walk, recomputes, device) for recomputes in (False, True)}
    loss = loss_bytes(model, walk.rows, walk.length) if config.needs.probes else 0
    batch = {key: BatchSizes(cost.peak_bytes, cost.heap_bytes, loss) for key, cost in costs.items()}
    forward = _NOTHING
    if is_causal(model):
        forward = cost_of_batch(model, targets, walk.rows, walk.length, backward=False, device=device)
    text, evaluation = written(model, config, walk, forward), measured(model, config, walk, forward)
    sizes, room = sizes_of(model, targets, config, process=base, snapshots=snapshots), room_of(device, base)
    training = recovery_of(model, targets, config, device, snapshots=snapshots)
    sizes = replace(
        sizes,
        writing=text.bytes if text else 0,
        measuring=evaluation.bytes if evaluation else 0,
        training=training.sizes if training else None,
    )
    # What is offloaded is not trained: such a run is refused.
    possible = {name: recomputes for name, recomputes in RECOMPUTES.items() if not (training and name == "offloaded")}
    placements = tuple(footprint_of(name, sizes, batch[recomputes], room) for name, recomputes in possible.items())
    return Estimate(
        architecture=type(model).__name__,
        parameters=model.num_parameters(),
        target_weights=sizes.model.targets,
        active_target_weights=active_weights(model, targets),
        matrices=len(targets),
        blocks=len({target.block for target in targets if target.block}),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(device),
        **asdict(walk),
        reads_text=model.main_input_name == "input_ids",
        placements=placements,
        work=work_of(model, targets, config, costs, walk),
        written=text,
        measured=evaluation,
        recovery=training,
        notes=notes_on(model, config, targets, costs[False], batch[False], sizes, placements),
    )


def check_estimable(config: GradProbeConfig) -> None:
    """Raise ValueError for a run whose passes depend on what it finds out."""
    if config.shape_budget is not None:
        raise ValueError(
            f"structure='auto' prunes several shapes that meet {config.shape_budget}, and which ones is decided on the "
            "way. Estimate one of them, structure={'ffn': 0.25} (--structure ffn=0.25) say: each takes as much."
        )


def room_of(device: torch.device, base: int) -> dict[Device, int]:
    """Free bytes of each device that a run uses; what this process holds already is its own to use."""
    room: dict[Device, int] = {"host": available_bytes(torch.device("cpu")) + base}
    if device.type != "cpu":
        room["accelerator"] = available_bytes(device)
    return room | {"disk": free_disk_bytes()}


def _cost(
    model: PreTrainedModel,
    targets: Sequence[Target],
    config: GradProbeConfig,
    walk: Walk,
    recomputes: bool,
    device: torch.device,
) -> PassCost:
    if config.needs.passes == "none":
        return _NOTHING
    return cost_of_batch(
        model, targets, walk.rows, walk.length, checkpoint=recomputes, backward=config.needs.probes, device=device
    )
