"""ADMM on one matrix: which of its weights go is revised, so that the others can keep its outputs best.

By the alternating direction method of multipliers, with V near Z, Z the weights of V that the budget allows, and U what
has been between them (units and names as in `least_squares.py`):

    V = (S H + r (Z - U)) (H + r)^-1        Z = V + U, projected on the budget        U += V - Z

What a round changes is small, and the product with it may be rounded: V is the first, `(S H + r Z) (H + r)^-1`, and
what `Z - U` has changed by since, which is `2 Z - Z_before - V`, adds to it `r (2 Z - Z_before - V) (H + r)^-1`. No
eigenvalue of H + r is less than r, whatever H is, so that what is rounded stays what it was but for three digits.

Least squares under the mask of Z follow. Sources: Boža (arXiv:2401.02938), who prunes in these units; Meng et al., ALPS
(arXiv:2406.07831). That rows of a matrix compete by their Fisher information is ours.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradprobe_hf.scores.budget import Budget
from gradprobe_hf.scores.groups import group_mask
from gradprobe_hf.updates.least_squares import LeastSquares, kept_of
from gradprobe_hf.updates.lowest import lowest
from gradprobe_hf.updates.problem import MatrixProblem, Solution

ROUNDS = 20  # of the alternating directions
STEPS = 10  # of conjugate gradients, from Z: they end nearer to the best weights than 20 from the dense ones
PENALTY = 0.7  # r, where the mean eigenvalue of H is one; one that grows does no better (docs/method.md)
IMPORTANCE_POWER = 0.25  # of a row's Fisher information; 0.5 would be its share in the loss: see docs/method.md

# Which weights go: called with their values now, `[out, in]`; returns bool `[out, in]`.
Projection = Callable[[Tensor], Tensor]


def solve_admm(problem: MatrixProblem, mask: Tensor | None) -> Solution:
    """The mask revised within its budget, and the best weights under it."""
    assert mask is not None, "it is revised, not chosen"
    system = LeastSquares.of(problem)
    revised, near = revise(system, mask, projection_on(problem.budget, mask, problem.row_fisher))
    return Solution(system.solved(revised, near, STEPS), revised, problem.damping)


def revise(system: LeastSquares, mask: Tensor, project: Projection) -> tuple[Tensor, Tensor]:
    """A mask `[out, in]` under which, as a rule, less error is left; and Z, near the best weights under it.

    Args:
        mask: where to begin.
        project: what goes, so that the budget is met.
    """
    inverse, dtype = system.gram.inverse(PENALTY), system.weight.dtype
    kept = system.weight * kept_of(mask, dtype)
    values = inverse.after((kept * PENALTY).add_(system.wanted))  # V
    response = inverse.rounded(PENALTY)
    del inverse
    between = values.clone()  # V + U: U begins at zero
    for _ in range(ROUNDS - 1):
        before, kept = kept, between * kept_of(project(between), dtype)
        values += response.after(before.neg_().add_(kept, alpha=2).sub_(values))
        between -= kept
        between += values
    mask = project(between)
    return mask, between.mul_(kept_of(mask, dtype))


def projection_on(budget: Budget, mask: Tensor, row_fisher: Tensor | None) -> Projection:
    """What keeps the budget of a mask: of its groups, of its rows, or of the whole matrix."""
    if budget.group is not None:
        return in_groups(*budget.group)
    return in_rows(mask) if budget.scope == "row" else in_matrix(mask, row_fisher)


def in_groups(n: int, m: int) -> Projection:
    """Of every m inputs the n largest stay."""
    return lambda values: group_mask(values.abs(), n, m)


def in_rows(mask: Tensor) -> Projection:
    """Each row loses as many as in this mask, its smallest."""
    counts = mask.sum(1, keepdim=True)

    def project(values: Tensor) -> Tensor:
        order = values.abs().argsort(dim=1, stable=True)  # of equal ones the first goes, on every device
        goes = torch.arange(values.shape[1], device=values.device) < counts
        return torch.empty_like(mask).scatter_(1, order, goes)

    return project


def in_matrix(mask: Tensor, fisher: Tensor | None = None) -> Projection:
    """The matrix loses as many as in this mask, those that are least.

    Args:
        fisher: mean Fisher information of the weights of each row, `[out]`; rows count alike without it.
    """
    budget = int(mask.sum())
    # A row that no gradient reached keeps its order: times an exact zero all of its weights would be equal.
    importance = None if fisher is None else fisher.clamp_min(torch.finfo(fisher.dtype).tiny) ** IMPORTANCE_POWER

    def project(values: Tensor) -> Tensor:
        sizes = values.abs()
        if importance is not None:
            sizes *= importance[:, None]
        return lowest(sizes, budget)

    return project
