"""Equality: whether a smaller model computes what the masked one does.

A model whose code relies on a size, or on a position, that no configuration tells would load, and compute something
else. So it is tried twice: before any work on an example of what is to go, in memory; and on what was written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from transformers import PreTrainedModel

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.estimation.machine import available_bytes
from gradprobe_hf.model.families import random_batch
from gradprobe_hf.model.fsdp import is_sharded
from gradprobe_hf.model.loss import forward_only
from gradprobe_hf.model.parameters import input_device, is_offloaded
from gradprobe_hf.model.patches import eval_mode, in_float32
from gradprobe_hf.model.targets import Target
from gradprobe_hf.reconstruction.silenced_blocks import silenced
from gradprobe_hf.run.apply import applied
from gradprobe_hf.run.shape_search import example_of_budget
from gradprobe_hf.run.structured import packed
from gradprobe_hf.structures.plan import Plan
from gradprobe_hf.structures.removal import Removal
from gradprobe_hf.structures.shapes import random_smaller

ROWS, TOKENS = 1, 32  # one: without a padding token, a classifier of sequences takes no more
# How far apart the outputs of the two models may be, relative to their size: sums over fewer terms round otherwise.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
OF_HALF_PRECISION = 0.1  # where there is no room to compute in float32
SHARE = 0.8  # of free memory, for what is compared


@dataclass(frozen=True)
class MaskedOutputs:
    """What the masked model computes of a random batch.

    Attributes:
        wide: whether in float32, from weights of half precision.
    """

    model: PreTrainedModel
    batch: dict[str, Tensor]
    outputs: Tensor
    wide: bool

    @classmethod
    def of(cls, model: PreTrainedModel) -> MaskedOutputs:
        wide = model.dtype not in TOLERANCE and _has_room_for_float32(model)
        batch = random_batch(model, ROWS, TOKENS)
        return cls(model, batch, _outputs(model, batch, wide), wide)

    @property
    def dtype(self) -> torch.dtype:
        """That the smaller model has to have."""
        return torch.float32 if self.wide else self.model.dtype

    def difference(self, smaller: PreTrainedModel) -> str | None:
        """Why the smaller model is another one; None if it is not."""
        _round_buffers(smaller, self.model)
        name, why = type(self.model).__name__, "its code relies on a size that the configuration does not tell"
        try:
            found = _outputs(smaller, self.batch, self.wide)
        except RuntimeError as error:
            return f"the smaller {name} does not run ({error}): {why}"
        apart = float((found - self.outputs).norm() / self.outputs.norm())
        if apart <= TOLERANCE.get(self.dtype, OF_HALF_PRECISION):
            return None
        return (
            f"the smaller {name} does not compute what the masked one does (outputs are {apart:.1e} apart, relative): "
            f"{why}"
        )


def check_example(model: PreTrainedModel, targets: Sequence[Target], config: GradProbeConfig) -> None:
    """Raise ValueError where an example of what is to go leaves a model that computes something else.

    It is not tried where parts of the model are offloaded, or memory has no room for a second one: what is written is
    looked at in any case.
    """
    if is_offloaded(model) or is_sharded(model):
        return
    plan = Plan.of(model, targets, config.amounts) if config.amounts else example_of_budget(model, targets, config)
    if plan.experts and model.dtype == torch.float64:
        return  # which transformers' own products of experts do not take
    removal = Removal.example(plan)
    nbytes, devices = 2 * removal.bytes(model), {parameter.device for parameter in model.parameters()}
    if len(devices) > 1 or not all(fits(nbytes, device) for device in devices):
        return
    biases = silenced(model, sorted(removal.blocks))
    masks = packed(removal, targets)
    with applied(model, targets, masks, keep=False, new_weights=biases, routes=removal.routes):
        masked = MaskedOutputs.of(model)
        made = random_smaller(model, removal, masked.dtype).to(*devices)
        tensors = {removal.name(name): (name, tensor) for name, tensor in model.state_dict().items()}
        made.load_state_dict({new: removal.tensor(*old) for new, old in tensors.items() if new is not None})
        difference = masked.difference(made)
    if difference is not None:
        raise ValueError(
            f"structure={config.structure!r}: {difference}. It cannot be made smaller so. Nothing was changed."
        )


def fits(nbytes: int, device: torch.device) -> bool:
    """Whether there is room for so much on a device."""
    return nbytes <= SHARE * available_bytes(device)


def _has_room_for_float32(model: PreTrainedModel) -> bool:
    """Whether all of it is in memory, and its weights once more in float32 would be too.

    Rounding to half precision moves the outputs of a model by one or two percent, and of a mixture by more, where
    tokens go to other experts. Attention that is scaled for other heads does not move them by more than seven.
    """
    if is_offloaded(model) or is_sharded(model):
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
    with eval_mode(model), in_float32(model) if wide else nullcontext():
        given = {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in batch.items()}
        output: Tensor = forward_only(model, send_to_device(given, input_device(model)))[0]
        return output.double().cpu()
