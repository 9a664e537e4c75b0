"""Least squares on one matrix: kept weights that make up for the pruned ones as well as they can.

The error of a matrix's outputs on the calibration inputs is `tr((V - S) H (V - S)^T)`, with its new weights V, the
weights S to imitate, and `H = sum_t x_t x_t^T`, `[in, in]`. Everything here is in units in which H has ones on its
diagonal: a weight is then as large as its own share in the outputs.

Under a mask every row is a linear system, `V H = S H` on the inputs that it keeps. Where all rows keep the same inputs
(whole structures go, or nothing does) it is one system with many right sides, which a Cholesky factor solves. Elsewhere
conjugate gradients solve all rows at once, with one product `[out, in] x [in, in]` a step, or two with its factor
(`gram.py`). (The sweep of `sweep.py` lets only the inputs behind a pruned one make up for it.)

Source: Meng et al., ALPS (arXiv:2406.07831), for conjugate gradients under a fixed mask.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gradprobe_hf.runtime.row_chunks import FOLDED_ELEMENTS, row_chunks
from gradprobe_hf.updates.gram import gram_of
from gradprobe_hf.updates.problem import MatrixProblem, Solution
from gradprobe_hf.updates.sweep import DAMPING, damped

STEPS = 20  # of conjugate gradients
DAMPINGS = (0.01, 0.03, 0.1, 0.3, 1.0)  # that are tried where rows are held out


class LeastSquares:
    """The problem of one matrix.

    Args:
        weight: `[out, in]`, float32 or float64.
        hessian: H, `[in, in]`, of the same dtype.
        drift: `D = sum_t (x'_t - x_t) x_t^T`, `[in, in]`, to the inputs x' of the dense model.
        share: how far S is towards the least-squares weights for the dense outputs, `W + W D H^-1`.
        damping: fraction of the mean of H's diagonal, added to it.
        tokens: of how many H is the sum; None: unknown.
    """

    def __init__(
        self,
        weight: Tensor,
        hessian: Tensor,
        drift: Tensor | None = None,
        share: float = 0.0,
        damping: float = DAMPING,
        tokens: int | None = None,
    ) -> None:
        whole = damped(hessian, damping)
        # S H = (W + share W D H^-1) H: the inverse cancels.
        wanted = weight @ whole if drift is None else weight @ whole.add(drift, alpha=share)
        self.unit = whole.diagonal().sqrt()
        added = (whole.diagonal() - hessian.diagonal()).div_(whole.diagonal())
        self.gram = gram_of(whole.div_(self.unit[:, None]).div_(self.unit), added, tokens)
        self.wanted = wanted.div_(self.unit)  # S H
        self.weight = weight * self.unit

    @classmethod
    def of(cls, problem: MatrixProblem) -> LeastSquares:
        share, damping, tokens = problem.dense_target, problem.damping, problem.tokens
        return cls(problem.weight, problem.hessian, problem.drift, share, damping, tokens)

    def solved(self, mask: Tensor, start: Tensor | None = None, steps: int = STEPS) -> Tensor:
        """The best weights `[out, in]` that are zero where the mask is.

        Args:
            start: weights near them, in the units of this class; None: those of the matrix.
            steps: of conjugate gradients, where it takes them.
        """
        together = self._solved_together(mask) if start is None else None
        if together is not None:
            return together.masked_fill_(mask, 0)
        begin, found = self.weight if start is None else start, torch.empty_like(self.weight)
        for rows in row_chunks(mask.shape, FOLDED_ELEMENTS):
            found[rows] = self._solved(rows, kept_of(mask[rows], found.dtype), begin[rows], steps)
        return found.masked_fill_(mask, 0)  # products leave negative zeros

    def _solved_together(self, mask: Tensor) -> Tensor | None:
        """The best weights where all rows that keep anything keep the same inputs; None elsewhere.

        None, too, where H is not positive definite as far as its dtype can tell: conjugate gradients do not mind.
        """
        kept = ~mask[~mask.all(1)]
        if not len(kept) or (kept != kept[0]).any():
            return None
        inputs = kept[0].nonzero().squeeze(1)
        factor, failed = torch.linalg.cholesky_ex(self.gram.among(inputs))
        if failed:
            return None
        values = torch.zeros_like(self.weight)
        values[:, inputs] = torch.cholesky_solve(self.wanted[:, inputs].t(), factor).t()
        return values.div_(self.unit)

    def _solved(self, rows: slice, kept: Tensor, start: Tensor, steps: int) -> Tensor:
        # Rows keep unlike inputs. With what goes held at zero, one product with the whole H serves all their systems.
        # Exactly, unlike ADMM's: inputs that have nearly all in common make H singular to the digits of bfloat16.
        values = start * kept
        residual = (self.wanted[rows] - self.gram.after(values)).mul_(kept)
        direction, digits = residual.clone(), torch.finfo(values.dtype)
        least = digits.eps * len(self.unit)  # curvature, below which it may be rounding alone, and of either sign
        left = residual.square().sum(1, keepdim=True)
        for _ in range(steps):
            image = self.gram.after(direction).mul_(kept)
            curved = (direction * image).sum(1, keepdim=True)
            is_known = curved > least * direction.square().sum(1, keepdim=True)  # not so in a row that is done
            length = torch.where(is_known, left / curved, 0)
            values.addcmul_(length, direction)
            residual.addcmul_(length, image, value=-1)
            before, left = left, residual.square().sum(1, keepdim=True)
            direction.mul_(left / before.clamp_min(digits.tiny)).add_(residual)
        return values.div_(self.unit)


def kept_of(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """1 where a weight stays, 0 where it goes: on a CPU a product takes a tenth of the time of `masked_fill`."""
    return (~mask).to(dtype)


def solve_least_squares(problem: MatrixProblem, mask: Tensor | None) -> Solution:
    """The best weights under a given mask."""
    assert mask is not None, "this update chooses none"
    if problem.held_out is not None:
        problem = replace(problem, damping=held_out_damping(problem, mask), held_out=None)
    return Solution(LeastSquares.of(problem).solved(mask, steps=STEPS), mask, problem.damping)


def held_out_damping(problem: MatrixProblem, mask: Tensor) -> float:
    """The damping with which the best weights for the other rows serve those best that are held out.

    Little text and many inputs: the weights then fit what they have seen, and damping keeps them near what they were.
    """
    assert problem.held_out is not None, "something is held out"
    held, its_drift, held_tokens = problem.held_out
    if not held.diagonal().any():  # an expert that is sent none of these rows
        return problem.damping
    drift = None if problem.drift is None or its_drift is None else problem.drift - its_drift
    tokens = None if problem.tokens is None else problem.tokens - held_tokens
    rest = replace(problem, hessian=problem.hessian - held, drift=drift, held_out=None, tokens=tokens)
    goal = held if its_drift is None else held + problem.dense_target * its_drift
    wanted = problem.weight @ goal  # outputs to keep, times inputs

    def error(damping: float) -> float:
        """The squared error of the outputs that are held out, less what is the same for all."""
        found = LeastSquares.of(replace(rest, damping=damping)).solved(mask)
        # tr(V H V^T) - 2 tr(S H V^T): without tr(S H S^T), for which S itself would be needed.
        return float(((found @ held - 2 * wanted) * found).sum())

    return min(DAMPINGS, key=error)
