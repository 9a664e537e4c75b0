"""Equality: whether a smaller model computes what the masked one does.

A model whose code relies on a size, or on a position, that no configuration tells would load, and compute something
else. So it is tried twice: before any work on examples of what is to go, in memory; and on what was written.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.estimation.machine import fits
from gradprobe_hf.model.families import longest_text, random_batch
from gradprobe_hf.model.fsdp import is_sharded
from gradprobe_hf.model.parameters import input_device, is_offloaded, parameter_bytes
from gradprobe_hf.model.passes.loss import forward_only
from gradprobe_hf.model.passes.patches import eval_mode, in_float32
from gradprobe_hf.model.passes.upcast import upcast_products
from gradprobe_hf.model.pooler import without_pooler
from gradprobe_hf.model.targets import Target
from gradprobe_hf.reconstruction.silenced_blocks import silenced
from gradprobe_hf.run.apply import applied
from gradprobe_hf.run.shapes.budget import example_of_budget
from gradprobe_hf.run.shapes.structured import packed
from gradprobe_hf.structures.plan import Plan
from gradprobe_hf.structures.removal import Removal
from gradprobe_hf.structures.shapes import smaller_config

logger = logging.getLogger(__name__)

ROWS = 1  # without a padding token, a classifier of sequences takes no more
# As long as the texts of a calibration, so that windows of attention show; and the last of them are compared.
TOKENS, COMPARED = 512, 32
# How far apart the outputs of the two models may be, relative to their size: sums over fewer terms round otherwise.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
OF_HALF_PRECISION = 0.1  # where there is no room to compute in float32
# What a model's own code raises where a batch, or a size, is none that it was made for.
_REFUSALS = (RuntimeError, TypeError, ValueError, LookupError)
HUGE = 1e30  # outputs from here on say that something is masked, tokens that are never written say


@dataclass(frozen=True)
class MaskedOutputs:
    """What the masked model computes of a random batch.

    Attributes:
        outputs: None where it takes no such batch (some classifiers want an end-of-sequence token in each sequence).
        wide: whether in float32, from weights of half precision.
    """

    model: PreTrainedModel
    batch: dict[str, Tensor]
    outputs: Tensor | None
    wide: bool

    @classmethod
    def of(cls, model: PreTrainedModel) -> MaskedOutputs:
        wide = model.dtype not in TOLERANCE and _takes_float32(model)
        batch, outputs = random_batch(model, ROWS, min(TOKENS, longest_text(model) or TOKENS)), None
        try:
            outputs = _outputs(model, batch, wide)
        except torch.OutOfMemoryError:
            raise
        except _REFUSALS as error:
            logger.warning(
                "whether a smaller %s computes what the masked one does was not compared: no random batch runs (%s)",
                type(model).__name__,
                error,
            )
        return cls(model, batch, outputs, wide)

    @property
    def dtype(self) -> torch.dtype:
        """That the smaller model has to have."""
        return torch.float32 if self.wide else self.model.dtype

    def difference(self, smaller: PreTrainedModel) -> str | None:
        """Why the smaller model is another one; None if it is not, as far as it can be told."""
        if self.outputs is None:
            return None
        _round_buffers(smaller, self.model)
        name, why = type(self.model).__name__, "its code relies on a size that the configuration does not tell"
        try:
            found = _outputs(smaller, self.batch, self.wide)
        except torch.OutOfMemoryError:
            raise
        except _REFUSALS as error:
            return f"the smaller {name} does not run ({error}): {why}"
        apart, size = _apart(found, self.outputs)
        if apart <= TOLERANCE.get(self.dtype, OF_HALF_PRECISION) * size:
            return None
        relative = apart / size if size else math.inf
        return (
            f"the smaller {name} does not compute what the masked one does (outputs are {relative:.1e} apart, "
            f"relative): {why}"
        )


def check_example(model: PreTrainedModel, targets: Sequence[Target], config: GradProbeConfig) -> None:
    """Raise ValueError where one of two examples of what is to go leaves a model that computes something else.

    It is not tried where parts of the model are offloaded, or memory has no room for a second one: what is written is
    looked at in any case.
    """
    devices = {parameter.device for parameter in model.parameters()}
    if is_offloaded(model) or is_sharded(model) or len(devices) > 1:
        return
    plan = Plan.of(model, targets, config.amounts) if config.amounts else example_of_budget(model, targets, config)
    removals = [Removal.example(plan)]
    if plan.blocks_going > 1:  # without two in a row, what takes turns from block to block would still be in step
        removals.append(Removal.example(plan, plan.blocks[1::2]))
    # The smaller model, in float32 at most; beside it what is zero meanwhile is kept.
    nbytes = torch.float32.itemsize * removals[0].parameters(model) + parameter_bytes(model)
    if not all(fits(nbytes, device) for device in devices):
        return
    for removal in removals:
        try:
            difference = _difference(model, targets, removal, *devices)
        except torch.OutOfMemoryError:
            return
        if difference is not None:
            raise ValueError(
                f"structure={config.structure!r}: {difference}. It cannot be made smaller so. Nothing was changed."
            )


def _difference(
    model: PreTrainedModel, targets: Sequence[Target], removal: Removal, device: torch.device
) -> str | None:
    biases, masks = silenced(model, sorted(removal.blocks)), packed(removal, targets)
    with applied(model, targets, masks, keep=False, new_weights=biases, routes=removal.routes):
        masked = MaskedOutputs.of(model)
        if masked.outputs is None:
            return None
        if masked.outputs.isnan().any():
            return (
                f"what {type(model).__name__} computes of a random batch is NaN: look for NaN in its weights, or a "
                "dtype that overflows (float16: try bfloat16)"
            )
        # Made where the model is, and with no values: they are copied one after the other.
        with torch.device(device), no_init_weights():
            config = smaller_config(model.config, removal)
            made = type(model)._from_config(config, dtype=masked.dtype, **without_pooler(model)).to(device).eval()
        values = made.state_dict()
        for name, tensor in model.state_dict().items():
            if (new := removal.name(name)) is not None:
                values[new].copy_(removal.tensor(name, tensor))
        return masked.difference(made)


def _apart(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    """How far apart outputs are, and the size of those that are wanted.

    What is masked, or NaN, has to be so in both, and has no size: beside it all others would be nothing.
    """
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    counted = wanted.abs() < HUGE  # no NaN is
    return float((found - wanted).masked_fill(same, 0).norm()), float(wanted.masked_fill(~counted, 0).norm())


def _takes_float32(model: PreTrainedModel) -> bool:
    """Whether all of it is in memory, its weights once more in float32 would be too, and its code takes them.

    Rounding to half precision moves the outputs of a model by one or two percent, and of a mixture by more, where
    tokens go to other experts. Attention that is scaled for other heads does not move them by more than seven.
    """
    flash = "flash" in str(model.config._attn_implementation)  # kernels for half precision alone
    if is_offloaded(model) or is_sharded(model) or flash:
        return False
    needed = Counter[torch.device]()
    for tensor in (*model.parameters(), *model.buffers()):
        needed[tensor.device] += torch.float32.itemsize * tensor.numel()
    return all(fits(nbytes, device) for device, nbytes in needed.items())


def _round_buffers(loaded: PreTrainedModel, model: PreTrainedModel) -> None:
    """What no file has, rotary frequencies say, as rounded as it is behind `model.to(torch.bfloat16)`."""
    own = dict(model.named_buffers())
    for name, buffer in loaded.named_buffers():
        if name in own and buffer.is_floating_point():
            buffer.data = buffer.to(own[name].dtype).to(buffer.dtype)


@torch.no_grad()
def _outputs(model: PreTrainedModel, batch: dict[str, Tensor], wide: bool) -> Tensor:
    drawing = torch.random.fork_rng(_cuda_devices(model))  # some models mask what they read at random
    with drawing, eval_mode(model), upcast_products(model), in_float32(model) if wide else nullcontext():
        torch.manual_seed(0)
        given = {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in batch.items()}
        return _told(forward_only(model, send_to_device(given, input_device(model)))).double().cpu()


def _told(output: Any) -> Tensor:
    """What a model predicts of the last tokens, or classes; of one without a head, its hidden states.

    The loss of routers may stand in front of it (`output_router_logits` in the configuration), which counts experts.
    """
    logits = getattr(output, "logits", None)
    found: Tensor = logits if isinstance(logits, Tensor) else output[0]
    return found[:, -COMPARED:] if found.ndim == 3 else found


def _cuda_devices(model: PreTrainedModel) -> list[torch.device]:
    return list({parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"})
