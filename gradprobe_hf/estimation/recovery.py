"""Recovery: what training towards the dense model takes, from one step of it on the meta device.

Beside the dense model stand the pruned one in float32, its gradients and the two moments of AdamW, and what the step
keeps for backward, in bfloat16 where it is computed in that. It is the largest part of a run that ends with one.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.config.recovery import RecoveryConfig
from gradprobe_hf.estimation.passes import by_formula
from gradprobe_hf.estimation.sizes import FLOAT32_BYTES, TrainingSizes
from gradprobe_hf.estimation.stand_ins import WithoutData, balanced_experts
from gradprobe_hf.estimation.training_state import state_bytes
from gradprobe_hf.estimation.watch import Watch
from gradprobe_hf.evaluation.divergence_loss import SummedDivergence, WholePredictions
from gradprobe_hf.model.families import sample_batch, without_cache
from gradprobe_hf.model.fsdp import plain_class
from gradprobe_hf.model.loading.load import skeleton
from gradprobe_hf.model.passes.patches import eval_mode, frozen
from gradprobe_hf.model.passes.upcast import native_products, upcast_products
from gradprobe_hf.model.targets import Target

logger = logging.getLogger(__name__)

BYTES_OF_A_STATE = 3 * FLOAT32_BYTES  # a parameter and its two moments; its gradient is counted with the step


@dataclass(frozen=True)
class Training:
    """A recovery, to its last step.

    Attributes:
        steps, rows, length: each step trains on `[rows, length]` tokens.
        flops: floating-point operations, the dense model's and those of the held-out measurements among them.
        sizes: what is in memory meanwhile.
        simulated: False if the step could not be run without data, and its figures are from formulas.
    """

    steps: int
    rows: int
    length: int
    flops: int
    sizes: TrainingSizes
    simulated: bool = True


def recovery_of(
    model: PreTrainedModel, targets: Sequence[Target], config: GradProbeConfig, device: torch.device, *, snapshots: bool
) -> Training | None:
    """What `recovery_steps` take; None without any.

    Args:
        model: the dense one, on the meta device.
        config: with the windows' length.
        snapshots: whether it can be resumed.
    """
    if not config.recovery_steps:
        return None
    recovery = RecoveryConfig.of_pruning(config)
    rows, length = recovery.batch_size, config.window_length
    step = _Step.of(model, targets, rows, length, device)
    # Held-out rows are read by both models, which is half of what they take in training. There may be fewer of them.
    # Before the training, in it, and of the model as it is left.
    measurements = 2 + -(-recovery.steps // recovery.distance)
    held_out = measurements * recovery.held_out_samples / rows / 2
    return Training(
        recovery.steps,
        rows,
        length,
        round(step.flops * (recovery.steps + held_out)),
        TrainingSizes(
            BYTES_OF_A_STATE * model.num_parameters(),
            step.peak_bytes,
            step.heap_bytes,
            state_bytes(recovery, model.num_parameters(), resumable=snapshots),
        ),
        step.simulated,
    )


@dataclass(frozen=True)
class _Step:
    """A step, without weights and moments. Attributes: see `passes.PassCost`."""

    peak_bytes: int
    flops: int
    heap_bytes: int = 0
    simulated: bool = True

    @classmethod
    def of(
        cls, model: PreTrainedModel, targets: Sequence[Target], rows: int, length: int, device: torch.device
    ) -> _Step:
        try:
            return cls._simulated(model, rows, length, device)
        except Exception as error:  # whatever an architecture does that needs data: a rough figure is better than none
            logger.debug("%s cannot be trained on the meta device: %s", type(model).__name__, error)
            cost = by_formula(model, targets, rows, length)
            # Forward and backward are three products, the dense model's pass is a fourth.
            gradients = FLOAT32_BYTES * model.num_parameters()
            return cls(cost.peak_bytes + gradients, cost.flops * 4 // 3, simulated=False)

    @classmethod
    def _simulated(cls, model: PreTrainedModel, rows: int, length: int, device: torch.device) -> _Step:
        student = skeleton(copy.deepcopy(model.config), plain_class(model), torch.float32).requires_grad_()
        batch = sample_batch(model, rows, length)
        beside = {} if model.config.is_encoder_decoder else {"labels"}
        called: dict[str, Any] = {name: value for name, value in batch.items() if name not in beside}
        called |= without_cache(model)
        known = [value for one in (model, student) for value in (*one.parameters(), *one.buffers())]
        with ExitStack() as stack:
            stack.enter_context(native_products())
            for mode in (frozen(model), eval_mode(model), eval_mode(student), balanced_experts(model)):
                stack.enter_context(mode)
            stack.enter_context(balanced_experts(student))
            stack.enter_context(WithoutData())
            watch = stack.enter_context(Watch([*known, *batch.values()]))
            stack.enter_context(upcast_products(model, device=device))
            with torch.no_grad():
                dense = model(**called).logits.flatten(0, -2)
            with torch.enable_grad():
                with ExitStack() as autocast:
                    if model.dtype == torch.bfloat16:
                        autocast.enter_context(_Autocast())
                    logits = student(**called).logits.flatten(0, -2)
                counted = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
                loss = SummedDivergence.apply(logits, WholePredictions(dense), counted)
                del dense, logits
                loss.backward()
            return cls(watch.peak, watch.flops, watch.heap_peak)


# What `torch.autocast` computes in bfloat16 on a CPU or GPU, of what models call.
_PRODUCTS = {
    F.linear,
    F.scaled_dot_product_attention,
    F.conv1d,
    F.conv2d,
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
    torch.bmm,
    torch.baddbmm,
    torch.einsum,
}


class _Autocast(TorchFunctionMode):
    """`torch.autocast`, which passes over the meta device: operands of products are copied to bfloat16."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS:
            args, kwargs = tree_map(_narrowed, args), tree_map(_narrowed, kwargs or {})
        return func(*args, **(kwargs or {}))


def _narrowed(value: Any) -> Any:
    return value.to(torch.bfloat16) if isinstance(value, Tensor) and value.dtype == torch.float32 else value
