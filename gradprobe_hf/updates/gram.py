"""The Gram matrix of a matrix's inputs: what a weight update multiplies with, `[in, in]`, again and again.

Of few tokens and many inputs it is diagonal but for a matrix whose rank is their number, `diag(d) + F F^T` with F
`[in, tokens]`. Products with F and its transpose then take `2 tokens / in` of the time of one with the whole, and the
inverse is of the same form (Woodbury):

    (diag(d) + F F^T)^-1 = diag(1/d) - B B^T    with B = diag(1/d) F C^-T,  C C^T = 1 + F^T diag(1/d) F

A wide layer calibrated on little text is such a case, and an expert that few tokens are sent to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gradprobe_hf.runtime.half_products import RoundedMatrix

WIDE = 1024  # inputs, from which on a product takes longer than to find its factor
FEW = 0.25  # tokens for each input: with more, two products with a factor save too little


class Factor(Protocol):
    """What others are multiplied with from the right."""

    def after(self, left: Tensor) -> Tensor:
        """`left @ self`, `[out, in]`."""


class Gram(Factor, Protocol):
    """A symmetric matrix, `[in, in]`, positive semidefinite."""

    def inverse(self, added: float) -> Gram:
        """That of it with `added` on the diagonal."""

    def rounded(self, scale: float) -> Factor:
        """It times `scale`, for corrections, which three digits are enough for. It may be used up for that."""

    def among(self, inputs: Tensor) -> Tensor:
        """Its rows and columns of some inputs, `[some, some]`."""


def gram_of(whole: Tensor, damping: Tensor, tokens: int | None) -> Gram:
    """A Gram matrix in the form in which products with it take the least time.

    Args:
        whole: `[in, in]`, with ones on its diagonal.
        damping: how much of these ones is no token's, `[in]`.
        tokens: of how many it is the sum; None: unknown.
    """
    # On a GPU the factor's columns, found one by one, may take as long as the products: nobody has measured it.
    if tokens is None or len(whole) < WIDE or tokens > FEW * len(whole) or whole.device.type != "cpu":
        return WholeGram(whole)
    return FactoredGram(damping, low_rank_factor(whole, whole.diagonal() - damping, tokens))


@dataclass(frozen=True)
class WholeGram:
    """One that is kept as it is."""

    matrix: Tensor

    def after(self, left: Tensor) -> Tensor:
        return left @ self.matrix

    def inverse(self, added: float) -> WholeGram:
        # In place: of wide inputs an `[in, in]` more would be the highest point of a whole run.
        found = self.matrix.clone()
        found.diagonal().add_(added)
        torch.linalg.cholesky(found, out=found)
        return WholeGram(torch.cholesky_inverse(found, out=found))

    def rounded(self, scale: float) -> RoundedMatrix:
        return RoundedMatrix(self.matrix.mul_(scale))

    def among(self, inputs: Tensor) -> Tensor:
        return self.matrix if len(inputs) == len(self.matrix) else self.matrix[inputs[:, None], inputs]


@dataclass(frozen=True)
class FactoredGram:
    """`diag(diagonal) + sign factor factor^T`, `[in]` and `[in, rank]`. Its products are exact, and no slower."""

    diagonal: Tensor
    factor: Tensor
    sign: int = 1

    def after(self, left: Tensor) -> Tensor:
        return (left * self.diagonal).addmm_(left @ self.factor, self.factor.t(), alpha=self.sign)

    def inverse(self, added: float) -> FactoredGram:
        assert self.sign > 0, "an inverse is not inverted again"
        inner = 1 / (self.diagonal + added)
        near = self.factor * inner.sqrt()[:, None]
        small = near.t() @ near
        small.diagonal().add_(1)
        lower = torch.linalg.cholesky(small)
        factor = torch.linalg.solve_triangular(lower.t(), self.factor * inner[:, None], upper=True, left=False)
        return FactoredGram(inner, factor, -1)

    def rounded(self, scale: float) -> FactoredGram:
        return FactoredGram(self.diagonal * scale, self.factor * scale**0.5, self.sign)

    def among(self, inputs: Tensor) -> Tensor:
        some = self.factor[inputs]
        return (some @ some.t()).mul_(self.sign) + torch.diag(self.diagonal[inputs])


def low_rank_factor(matrix: Tensor, diagonal: Tensor, rank: int) -> Tensor:
    """F, `[in, at most rank]`, with `F F^T` a positive semidefinite matrix of that rank: Cholesky's, by pivots.

    What is left behind the columns that are found is no more than rounding.

    Args:
        matrix: `[in, in]`; its own diagonal is not read.
        diagonal: that of it, `[in]`, about one at most.

    Source: Harbrecht, Peters and Schneider, On the low-rank approximation by the pivoted Cholesky decomposition (2012).
    """
    left, found = diagonal.clamp_min(0).clone(), matrix.new_zeros(rank, len(matrix))  # a column of F is a row here
    least = 10 * torch.finfo(matrix.dtype).eps
    for column in range(rank):
        pivot = int(left.argmax())
        height = float(left[pivot])
        if height <= least:
            return found[:column].t().contiguous()
        row = matrix[pivot] - found[:column, pivot] @ found[:column]
        row[pivot] = height  # what the diagonal says of it
        torch.mul(row, height**-0.5, out=found[column])
        left.sub_(found[column].square()).clamp_min_(0)
        left[pivot] = 0  # it is taken: rounding would have it come again
    return found.t().contiguous()
