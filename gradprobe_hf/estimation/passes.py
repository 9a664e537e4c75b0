"""Passes: memory and operations of one batch, from a model on the meta device.

Tensors on the meta device have shapes and no data, and autograd keeps and frees them as it would real ones: the bytes
that are alive at once can be watched without a weight in memory and without computing anything.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from gradprobe_hf.estimation.formula import TENSORS_OF_THE_LOSS, active_weights, block_bytes, loss_bytes
from gradprobe_hf.estimation.machine import compute_device
from gradprobe_hf.estimation.stand_ins import WithoutData, balanced_experts, gradients_required, recomputed_blocks
from gradprobe_hf.estimation.watch import Watch
from gradprobe_hf.model.families import sample_batch, without_cache
from gradprobe_hf.model.fsdp import plain_class
from gradprobe_hf.model.loading.load import skeleton
from gradprobe_hf.model.parameters import input_device
from gradprobe_hf.model.passes.loss import summed_loss
from gradprobe_hf.model.passes.patches import eval_mode, frozen
from gradprobe_hf.model.passes.upcast import native_products, upcast_products
from gradprobe_hf.model.targets import Target, find_targets, go_alone
from gradprobe_hf.tasks.embeddings import DIRECTION, POOLING, embedding_inputs, is_for_embedding
from gradprobe_hf.tasks.table import task_of_class

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PassCost:
    """What one batch takes, without weights and statistics.

    Attributes:
        saved_bytes: what forward leaves for backward.
        peak_bytes: the most that is alive at once.
        flops: floating-point operations.
        heap_bytes: the most that is alive at once in blocks that a CPU allocator takes from its heap.
        simulated: False if the model could not be run without data, and the figures are from formulas.
    """

    saved_bytes: int
    peak_bytes: int
    flops: int
    heap_bytes: int = 0
    simulated: bool = True


def activation_bytes(
    model: PreTrainedModel, batch_size: int, sequence_length: int, *, checkpointed: bool
) -> int | None:
    """The most memory, in bytes, that a batch of a probe takes besides weights and statistics.

    Answers are cached. An architecture that cannot be simulated gets a formula.

    Args:
        model: what it is of, and where; its weights are not needed.
        batch_size: sequences in a batch.
        sequence_length: tokens in a sequence.
        checkpointed: whether every block is recomputed in backward.

    Returns:
        None if the model cannot be built without its weights (custom code): then nothing is known.
    """
    cls: Any = plain_class(model)
    shape, device = _Shape(model.config.to_json_string(), model.config), input_device(model)
    return _cached(shape, cls, model.dtype, device, batch_size, sequence_length, checkpointed)


@dataclass(frozen=True)
class _Shape:
    """A configuration, and its text, which tells it from others: it is not hashable, and equal ones have one answer."""

    text: str
    config: PreTrainedConfig = field(compare=False)


@lru_cache(maxsize=256)
def _cached(
    shape: _Shape,
    cls: Any,
    dtype: torch.dtype,
    device: torch.device,
    rows: int,
    length: int,
    checkpoint: bool,
) -> int | None:
    config = copy.deepcopy(shape.config)
    config._attn_implementation = None  # which the text does not say: the architecture's own choice
    try:
        model = skeleton(config, cls, dtype)
        targets = find_targets(model)
    except Exception as error:  # custom code, or no blocks: the caller wants a number, not a reason
        logger.debug("no skeleton of %s: %s", cls.__name__, error)
        return None
    return cost_of_batch(model, targets, rows, length, checkpoint=checkpoint, device=device).peak_bytes


def cost_of_batch(
    model: PreTrainedModel,
    targets: Sequence[Target],
    batch_size: int,
    sequence_length: int,
    *,
    checkpoint: bool = False,
    backward: bool = True,
    device: torch.device | None = None,
) -> PassCost:
    """What one batch takes.

    Args:
        model: on the meta device.
        targets: matrices whose gradients are made.
        batch_size: sequences; one where they are measured one at a time.
        sequence_length: tokens in a sequence.
        checkpoint: whether every block is recomputed in backward.
        backward: False for a forward pass alone.
        device: what it computes on; default: the first CUDA device, or the CPU.
    """
    device = device or compute_device()
    rows = 1 if go_alone(model, targets) else batch_size
    try:
        return _simulated(model, targets, _batch(model, rows, sequence_length), checkpoint, backward, device)
    except Exception as error:  # whatever an architecture does that needs data: a rough figure is better than none
        logger.debug("%s cannot be run on the meta device: %s", type(model).__name__, error)
        return by_formula(model, targets, rows, sequence_length, checkpoint=checkpoint, backward=backward)


def _batch(model: PreTrainedModel, rows: int, length: int) -> dict[str, Tensor]:
    """A batch that there is a loss for."""
    found = sample_batch(model, rows, length)
    task = task_of_class(type(model).__name__, model.config.is_encoder_decoder)
    if task is None or not task.embeds:
        return found
    # One number for each row, as wide as the embeddings are or not: it takes next to nothing beside a pass.
    shapes = {"labels": (rows, 1), DIRECTION: (rows, 1)} | ({POOLING: (rows, length)} if task.cuts_windows else {})
    return found | {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def by_formula(
    model: PreTrainedModel,
    targets: Sequence[Target],
    rows: int,
    length: int,
    *,
    checkpoint: bool = False,
    backward: bool = True,
) -> PassCost:
    """What one batch takes, for a model that cannot be simulated.

    With N the target weights that a token passes, forward takes `2 N` operations per token; gradients of the inputs,
    gradients of the weights, and a forward pass that is repeated take as many each.
    """
    kept, loss = block_bytes(model, targets, rows, length), loss_bytes(model, rows, length)
    forward = 2 * rows * length * active_weights(model, targets)
    if not backward:
        return PassCost(0, max(kept.values()) + loss // TENSORS_OF_THE_LOSS, forward, simulated=False)
    hidden = rows * length * model.dtype.itemsize * max(target.shape[1] for target in targets)
    saved = hidden * len(kept) if checkpoint else sum(kept.values())
    again = max(kept.values()) if checkpoint else 0
    flops = forward * (4 if checkpoint else 3)
    return PassCost(saved + loss // TENSORS_OF_THE_LOSS, saved + again + loss, flops, simulated=False)


def _simulated(
    model: PreTrainedModel,
    targets: Sequence[Target],
    batch: Mapping[str, Tensor],
    checkpoint: bool,
    backward: bool,
    device: torch.device,
) -> PassCost:
    """One batch on the meta device, in the modes of a probe."""
    with ExitStack() as stack:
        stack.enter_context(native_products())  # those of a run that asks lie under the watch, which would see none
        for mode in (frozen(model), eval_mode(model), gradients_required(model, targets), balanced_experts(model)):
            stack.enter_context(mode)
        if checkpoint:
            stack.enter_context(recomputed_blocks(model))
        stack.enter_context(WithoutData())
        watch = stack.enter_context(Watch([*model.parameters(), *model.buffers(), *batch.values()]))
        stack.enter_context(upcast_products(model, device=device))
        if not backward:
            with torch.no_grad():
                model(**(embedding_inputs(batch) if is_for_embedding(batch) else batch), **without_cache(model))
            return PassCost(0, watch.peak, watch.flops, watch.heap_peak)
        with torch.enable_grad():
            loss, _ = summed_loss(model, batch)
            saved = watch.live
            loss.backward()
        return PassCost(saved, watch.peak, watch.flops, watch.heap_peak)
