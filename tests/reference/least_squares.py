"""One matrix whose outputs are to be kept, and its kept weights row by row, in float64."""

from __future__ import annotations

import torch


def problem(rows=5, columns=12, seed=0):
    """A weight, a Hessian of correlated inputs, and a mask of half of the weights."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * columns, columns, generator=generator, dtype=torch.float64)
    x[:, 1:] += x[:, :-1]  # there is something to make up for
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return weight, x.t() @ x, torch.rand(rows, columns, generator=generator) < 0.5


def error(weight, changed, hessian):
    return ((weight - changed) @ hessian @ (weight - changed).t()).trace().item()


def normal_equations(start, hessian, mask):
    """Row by row, on the inputs that are kept."""
    found = torch.zeros_like(start)
    for row, goes in enumerate(mask):
        kept = (~goes).nonzero().flatten()
        found[row, kept] = torch.linalg.solve(hessian[kept][:, kept], (start[row] @ hessian)[kept])
    return found
