"""Maps that measure themselves while they are differentiated.

Each is an autograd Function: forward serves the weight (shrunk, if the probe says so), backward has the input and the
output's gradient in its hands and folds the statistics on the spot. The weight takes no gradient, so none outlives its
matrix; input and weight are saved through autograd, so that checkpointing can free and recompute them. The served
weight is made again in backward, never kept: keeping it would be a second copy of the model.

`anchor` is a scalar that requires a gradient: it starts the graph at the first target, although every weight is frozen.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gradprobe_hf.targets import Site, Target


class Folds(Protocol):
    """What a measured map asks of its probe."""

    def served(self, target: Target, weight: Tensor) -> Tensor: ...
    def fold(self, target: Target, site: Site, inputs: Tensor, output_grad: Tensor) -> None: ...


class MeasuredLinear(torch.autograd.Function):
    """`y = x W^T + b`. Shapes: x `[..., in]`, weight `[out, in]`, y `[..., out]`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        anchor: Tensor,
        probe: Folds,
        target: Target,
        site: Site,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.probe, ctx.target, ctx.site = probe, target, site
        return F.linear(x, probe.served(target, weight), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.probe.fold(ctx.target, ctx.site, x, output_grad)
        input_grad = output_grad @ ctx.probe.served(ctx.target, weight) if ctx.needs_input_grad[0] else None
        return input_grad, None, None, None, None, None, None


class MeasuredEmbedding(torch.autograd.Function):
    """`y = W[ids]`. Shapes: ids `[...]`, weight `[tokens, features]`, y `[..., features]`."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, anchor: Tensor, probe: Folds, target: Target, site: Site
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.probe, ctx.target, ctx.site = probe, target, site
        return F.embedding(ids, probe.served(target, weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_grad: Tensor) -> tuple[None, ...]:
        (ids,) = ctx.saved_tensors
        ctx.probe.fold(ctx.target, ctx.site, ids, output_grad)
        return None, None, None, None, None, None
