"""Optimal Brain Surgeon on whole units: which columns of a matrix its others can make up for best.

With W `[out, in]`, `H = sum_t x_t x_t^T` of its inputs, and U the columns of one unit, the least squared error of the
outputs without them, the other columns changed to make up for it, is

    s_U = tr(W_U [(H^-1)_UU]^-1 W_U^T)        and for a single column  ||w_c||^2 / (H^-1)_cc

Removing units changes this of the others: H^-1 loses what they explained, and W is what makes up for them. So they go
in a few portions, each followed by that update (the block form of Gaussian elimination).

An error of the outputs matters as much as the loss depends on it. So s_U may be weighted by a unit's own share in that,
which its gate tells: `sqrt(g_U / sum_t ||W_U x_t,U||^2)`, with g_U the Fisher information of a factor on the unit. With
the power 1 and without the update this would be the Fisher information of what the others cannot make up for.

Where lambda was added to the diagonal of H, s_U has `lambda ||W_U||^2` beside the error: what it costs to change W_U
itself. Where two inputs are a thousand times as large as the others they make the mean of the diagonal, of which lambda
is a share, and then this is several times the whole outputs of most units. Before an error is weighted it is taken off.

Source: Hassibi and Stork 1993; for units LeCun et al. 1990 and Kurtic et al. 2023, ZipLM (arXiv:2302.04089).
"""

from __future__ import annotations

import torch
from torch import Tensor

PORTIONS = 16  # in which units go; each costs products of `[in, in]`


def least_missed(
    weight: Tensor,
    inverse: Tensor,
    units: int,
    going: int,
    factors: Tensor | None = None,
    damping: Tensor | float = 0.0,
) -> Tensor:
    """Which units go, bool `[units]`.

    Args:
        weight: W, `[out, in]`.
        inverse: `H^-1`, `[in, in]`, of the same dtype.
        units: each of `in / units` consecutive columns.
        going: how many go.
        factors: what an error of each unit counts, `[units]`; None: all the same.
        damping: what was added to the diagonal of H and is to be taken off the errors.

    >>> least_missed(torch.tensor([[3.0, 1.0, 2.0]]), torch.eye(3), 3, 1)
    tensor([False,  True, False])
    """
    weight, inverse, width = weight.clone(), inverse.clone(), weight.shape[1] // units
    gone = torch.zeros(units, dtype=torch.bool, device=weight.device)
    while left := going - int(gone.sum()):
        portion = min(left, max(1, -(-going // PORTIONS)))
        errors = unit_errors(weight, inverse, units, damping)
        scores = (errors if factors is None else errors * factors).masked_fill_(gone, torch.inf)
        now = torch.zeros_like(gone).index_fill_(0, scores.argsort(stable=True)[:portion], True)
        gone |= now
        if portion < left:
            _eliminate(weight, inverse, now.repeat_interleave(width), gone.repeat_interleave(width))
    return gone.cpu()


def unit_errors(weight: Tensor, inverse: Tensor, units: int, damping: Tensor | float = 0.0) -> Tensor:
    """`s_U - damping ||W_U||^2` of each unit, `[units]`; of those that are eliminated any number."""
    width = weight.shape[1] // units
    sizes = weight.square().sum(0).unflatten(0, (units, width)).sum(1)
    # What is left is no less than 0 but for rounding.
    return (_damped_errors(weight, inverse, units) - damping * sizes).clamp_(min=0)


def _damped_errors(weight: Tensor, inverse: Tensor, units: int) -> Tensor:
    width = weight.shape[1] // units
    if width == 1:
        return weight.square().sum(0) / inverse.diagonal()
    squares = inverse.unflatten(0, (units, width)).unflatten(2, (units, width))
    own = torch.stack([squares[unit, :, unit] for unit in range(units)])  # (H^-1)_UU, [units, width, width]
    columns = weight.unflatten(1, (units, width)).movedim(1, 0)  # W_U, [units, out, width]
    return (torch.linalg.solve(own, columns.mT) * columns.mT).sum((1, 2))


def outputs_squared(weight: Tensor, hessian: Tensor, units: int) -> Tensor:
    """`sum_t ||W_U x_t,U||^2 = tr(W_U H_UU W_U^T)` of each unit, `[units]`."""
    width = weight.shape[1] // units
    if width == 1:
        return weight.square().sum(0) * hessian.diagonal()
    parts = [slice(unit * width, (unit + 1) * width) for unit in range(units)]
    return torch.stack([((weight[:, own] @ hessian[own, own]) * weight[:, own]).sum() for own in parts])


def made_up_for(weight: Tensor, inverse: Tensor, gone: Tensor) -> Tensor:
    """`W - W_S (H^-1_SS)^-1 H^-1_S`: the weights that make up for columns S best, which are zero.

    Args:
        gone: S, bool `[in]`.
    """
    across = inverse[gone]
    return (weight - weight[:, gone] @ torch.linalg.solve(across[:, gone], across)).masked_fill_(gone, 0)


def _eliminate(weight: Tensor, inverse: Tensor, columns: Tensor, gone: Tensor) -> None:
    """Remove columns, in place: `W -= W_S (H^-1_SS)^-1 H^-1_S`, `H^-1 -= H^-1_S^T (H^-1_SS)^-1 H^-1_S`.

    Args:
        gone: all that were removed so far; the identity stands in their place, so that there is something to invert.
    """
    across = inverse[columns]
    share = torch.linalg.solve(across[:, columns], across)
    weight -= weight[:, columns] @ share
    inverse -= across.t() @ share
    weight[:, gone] = 0
    inverse[gone] = 0
    inverse[:, gone] = 0
    inverse.diagonal()[gone] = 1
