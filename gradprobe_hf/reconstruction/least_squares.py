"""Least squares on one matrix: kept weights that make up for the others as well as they can, and which to keep.

The error of a matrix's outputs on the calibration inputs is `tr((V - S) H (V - S)^T)`, with its new weights V, the
weights S that it is to imitate, and `H = sum_t x_t x_t^T`, `[in, in]`. Everything here is in units in which H has ones
on its diagonal: a weight is then as large as its own share in the outputs.

Under a mask every row is a linear system, `V H = S H` on the inputs that it keeps. Conjugate gradients solve them for
all rows at once, by one product `[out, in] x [in, in]` a step. (The sweep of `obs.py` lets only the inputs behind make
up for one that goes.)

Which weights to keep is revised by the alternating direction method of multipliers: V near Z, Z the weights of V that
the budget allows, and U what has been between them:

    V = (S H + r (Z - U)) (H + r)^-1        Z = V + U, cut to the budget        U += V - Z

Sources: Boža (arXiv:2401.02938), who prunes so with these units; Meng et al., ALPS (arXiv:2406.07831), who let
conjugate gradients follow. That rows of a matrix compete, by their Fisher information, is ours.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradprobe_hf.model.parameters import row_chunks
from gradprobe_hf.reconstruction.sweep import DAMPING, damped, lowest

STEPS = 20  # of conjugate gradients
ROUNDS = 20  # of the alternating directions
PENALTY = 0.7  # r, where the mean eigenvalue of H is one; one that grows does no better (docs/method.md)
IMPORTANCE_POWER = 0.25  # of a row's Fisher information; 0.5 would be its share in the loss: see docs/method.md

# Which weights go: called with their values now, `[out, in]`, returns bool `[out, in]`.
Projection = Callable[[Tensor], Tensor]


class LeastSquares:
    """The problem of one matrix.

    Args:
        weight: `[out, in]`, float32 or float64.
        hessian: H, `[in, in]`, of the same dtype.
        drift: `D = sum_t (x'_t - x_t) x_t^T`, `[in, in]`, to the inputs x' of the dense model.
        share: how far S is towards the least-squares weights for the dense outputs, `W + W D H^-1`.
        damping: fraction of the mean of H's diagonal, added to it.
    """

    def __init__(
        self, weight: Tensor, hessian: Tensor, drift: Tensor | None = None, share: float = 0.0, damping: float = DAMPING
    ) -> None:
        whole = damped(hessian, damping)
        wanted = weight @ whole if drift is None else weight @ (whole + share * drift)
        self._unit = whole.diagonal().sqrt()
        self._gram = whole.div_(self._unit[:, None]).div_(self._unit)
        self._wanted = wanted.div_(self._unit)  # S H
        self._weight = weight * self._unit

    def solved(self, mask: Tensor) -> Tensor:
        """The best weights `[out, in]` that are zero where the mask is."""
        found = torch.empty_like(self._weight)
        for rows in row_chunks(mask.shape):
            found[rows] = self._solved(rows, mask[rows])
        return found

    def _solved(self, rows: slice, mask: Tensor) -> Tensor:
        values = self._weight[rows].masked_fill(mask, 0)
        residual = (self._wanted[rows] - values @ self._gram).masked_fill_(mask, 0)
        direction, tiny = residual.clone(), torch.finfo(values.dtype).tiny
        left = residual.square().sum(1, keepdim=True)
        for _ in range(STEPS):
            image = (direction @ self._gram).masked_fill_(mask, 0)
            length = left / (direction * image).sum(1, keepdim=True).clamp_min(tiny)
            values.addcmul_(length, direction)
            residual.addcmul_(length, image, value=-1)
            before, left = left, residual.square().sum(1, keepdim=True)
            direction.mul_(left / before.clamp_min(tiny)).add_(residual)
        return values.div_(self._unit)

    def revised(self, mask: Tensor, cut: Projection) -> Tensor:
        """A mask `[out, in]` under which, as a rule, less error is left.

        Args:
            mask: where to begin.
            cut: what goes, so that the budget is kept.
        """
        near = self._gram + PENALTY * torch.eye(len(self._gram), dtype=self._gram.dtype, device=self._gram.device)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(near))
        del near
        kept, between = self._weight.masked_fill(mask, 0), torch.zeros_like(self._weight)
        for _ in range(ROUNDS):
            between += kept.sub_(between).mul_(PENALTY).add_(self._wanted) @ inverse
            mask = cut(between)
            kept = between.masked_fill(mask, 0)
            between -= kept
        return mask


def in_groups(n: int, m: int) -> Projection:
    """Of every m inputs the n largest stay."""

    def cut(values: Tensor) -> Tensor:
        sizes = values.abs().unflatten(1, (-1, m))
        order = sizes.argsort(dim=2, stable=True)[..., : m - n]
        return torch.zeros_like(sizes, dtype=torch.bool).scatter_(2, order, True).flatten(1)

    return cut


def in_rows(mask: Tensor) -> Projection:
    """Each row loses as many as in this mask, its smallest."""
    counts = mask.sum(1, keepdim=True)

    def cut(values: Tensor) -> Tensor:
        order = values.abs().argsort(dim=1, stable=True)
        goes = torch.arange(values.shape[1], device=values.device) < counts
        return torch.empty_like(mask).scatter_(1, order, goes)

    return cut


def in_matrix(mask: Tensor, fisher: Tensor | None = None) -> Projection:
    """The matrix loses as many as in this mask, those that are least.

    Args:
        fisher: mean Fisher information of the weights of each row, `[out]`; rows count alike without it.
    """
    budget = int(mask.sum())
    importance = None if fisher is None else fisher.clamp_min(torch.finfo(fisher.dtype).tiny) ** IMPORTANCE_POWER

    def cut(values: Tensor) -> Tensor:
        sizes = values.abs()
        if importance is not None:
            sizes *= importance[:, None]
        return lowest(sizes, budget)

    return cut
