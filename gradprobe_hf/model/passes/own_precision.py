"""Mixed precision that Accelerate has left on a model, taken off while the package works with it.

`Accelerator.prepare`, and with it a Trainer with `bf16=True`, replaces a model's forward pass by one under autocast
and leaves it so. Rounded copies of the weights are kept in there from step to step, while masks, updates and the steps
of a recovery change the weights themselves: what is measured would be of other weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torch import nn

from gradprobe_hf.runtime.interrupts import uninterrupted

P = ParamSpec("P")
R = TypeVar("R")

_PREPARED = ("forward", "_original_forward", "_is_accelerate_prepared")


def in_own_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: each model among the arguments, or of a result among them, has its own forward pass in the call."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with ExitStack() as stack:
            for one in (*args, *kwargs.values()):
                for model in (one, getattr(one, "model", None)):
                    if isinstance(model, nn.Module):
                        stack.enter_context(own_forward(getattr(model, "_orig_mod", model)))
            return function(*args, **kwargs)

    return called


@contextmanager
def own_forward(model: nn.Module) -> Iterator[None]:
    """The model without Accelerate's mixed precision, which it has again afterwards."""
    if "_original_forward" not in vars(model):
        yield
        return
    found: dict[str, Any] = {name: vars(model).pop(name) for name in _PREPARED if name in vars(model)}
    original = found["_original_forward"]
    if getattr(original, "__func__", None) is not type(model).forward:  # that of a hook, of a model on several devices
        model.forward = original
    try:
        yield
    finally:
        with uninterrupted():
            vars(model).pop("forward", None)
            vars(model).update(found)
