"""Optimal Brain Surgeon on one matrix: its kept weights make up for those that go.

The error is that of the outputs on the calibration inputs, `sum_t ||W x_t - W' x_t||^2 = tr((W - W') H (W - W')^T)`,
with `H = sum_t x_t x_t^T`, `[in, in]`. Inputs are swept from the first to the last; the weights of each that go are set
to zero, and those behind take over, by the inverse of what is left of H:

    W[:, j:] -= (W[:, j] / U[j, j]) U[j, j:]      with U upper triangular, U^T U = H^-1

Source: Frantar and Alistarh, SparseGPT (arXiv:2301.00774), sections 3.2 to 3.4; the Cholesky form is GPTQ's
(arXiv:2210.17323, section 3.3).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradprobe_hf.updates.lowest import lowest
from gradprobe_hf.updates.problem import MatrixProblem, Solution

COLUMNS = 128  # swept before the columns behind are updated: one matrix product in place of many outer products
FACTORED = 4  # matrices as large as H: damped, its Cholesky factor, the inverse, and the factor of that
DAMPING = 0.01  # of the mean of H's diagonal, added to it: SparseGPT's default

# Which weights of the next columns go: called with their values now `[in, out]`, their diagonal of U `[in]`, and the
# first of them; returns bool `[in, out]`.
Choose = Callable[[Tensor, Tensor, int], Tensor]


def solve_obs(problem: MatrixProblem, mask: Tensor | None) -> Solution:
    """The sweep under a given mask."""
    assert mask is not None, "this update chooses none"
    return _swept(problem, fixed(mask), COLUMNS)


def solve_sparsegpt(problem: MatrixProblem, mask: Tensor | None) -> Solution:  # noqa: ARG001 - it chooses its own
    """The sweep that chooses the mask on the way: SparseGPT."""
    if problem.budget.group is not None:
        return _swept(problem, by_group_saliency(*problem.budget.group), problem.budget.group[1])
    return _swept(problem, by_saliency(problem.budget.sparsity), COLUMNS)


def _swept(problem: MatrixProblem, choose: Choose, columns_at_once: int) -> Solution:
    factor, damping = inverse_factor(problem.hessian, problem.damping)
    start = problem.weight
    if problem.drift is not None:
        # Towards the least-squares weights for the dense outputs, W + W D H^-1.
        start = start + problem.dense_target * (start @ problem.drift @ factor.t() @ factor)
    return Solution(*sweep(start, factor, choose, columns_at_once), damping)


def sweep(weight: Tensor, factor: Tensor, choose: Choose, columns_at_once: int = COLUMNS) -> tuple[Tensor, Tensor]:
    """The new weights `[out, in]`, zero where they go, and the mask of those.

    Args:
        weight: `[out, in]`.
        factor: U, `[in, in]`, of `inverse_factor`.
        choose: which weights go.
        columns_at_once: how many inputs are chosen for together: m for an n:m pattern.
    """
    step = max(1, COLUMNS // columns_at_once) * columns_at_once
    swept = weight.t().to(factor.dtype).contiguous().clone()  # [in, out]: an input's weights lie side by side
    mask = torch.zeros(swept.shape, dtype=torch.bool, device=swept.device)
    for start in range(0, len(swept), step):
        stop = min(start + step, len(swept))
        errors = torch.zeros_like(swept[start:stop])  # kept for the inputs behind, which take them in one product
        for column in range(start, stop):
            if (column - start) % columns_at_once == 0:
                some = slice(column, min(column + columns_at_once, stop))
                mask[some] = choose(swept[some], factor.diagonal()[some], column)
            error = (swept[column] / factor[column, column]).masked_fill_(~mask[column], 0)
            swept[column:stop].addr_(factor[column, column:stop], error, alpha=-1)
            errors[column - start] = error
        swept[stop:].addmm_(factor[start:stop, stop:].t(), errors, alpha=-1)
    mask = mask.t().contiguous()
    return swept.t().to(weight.dtype).masked_fill(mask, 0), mask  # rounding leaves w - (w / u) u beside zero


def inverse_factor(hessian: Tensor, damping: float = DAMPING) -> tuple[Tensor, float]:
    """U `[in, in]`, upper triangular, with `U^T U` the inverse of the damped H, and the damping that it took.

    An input that is always zero has a row of zeros in H: it makes up for nothing, and its weights cost next to nothing,
    as those of an input that is nearly always zero do. Damping is raised tenfold until the factorisation succeeds.

    Args:
        hessian: finite, the mean of its diagonal too.
        damping: fraction of the mean of its diagonal.
    """
    while True:
        lower, failed = torch.linalg.cholesky_ex(damped(hessian, damping))
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and torch.isfinite(upper).all():
                return upper, damping
        damping *= 10


def damped(hessian: Tensor, damping: float) -> Tensor:
    """H with `damping_of` added to its diagonal."""
    found = hessian.clone()
    found.diagonal().add_(damping_of(hessian, damping))
    return found


def damping_of(hessian: Tensor, fraction: float) -> Tensor:
    """A fraction of the mean of its diagonal; of one where nothing was seen, a fraction of one."""
    mean = hessian.diagonal().mean()
    return fraction * torch.where(mean > 0, mean, 1)


def fixed(mask: Tensor) -> Choose:
    """The weights of a mask `[out, in]` that is there already."""
    return lambda values, diagonal, start: mask[:, start : start + len(values)].t()  # noqa: ARG005


def by_saliency(sparsity: float) -> Choose:
    """SparseGPT's: of each 128 inputs the weights whose removal costs least, `W^2 / U_jj^2`; exactly the budget."""

    def choose(values: Tensor, diagonal: Tensor, start: int) -> Tensor:
        before = round(sparsity * start * values.shape[1])
        budget = round(sparsity * (start + len(values)) * values.shape[1]) - before
        return lowest(saliency(values, diagonal), budget)

    return choose


def by_group_saliency(n: int, m: int) -> Choose:
    """Of every m inputs the n whose removal would cost most stay; for `columns_at_once=m`."""

    def choose(values: Tensor, diagonal: Tensor, start: int) -> Tensor:  # noqa: ARG001
        order = saliency(values, diagonal).argsort(dim=0, stable=True)
        return torch.zeros_like(values, dtype=torch.bool).scatter_(0, order[: m - n], True)

    return choose


def saliency(values: Tensor, diagonal: Tensor) -> Tensor:
    """The error that removing each weight adds, after the ones behind have made up for it. `[in, out]`."""
    return (values / diagonal[:, None]).square()
