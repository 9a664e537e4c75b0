"""A smaller checkpoint: structures are cut out while the shards are written, and the result is looked at.

A model whose code relies on a size that no configuration tells would load, and compute something else. So what was
written is loaded as a user would, by `from_pretrained`, and has to compute what the masked model does.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from transformers import PreTrainedModel

from gradprobe_hf.estimation.machine import available_bytes
from gradprobe_hf.model.families import random_batch
from gradprobe_hf.model.fsdp import is_sharded
from gradprobe_hf.model.loss import forward_only
from gradprobe_hf.model.parameters import input_device, is_offloaded
from gradprobe_hf.model.patches import eval_mode, in_float32
from gradprobe_hf.model.saving import Smaller, save_in_shards
from gradprobe_hf.structures.removal import Removal
from gradprobe_hf.structures.shapes import smaller_config

ROWS, TOKENS = 1, 32  # one: without a padding token, a classifier of sequences takes no more
# How far apart the outputs of the two models may be, relative to their size: sums over fewer terms round otherwise.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
OF_HALF_PRECISION = 0.1  # where there is no room to compute in float32
SHARE = 0.8  # of free memory, for what is compared


def save_smaller(folder: Path, model: PreTrainedModel, removal: Removal) -> None:
    """Write what is left of a model whose masked weights are zero now.

    Raises:
        RuntimeError: what was written does not compute what the masked model does.
    """
    config = smaller_config(model.config, removal)
    save_in_shards(folder, model, smaller=Smaller(config, removal.name, removal.tensor))
    check_smaller(folder, model)


def check_smaller(folder: Path, model: PreTrainedModel) -> None:
    """Raise RuntimeError unless the checkpoint loads without a key too many or too few, and computes the same."""
    wide = model.dtype not in TOLERANCE and _has_room_for_float32(model)
    batch = random_batch(model, ROWS, TOKENS)
    wanted = _outputs(model, batch, wide)
    # The result of a long run is not lost because there is no room for a second model beside it.
    nbytes = sum(path.stat().st_size for path in folder.glob("*.safetensors")) * (2 if wide else 1)
    from_disk = is_offloaded(model) or not _fits(nbytes, torch.device("cpu"))
    with tempfile.TemporaryDirectory() as scratch:
        placed: dict[str, Any] = {"device_map": {"": "disk"}, "offload_folder": scratch} if from_disk else {}
        cls: Any = type(model)
        loaded, info = cls.from_pretrained(
            folder,
            dtype=torch.float32 if wide else model.dtype,
            attn_implementation=model.config._attn_implementation,
            output_loading_info=True,
            **placed,
        )
        wrong = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
        if wrong:
            raise RuntimeError(f"the smaller model does not load as it was written: {wrong}. Nothing was kept of it.")
        devices = {parameter.device for parameter in model.parameters()}
        if not from_disk and len(devices) == 1 and _fits(nbytes, *devices):
            loaded = loaded.to(*devices)
        _round_buffers(loaded, model)
        try:
            found = _outputs(loaded, batch, wide)
        except RuntimeError as error:
            raise RuntimeError(
                f"the smaller {type(model).__name__} does not run ({error}): its code relies on a size that the "
                "configuration does not tell. Nothing was kept of it."
            ) from error
    apart = float((found - wanted).norm() / wanted.norm())
    if not apart <= TOLERANCE.get(torch.float32 if wide else model.dtype, OF_HALF_PRECISION):
        raise RuntimeError(
            f"the smaller {type(model).__name__} does not compute what the masked one does (outputs are {apart:.1e} "
            "apart, relative): its code relies on a size that the configuration does not tell. Nothing was kept of it."
        )


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
    return all(_fits(nbytes, device) for device, nbytes in needed.items())


def _fits(nbytes: int, device: torch.device) -> bool:
    return nbytes <= SHARE * available_bytes(device)


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
