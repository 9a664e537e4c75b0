"""Measured maps: linear maps and embeddings that fold their statistics while they are differentiated.

Each is an autograd Function. Forward multiplies with the served weight; backward has the input and the output gradient
at hand and folds them on the spot. What lives how long:

- The weight takes no gradient, so that no `[out, in]` gradient outlives the backward of its own matrix.
- x and the weight go through `save_for_backward`, not onto `ctx`: only so can checkpointing drop them after forward and
  hand out recomputed ones.
- The served weight is made again in backward. Keeping it would be a second copy of the model.
- An offloaded weight that is not recomputed is not saved either, but fetched again: otherwise every weight of the model
  would be in memory at the end of forward.

With all parameters frozen nothing requires a gradient, and autograd would record no graph. `anchor`, a scalar that does
require one, starts the graph at the first measured map.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gradprobe_hf.model.sites import Site
from gradprobe_hf.model.targets import Target
from gradprobe_hf.probe.maps.folding import Folding
from gradprobe_hf.probe.maps.serving import ServedWeights
from gradprobe_hf.scores.terms import GATES


@dataclass(frozen=True)
class MeasuredUse:
    """One use of a matrix in a forward pass.

    Attributes:
        served: what the map multiplies with.
        folding: where it folds what it measures; None: it only serves.
        fetch: reads the weight again in backward; None: it is saved in forward.
    """

    target: Target
    site: Site
    served: ServedWeights
    folding: Folding | None = None
    fetch: Callable[[], Tensor] | None = None

    def fold(self, x: Tensor, output_grad: Tensor) -> None:
        if self.folding is not None:
            self.folding.fold(self.target, self.site, x, output_grad)

    @property
    def has_gates(self) -> bool:
        """Whether gates of its inputs are measured."""
        return self.folding is not None and GATES in self.folding.statistics[self.target.name].terms

    def fold_gates(self, x: Tensor, input_grad: Tensor, bias: Tensor | None, output_grad: Tensor) -> None:
        if self.folding is not None and self.has_gates:
            self.folding.fold_gates(self.target, x, input_grad, bias, output_grad)


class MeasuredLinear(torch.autograd.Function):
    """`y = x W^T + b`. Shapes: x `[..., in]`, weight `[out, in]`, y `[..., out]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, anchor: Tensor, use: MeasuredUse) -> Tensor:
        ctx.save_for_backward(x, *([weight] if use.fetch is None else []))
        ctx.use, ctx.fetch, ctx.bias = use, use.fetch, bias if use.has_gates else None
        return _own(F.linear(x, use.served.of(use.target, weight), bias))

    # Folding is not differentiable, and `once_differentiable` runs backward without recording a graph of its own.
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Tensor | None, ...]:
        # Under checkpointing the first access recomputes the whole block, and a second access would raise.
        x, *saved = ctx.saved_tensors
        ctx.use.fold(x, output_grad)
        input_grad = None
        # No gradient is needed at the first map of the model, whose input is data; its gates have one all the same.
        if ctx.needs_input_grad[0] or ctx.use.has_gates:
            weight = ctx.fetch() if ctx.fetch else saved[0]
            input_grad = output_grad @ ctx.use.served.of(ctx.use.target, weight)
            ctx.use.fold_gates(x, input_grad, ctx.bias, output_grad)
        return input_grad, None, None, None, None


class MeasuredEmbedding(torch.autograd.Function):
    """`y = W[ids]`. Shapes: ids `[...]`, weight `[tokens, features]`, y `[..., features]`."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, anchor: Tensor, use: MeasuredUse) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.use = use
        return _own(F.embedding(ids, use.served.of(use.target, weight)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_grad: Tensor) -> tuple[None, ...]:
        (ids,) = ctx.saved_tensors
        ctx.use.fold(ids, output_grad)
        return None, None, None, None


def _own(output: Tensor) -> Tensor:
    """The same values, as no view of what the product was computed in.

    autograd lets nobody write into a view that a Function returns, and some models do: DeBERTa adds biases to what the
    map of its queries returns, Longformer scales it.
    """
    return output.data if output._is_view() else output
