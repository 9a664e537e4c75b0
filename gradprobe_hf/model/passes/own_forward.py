"""A model's own forward pass, without what its user has put around it, which is there again afterwards.

Mixed precision of Accelerate: `Accelerator.prepare`, and with it a Trainer with `bf16=True`, replaces a model's forward
pass by one under autocast and leaves it so. Rounded copies of the weights are kept in there from step to step, while
masks, updates and the steps of a recovery change the weights themselves: what is measured would be of other weights.

Graphs: a model that was compiled in place (`model.compile()`) would be compiled anew for each hook, and be left with
those graphs, or with none once there are too many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torch import nn

from gradprobe_hf.model.passes.rescaling import restore_scale
from gradprobe_hf.runtime.interrupts import uninterrupted

P = ParamSpec("P")
R = TypeVar("R")

_PREPARED = ("forward", "_original_forward", "_is_accelerate_prepared")
_GRAPHS = "_compiled_call_impl"  # torch calls it in place of the module, where it is set


def with_own_forward(function: Callable[P, R]) -> Callable[P, R]:
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
    """The model as its class has it."""
    restore_scale(model)
    with _in_own_precision(model), _without_graphs(model):
        yield


@contextmanager
def _in_own_precision(model: nn.Module) -> Iterator[None]:
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


@contextmanager
def _without_graphs(model: nn.Module) -> Iterator[None]:
    compiled = {module: graphs for module in model.modules() if (graphs := getattr(module, _GRAPHS, None)) is not None}
    for module in compiled:
        setattr(module, _GRAPHS, None)
    try:
        yield
    finally:
        with uninterrupted():
            for module, graphs in compiled.items():
                setattr(module, _GRAPHS, graphs)
