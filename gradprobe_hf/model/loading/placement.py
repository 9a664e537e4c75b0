"""Placement: a model that is loaded by name, and not placed by a device map, goes to the accelerator of its process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import PartialState
from transformers import PreTrainedModel

# Arguments of `from_pretrained` that say where weights are.
PLACES = ("device_map", "distributed_config", "tp_plan")


def to_accelerator(model: PreTrainedModel, given: Mapping[str, Any]) -> None:
    """Move a model to the accelerator, if there is one and nothing that was given says where it goes.

    `from_pretrained` leaves it on the CPU, where Trainer, too, fetches it from.

    Args:
        given: what the model was loaded with.

    Raises:
        MemoryError: it does not fit there.
    """
    if any(given.get(name) is not None for name in PLACES):
        return
    device = accelerator()
    try:
        model.to(device)
    except torch.OutOfMemoryError as error:
        raise MemoryError(
            f"{type(model).__name__} does not fit on {device}, {model.get_memory_footprint() / 1e9:.1f} GB of weights: "
            "pass device_map='auto' to keep a part of it elsewhere, or device_map='cpu'."
        ) from error


def accelerator() -> torch.device:
    """The device of this process, as Accelerate tells it; the CPU in place of Apple's MPS, which was never tried."""
    device = PartialState().device
    return torch.device("cpu") if device.type == "mps" else device
