"""Forward and backward from disk that compute every target's weight gradient and drop it: what no probe can do without.

A parameter on disk is on the meta device between its uses, so autograd has no leaf to compute a gradient for. The
weight is made a node of the graph instead, at the moment it is there.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from gradprobe_hf.model.loading.load import load_model
from gradprobe_hf.model.passes.loss import summed_loss
from gradprobe_hf.model.passes.patches import checkpointed, checkpointed_layers, eval_mode, frozen
from gradprobe_hf.model.passes.upcast import upcast_products
from gradprobe_hf.model.targets import find_targets


def seconds_of_bare_pass(model_id: str, batches: list[dict[str, Tensor]]) -> float:
    """The mean of two passes, as a run has two probes. The model is left instrumented: the process ends after it."""
    model = load_model(model_id, device_map="disk", dtype="bfloat16")
    layers = checkpointed_layers(model)
    _instrument(model)
    with frozen(model), eval_mode(model), checkpointed(model, layers), upcast_products(model), torch.enable_grad():
        start = time.perf_counter()
        for batch in batches * 2:
            summed_loss(model, batch)[0].backward()
        return (time.perf_counter() - start) / 2


class _Differentiated(torch.autograd.Function):
    """The weight as a node of the graph: autograd computes its gradient, and lets it go."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, weight: Tensor) -> Tensor:  # noqa: ARG004
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:  # noqa: ARG004
        return None, None


def _instrument(model: PreTrainedModel) -> None:
    anchor = torch.zeros((), requires_grad=True)  # the frozen weight requires no gradient, so that something else must
    for target in find_targets(model):
        for site in target.sites:
            module = model.get_submodule(site.module)
            # Accelerate's hook has replaced `forward`, and calls the original under this name once the weight is there.
            module.__dict__["_old_forward"] = partial(_linear, module, anchor)


def _linear(module: Any, anchor: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, _Differentiated.apply(anchor, module.weight), module.bias)
