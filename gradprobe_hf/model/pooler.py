"""The pooler: a layer that some classes have on top, and some of their checkpoints have not.

`ViTModel(config, add_pooling_layer=False)` has none, and no configuration says so. Its checkpoint (DINO's, or any of a
masked language model) loaded plainly gets one with random weights, whose output is noise.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

from torch import nn

_OPTION = "add_pooling_layer"
_NAME = "pooler"


def take_off_pooler(model: nn.Module, missing: Collection[str]) -> bool:
    """Take the pooler off if the checkpoint has nothing of it. Returns whether it is off now.

    Args:
        missing: names of parameters that the checkpoint does not have.
    """
    pooler = getattr(model, _NAME, None)
    if not _is_optional(model) or not isinstance(pooler, nn.Module):
        return False
    names = {f"{_NAME}.{name}" for name, _ in pooler.named_parameters()}
    if not names or not names <= set(missing):
        return False
    setattr(model, _NAME, None)
    return True


def without_pooler(model: nn.Module) -> dict[str, Any]:
    """What its class is made with, beside the configuration, to have no pooler where the model has none."""
    return {_OPTION: False} if _is_optional(model) and getattr(model, _NAME, ...) is None else {}


def _is_optional(model: nn.Module) -> bool:
    return _OPTION in inspect.signature(type(model).__init__).parameters
