"""Weights that a model changes by itself: in evaluation mode transformers' RWKV divides some in place, before it runs.

Two matrices of each of its later blocks are divided by a power of two, and the stream between blocks with them, so that
float16 does not overflow. Nothing multiplies them back when the model is saved, and the next one that is loaded divides
them once more. So they are as they are stored wherever this package reads them or runs the model, which divides them
again when somebody else runs it. What overflows in float16 then is an error, of a loss that is NaN: bfloat16 has room.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

from torch import nn

from gradprobe_hf.runtime.interrupts import uninterrupted


def restore_scale(model: nn.Module) -> None:
    """Multiply back what the model has divided; exact, since these are powers of two."""
    for module in _rescaling(model):
        if module.layers_are_rescaled:
            in_training, module.training = module.training, True  # in which it does that by itself
            try:
                module._rescale_layers()
            finally:
                module.training = in_training


@contextmanager
def with_stored_scale(model: nn.Module) -> Iterator[None]:
    """In the body of the `with`, the model runs with its weights as they are stored."""
    kept = [(module, module.config) for module in _rescaling(model)]
    if kept:
        restore_scale(model)
    try:
        for module, config in kept:
            module.config = copy(config)  # of its own: another model may have the same one
            module.config.rescale_every = 0
        yield
    finally:
        with uninterrupted():
            for module, config in kept:
                module.config = config
                module.layers_are_rescaled = False  # it says that it is: nothing was divided


def _rescaling(model: nn.Module) -> list[Any]:
    # Not by `hasattr`, which is slow where there is nothing: a teacher comes by here at every step.
    return [module for module in model.modules() if "layers_are_rescaled" in vars(module)]
