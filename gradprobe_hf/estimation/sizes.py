"""Sizes: everything that decides how much memory a run takes, from a configuration and a model on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.config.values import AccumulatorDevice
from gradprobe_hf.model.config_names import text_attribute
from gradprobe_hf.model.families import block_of
from gradprobe_hf.model.targets import Target
from gradprobe_hf.probe.accumulation.accumulators import BYTES_PER_WEIGHT
from gradprobe_hf.scores.terms import matrix_terms
from gradprobe_hf.structures.legal_shapes import smallest_first
from gradprobe_hf.structures.plan import Plan
from gradprobe_hf.structures.removal import Removal
from gradprobe_hf.updates.sweep import FACTORED

FLOAT32_BYTES = 4
TRAINED_TENSORS = 5  # of a block: its weights, their gradients, two moments of Adam, and the best state so far


@dataclass(frozen=True)
class ModelSizes:
    """Of a model and its targets; bytes, where it does not say otherwise.

    Attributes:
        weights: all parameters.
        stored: the checkpoint's files; 0 where they are mapped as they are, without conversion to another dtype.
        block, ends: the largest block; the larger one of input embedding and output head.
        targets, largest_target: elements of all target matrices, and of the largest one.
        itemsize: of one weight.
        vocabulary: tokens.
    """

    weights: int
    stored: int
    block: int
    ends: int
    targets: int
    largest_target: int
    itemsize: int
    vocabulary: int = 0


@dataclass(frozen=True)
class AccumulatorSizes:
    """Attributes: `bytes` of the statistics `[out, in]` of the whole run, and the `device` that they are kept on, or
    "auto"."""

    bytes: int
    device: AccumulatorDevice | Literal["auto"]


@dataclass(frozen=True)
class ReconstructionSizes:
    """Bytes that a weight update takes.

    Attributes:
        hessians: Hessians (and drifts) of the block that has the most.
        factored: temporaries of the size of the largest Hessian, while it is factored.
        workspace: temporaries of the update on the largest matrix.
        hidden: hidden states of the whole calibration set between two blocks.
        trained: what training the largest block takes beside activations; 0: nothing is trained.
    """

    hessians: int
    factored: int
    workspace: int
    hidden: int
    trained: int


@dataclass(frozen=True)
class TrainingSizes:
    """Bytes of a recovery beside the dense model.

    Attributes:
        states: the parameters that are trained, in float32, and the optimizer's moments.
        step: their gradients, and the activations and logits of a step.
        small_blocks: of these in blocks that a CPU allocator takes from its heap.
        on_disk: its best state so far, and with `--resume` what it goes on from.
    """

    states: int
    step: int
    small_blocks: int
    on_disk: int


@dataclass(frozen=True)
class Sizes:
    """What decides the footprint of a run, apart from its batches.

    Attributes:
        process: bytes of the process before it loads a model.
        reconstruction: None without a weight update.
        weighing: of the walk that chooses whole structures; None where single weights go.
        training: of the recovery; None without one.
        smaller: bytes of the model without what goes whole; None where single weights go.
        sparsity: fraction of the targets to prune.
        snapshots: whether the run writes snapshots, to be resumed.
        writing, measuring: bytes beside the model while it writes text of its own, and while it is measured.
    """

    process: int
    model: ModelSizes
    accumulators: AccumulatorSizes
    reconstruction: ReconstructionSizes | None
    sparsity: float
    snapshots: bool = False
    writing: int = 0
    measuring: int = 0
    weighing: ReconstructionSizes | None = None
    training: TrainingSizes | None = None
    smaller: int | None = None


@dataclass(frozen=True)
class BatchSizes:
    """Bytes of one batch on its way through the model.

    Attributes:
        peak: the most that is alive at once, the loss included.
        small_blocks: the most that is alive at once in allocations of an allocator's heap.
        loss: logits and their loss.
    """

    peak: int
    small_blocks: int = 0
    loss: int = 0

    @property
    def activations(self) -> int:
        """What the batch takes besides its loss."""
        return max(0, self.peak - self.loss)


def sizes_of(
    model: PreTrainedModel, targets: Sequence[Target], config: GradProbeConfig, *, process: int, snapshots: bool
) -> Sizes:
    """The sizes of one run.

    Args:
        model: on the meta device.
        process: bytes of the process before it loads a model.
        snapshots: whether the run writes snapshots.
    """
    measured = model_sizes(model, targets)
    return Sizes(
        process=process,
        model=measured,
        accumulators=AccumulatorSizes(accumulator_bytes(config, measured.targets), config.accumulator_device),
        reconstruction=reconstruction_sizes(model, targets, config) if config.reconstructs else None,
        weighing=weighing_sizes(model, targets, config) if config.weighs_inputs else None,
        smaller=None if config.structure is None else smaller_bytes(model, targets, config),
        sparsity=config.sparsity or 0.0,
        snapshots=snapshots,
    )


def model_sizes(model: PreTrainedModel, targets: Sequence[Target]) -> ModelSizes:
    blocks = _bytes_by_block(model)
    stored = getattr(model.config, "dtype", None) or torch.float32  # transformers writes no dtype for float32
    ends = [weight.numel() for end in ("input", "output") if (weight := _embedding(model, end)) is not None]
    return ModelSizes(
        weights=sum(blocks.values()),
        stored=0 if stored == model.dtype else model.num_parameters() * stored.itemsize,
        block=max((size for name, size in blocks.items() if name), default=0),
        ends=max(ends, default=0) * model.dtype.itemsize,
        targets=sum(target.numel for target in targets),
        largest_target=max(target.numel for target in targets),
        itemsize=model.dtype.itemsize,
        vocabulary=text_attribute(model.config, "vocab_size", 0),
    )


def reconstruction_sizes(
    model: PreTrainedModel, targets: Sequence[Target], config: GradProbeConfig
) -> ReconstructionSizes:
    by_block: dict[str, int] = {}
    for target in targets:
        by_block[target.block] = by_block.get(target.block, 0) + _hessian_bytes(target)
    # With a dense target a block is run on two sets of inputs: those of the model as pruned so far, and the dense ones.
    sets = 2 if config.dense_target or config.refinement_row.dense_target else 1
    block_bytes = TRAINED_TENSORS * FLOAT32_BYTES * max(_weights_by_block(targets).values())
    tokens = config.num_samples * config.window_length
    return ReconstructionSizes(
        hessians=(2 if config.dense_target else 1) * (1 + config.holds_out) * max(by_block.values())
        if config.updates
        else 0,
        factored=config.update_row.hessians * max(map(_hessian_bytes, targets)),
        workspace=config.update_row.workspace * FLOAT32_BYTES * max(target.numel for target in targets),
        trained=block_bytes if config.refines else 0,
        hidden=(sets + config.refines) * tokens * text_attribute(model.config, "hidden_size", 0) * model.dtype.itemsize,
    )


def weighing_sizes(model: PreTrainedModel, targets: Sequence[Target], config: GradProbeConfig) -> ReconstructionSizes:
    """Of the matrices that read the units which may go."""
    readers = unit_readers(model, targets, config)
    by_block: dict[str, int] = {}
    for reader in readers:
        by_block[reader.block] = by_block.get(reader.block, 0) + _hessian_bytes(reader)
    tokens = config.num_samples * config.window_length
    return ReconstructionSizes(
        hessians=max(by_block.values()),
        factored=FACTORED * max(map(_hessian_bytes, readers)),
        workspace=2 * FLOAT32_BYTES * max(reader.numel for reader in readers),
        hidden=tokens * text_attribute(model.config, "hidden_size", 0) * model.dtype.itemsize,
        trained=0,
    )


def smaller_bytes(model: PreTrainedModel, targets: Sequence[Target], config: GradProbeConfig) -> int:
    """Bytes of the model without as many units as the configuration says: without which ones, the run finds out."""
    plan = Plan.of(model, targets, config.amounts)
    return Removal.example(plan, smallest_first(model, targets)).bytes(model)


def unit_readers(model: PreTrainedModel, targets: Sequence[Target], config: GradProbeConfig) -> list[Target]:
    """The matrices whose inputs tell which units go; none where no units inside of blocks do."""
    plan = Plan.of(model, targets, config.amounts)
    by_inputs = [name for name in plan.units if "inputs" in config.unit_scores[name].measured]
    return [one.reader for name in by_inputs for one in plan.units[name]]


def accumulator_bytes(config: GradProbeConfig, weights: int) -> int:
    """Bytes of the statistics `[out, in]` of a run.

    Args:
        weights: elements of all targets.
    """
    row = config.decision_row
    # A decision that compares two probes keeps its statistics twice; others add the second probe to the first.
    kept = len(matrix_terms(config.needs.terms)) + len(row.terms) * row.keeps_second
    return round(kept * weights * BYTES_PER_WEIGHT[config.accumulator_dtype])


def _weights_by_block(targets: Sequence[Target]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for target in targets:
        sizes[target.block] = sizes.get(target.block, 0) + target.numel
    return sizes


def _hessian_bytes(target: Target) -> int:
    return FLOAT32_BYTES * target.shape[1] ** 2


def _bytes_by_block(model: nn.Module) -> dict[str, int]:
    """Bytes of the parameters of each block; those outside all blocks are under the name `""`."""
    sizes: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        block = block_of(model, name.rpartition(".")[0])
        sizes[block] = sizes.get(block, 0) + parameter.nbytes
    return sizes


def _embedding(model: PreTrainedModel, end: str) -> Tensor | None:
    """The weight of the input or output embedding; None where the model has none of text."""
    try:
        found = getattr(model, f"get_{end}_embeddings")()
    except NotImplementedError:  # transformers' answer for some models of images
        return None
    weight = getattr(found, "weight", None)
    return weight if isinstance(weight, Tensor) else None
