"""Patches: temporary changes to a model as context managers, each undone on exit and after an exception."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from gradprobe_hf.model.passes.rescaling import with_stored_scale
from gradprobe_hf.runtime.interrupts import uninterrupted


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Dropout off. Every module gets its own mode back: parts of a model may be in eval mode while it trains."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with with_stored_scale(model):
            yield
    finally:
        with uninterrupted():
            for module, training in modes:
                module.training = training


@contextmanager
def own_draws(device: torch.device) -> Iterator[Callable[[int], None]]:
    """Yield what gives a batch random numbers of its own, by its number: the same in every pass.

    Some models draw in evaluation, too: PatchTSMixer masks its input, Mask2Former takes points of each image. Two
    passes would see other losses, and a difference that is chance. Behind it the caller's generators are as they were.
    """

    def draw(number: int) -> None:
        # Not `torch.manual_seed`: it seeds every device that there is, and none but this one is put back.
        torch.default_generator.manual_seed(number)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(number)

    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield draw


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No parameter requires a gradient, so that autograd neither computes nor keeps any."""
    # By name, not by object: Accelerate replaces an offloaded Parameter by a new one in every pass.
    required = [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad]
    try:
        for name in required:
            model.get_parameter(name).requires_grad_(False)
        yield
    finally:
        for name in required:
            model.get_parameter(name).requires_grad_(True)


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Weights and buffers of half precision in float32, and behind it as they were: 4 bytes more for each value.

    For a model that is in memory, in one piece.
    """
    stored = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    try:
        for tensor, values in stored:
            tensor.data = values.to(torch.promote_types(values.dtype, torch.float32))
        yield
    finally:
        with uninterrupted():
            for tensor, values in stored:
                tensor.data = values


@contextmanager
def seen_on(model: PreTrainedModel, device: torch.device) -> Iterator[None]:
    """`model.device` is this one, also where Accelerate keeps the weights elsewhere.

    Generation makes its first tokens there, and of an offloaded model it says "meta".
    """
    own = type(model)
    if model.device.type == "meta":  # a property of the class: an attribute of the instance would not win
        model.__class__ = type(own.__name__, (own,), {"device": property(lambda _: device)})
    try:
        yield
    finally:
        model.__class__ = own


def checkpointed_layers(model: nn.Module) -> list[str]:
    """Names of the layers that can be recomputed, by the class that marks them in transformers/modeling_layers.py."""
    return [name for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)]


@contextmanager
def checkpointed(
    model: nn.Module, layers: Sequence[str], recomputing: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Iterator[None]:
    """Recompute these layers in backward instead of keeping their activations.

    Args:
        recomputing: entered while a layer is recomputed.
    """
    # transformers' own `gradient_checkpointing_enable` has no effect in eval mode, and train mode would switch dropout
    # on. This wrapper goes around `module.forward`, outside Accelerate's hooks: recomputing a layer then loads its
    # weights again, and lets them go again.
    with ExitStack() as undo:
        for name in layers:
            module = model.get_submodule(name)
            undo.callback(restore_slot, module, "forward", module.__dict__.get("forward"))
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
        # The reentrant kind needs an input that requires a gradient. All weights are frozen, so the first block's input
        # does not require one; the graph starts inside that block.
        use_reentrant=False,
        # In eval mode nothing is drawn: there is no generator state to save and restore.
        preserve_rng_state=False,
        # Stopping early leaves the recomputed forward by an exception, past Accelerate's post-forward hook, and the
        # weights of the layer would stay in memory.
        early_stop=False,
        context_fn=lambda: (nullcontext(), recomputing()),
        **kwargs,
    )


def restore_slot(module: nn.Module, slot: str, original: Any) -> None:
    """Undo a replaced forward. `original` is what the instance had there; None: nothing, the class's forward counts."""
    if original is None:
        module.__dict__.pop(slot, None)
    else:
        module.__dict__[slot] = original


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """A module runs this in place of its forward."""
    with ExitStack() as undo:
        replace_forward(module, forward, undo)
        yield


def replace_forward(module: nn.Module, forward: Callable[..., Any], undo: ExitStack) -> None:
    """The same, undone by `undo`."""
    # `forward`, not `_old_forward`: a finished block of an offloaded model does not even load its weights.
    undo.callback(restore_slot, module, "forward", module.__dict__.get("forward"))
    module.__dict__["forward"] = forward
