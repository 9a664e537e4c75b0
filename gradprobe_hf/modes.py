"""Temporary changes to a model, each put back whatever happens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Dropout off; every module gets its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No parameter requires a gradient, so autograd computes and keeps none."""
    required = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in required:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in required:
            parameter.requires_grad_(True)
