"""Maps that measure themselves while they are differentiated.

Each is an autograd Function: forward serves the weight (shrunk, if the probe says so), backward has the input and the
output's gradient in its hands and folds the statistics on the spot. The weight takes no gradient, so none outlives its
matrix; input and weight are saved through autograd, so that checkpointing can free and recompute them. A weight that is
offloaded and not recomputed is not saved at all but fetched again: saving it would bring the model into memory. The
served weight is made again in backward, never kept: keeping it would be a second copy of the model.

`anchor` is a scalar that requires a gradient: it starts the graph at the first target, although every weight is frozen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gradprobe_hf.model.targets import Site, Target


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
        fetch: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        ctx.save_for_backward(x, *([weight] if fetch is None else []))
        ctx.probe, ctx.target, ctx.site, ctx.fetch = probe, target, site, fetch
        return F.linear(x, probe.served(target, weight), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *saved = ctx.saved_tensors  # unpacked once: checkpointing computes a block again to answer
        ctx.probe.fold(ctx.target, ctx.site, x, output_grad)
        input_grad = None
        if ctx.needs_input_grad[0]:
            weight = ctx.fetch() if ctx.fetch else saved[0]
            input_grad = output_grad @ ctx.probe.served(ctx.target, weight)
        return input_grad, *(None,) * 7


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
