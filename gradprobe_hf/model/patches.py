"""Temporary changes to a model, each put back whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


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
    """No parameter requires a gradient, so autograd computes and keeps none.

    By name: Accelerate makes a new Parameter of an offloaded one at every pass.
    """
    required = [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad]
    try:
        for name in required:
            model.get_parameter(name).requires_grad_(False)
        yield
    finally:
        for name in required:
            model.get_parameter(name).requires_grad_(True)


def checkpointed_layers(model: nn.Module) -> list[str]:
    """The layers that can be recomputed, by name: transformers marks them (transformers/modeling_layers.py)."""
    return [name for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)]


@contextmanager
def checkpointed(
    model: nn.Module, layers: Sequence[str], recomputing: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Iterator[None]:
    """Recompute these layers in backward instead of keeping what they compute in forward.

    transformers' own switch does nothing in eval mode, and in train mode dropout is on. So the layers' forwards are
    wrapped here, outside of Accelerate's hooks: recomputing a layer loads its weights again, and lets them go again.

    Args:
        recomputing: entered while a layer is computed again.
    """
    with ExitStack() as undo:
        for name in layers:
            module = model.get_submodule(name)
            undo.callback(put_back, module, "forward", module.__dict__.get("forward"))
            module.__dict__["forward"] = partial(_recomputable, module.forward, recomputing)
        yield


def _recomputable(
    forward: Callable[..., Any], recomputing: Callable[[], AbstractContextManager[None]], *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(
        forward,
        *args,
        use_reentrant=False,  # a reentrant one needs an input that requires a gradient; the first block's does not
        preserve_rng_state=False,  # eval mode: nothing is drawn
        early_stop=False,  # stopping early leaves by an exception, past the hook that lets the weights go
        context_fn=lambda: (nullcontext(), recomputing()),
        **kwargs,
    )


def put_back(module: nn.Module, slot: str, had: Any) -> None:
    """Give a module the function it had of its own in this slot; None: none, its class's counts again."""
    if had is None:
        module.__dict__.pop(slot, None)
    else:
        module.__dict__[slot] = had
