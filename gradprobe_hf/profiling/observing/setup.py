"""How a run is set up: its optimizer, attention and checkpointing, and which gradients nobody uses."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _default_to_fused_or_foreach
from transformers.modeling_layers import GradientCheckpointingLayer

from gradprobe_hf.profiling.observing.observation import Setup
from gradprobe_hf.profiling.observing.places import Place, place_of
from gradprobe_hf.training.callback import leaves_out_gradients

_HALF = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
_NAMES = 5  # of parameters that are named


@dataclass
class SetupWatch:
    """Looks at each optimizer step of the warm-up, while the gradients are still there."""

    _seen: dict[int, tuple[Optimizer, Place | None]] = field(default_factory=dict)  # by id, in their order
    _noted: set[int] = field(default_factory=set)  # ids of these, also when they are gone
    _leaves_out: bool = False
    _stepped: dict[int, Tensor] = field(default_factory=dict)
    _with_gradient: set[int] = field(default_factory=set)
    _norms: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)

    def note_norm(self, optimizer: Optimizer) -> None:
        """Of what an optimizer steps with. It stays on its device: reading it would wait for it.

        A GradScaler calls a fused optimizer for gradients that are no numbers, too, and tells it not to step.
        """
        gradients = [one.grad for one in parameters_of(optimizer) if one.grad is not None]
        # A sharded one would need a collective.
        if gradients and all(type(one) is Tensor and not one.is_sparse for one in gradients):
            with torch._C.DisableTorchFunction(), torch.no_grad():
                self._norms.append((torch.nn.utils.get_total_norm(gradients), getattr(optimizer, "found_inf", None)))

    def norms(self) -> tuple[float, ...]:
        """Of each step that was looked at, and made, in order."""
        return tuple(float(norm) for norm, left_out in self._norms if left_out is None or not left_out.any())

    def begin_again(self) -> None:
        """What was seen of steps so far is dropped."""
        self._norms.clear()

    def note(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._seen:
            self._seen[id(optimizer)] = optimizer, place_of(sys._getframe(1), any_call=True)
            self._noted.add(id(optimizer))
        self._leaves_out |= leaves_out_gradients(optimizer)
        for parameter in parameters_of(optimizer):
            self._stepped[id(parameter)] = parameter
            if parameter.grad is not None:
                self._with_gradient.add(id(parameter))

    def is_new(self, optimizer: Optimizer) -> bool:
        """Whether it has taken no step in the warm-up."""
        return id(optimizer) not in self._noted

    def _told_of(self) -> tuple[Optimizer | None, Place | None]:
        """The optimizer that a report names: of several the one with the most tensors that it steps one by one."""
        one_by_one = [found for found in self._seen.values() if _steps_by(found[0]) == "one by one"]
        most = max(one_by_one, key=lambda found: len(parameters_of(found[0])), default=None)
        return most or next(iter(self._seen.values()), (None, None))

    def setup(self, models: list[nn.Module]) -> Setup:
        """Of what was seen so far."""
        names = {id(parameter): name for model in models for name, parameter in model.named_parameters()}
        without_gradient = [
            names.get(key, "?")
            for key, parameter in self._stepped.items()
            if parameter.requires_grad and key not in self._with_gradient
        ]
        parameters = [parameter for model in models for parameter in model.parameters()]
        wasted = [one for one in parameters if one.grad is not None and id(one) not in self._stepped]
        optimizer, place = self._told_of()
        wasted = wasted if optimizer is not None else []
        return Setup(
            optimizer=type(optimizer).__name__ if optimizer is not None else None,
            steps_by=_steps_by(optimizer) if optimizer is not None else None,
            has_fused=optimizer is not None and "fused" in optimizer.defaults,
            stepped_at=place,
            tensors=len(parameters_of(optimizer)) if optimizer is not None else len(self._stepped),
            optimizers=len(self._seen),
            asked=_dtype_of(parameters),
            attention=_attention(models),
            float32_products=torch.get_float32_matmul_precision() if _is_on_cuda(parameters) else None,
            checkpointed=sum(_is_checkpointed(module) for model in models for module in model.modules()),
            without_gradient=_some(without_gradient),
            without_optimizer=_some([names[id(one)] for one in wasted]),
            wasted_bytes=sum(one.grad.nbytes for one in wasted if one.grad is not None),
            leaves_out_gradients=self._leaves_out,
        )

    def forget(self) -> None:
        """Hold no tensor any more."""
        self._seen.clear()
        self._stepped.clear()


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _steps_by(optimizer: Optimizer) -> str | None:
    """As torch's own optimizers decide it, for the first group."""
    group = optimizer.param_groups[0]
    if not type(optimizer).__module__.startswith("torch.optim") or "foreach" not in group:
        return None
    if group.get("fused"):
        return "fused"
    foreach = group["foreach"]
    if foreach is None and group.get("fused") is None:
        foreach = _default_to_fused_or_foreach(group["params"], bool(group.get("differentiable")))[1]
    return "foreach" if foreach else "one by one"


def _dtype_of(parameters: Sequence[Tensor]) -> str | None:
    """The half precision of most weights, if it is one."""
    counts = Counter[torch.dtype]()
    for one in parameters:
        counts[one.dtype] += one.numel()
    return _HALF.get(max(counts, key=lambda dtype: counts[dtype])) if counts else None


def _attention(models: list[nn.Module]) -> dict[str, int]:
    """Implementation -> how many modules keep a configuration with it; only those that could have another."""
    found = Counter[str]()
    for model in models:
        supports = any(getattr(module, "_supports_sdpa", False) for module in model.modules())
        for name, module in model.named_modules():
            config = getattr(module, "config", None)
            implementation = getattr(config, "_attn_implementation", None)
            if supports and isinstance(implementation, str) and name.lower().endswith(("attn", "attention", "self")):
                found[implementation] += 1
    return dict(found)


def _is_checkpointed(module: nn.Module) -> bool:
    return isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing and module.training


def _is_on_cuda(parameters: Sequence[Tensor]) -> bool:
    return bool(parameters) and parameters[0].is_cuda


def _some(names: list[str]) -> tuple[str, ...]:
    return (*names[:_NAMES], f"and {len(names) - _NAMES} more") if len(names) > _NAMES else tuple(names)
