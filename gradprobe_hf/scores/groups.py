"""Masks within a row: the lowest keys of each row, and of every m consecutive inputs of an n:m pattern."""

from __future__ import annotations

import torch
from torch import Tensor


def row_mask(keys: Tensor, budget: int) -> Tensor:
    """The `budget` lowest keys of every row, ties in index order. Keys `[rows, columns]`.

    >>> row_mask(torch.tensor([[4, 1, 1, 1]]), budget=2)
    tensor([[False,  True,  True, False]])
    """
    if budget <= 0:
        return torch.zeros_like(keys, dtype=torch.bool)
    cut = keys.kthvalue(budget, dim=1, keepdim=True).values
    below, equal = keys < cut, keys == cut
    return below | (equal & (equal.cumsum(1) <= budget - below.sum(1, keepdim=True)))


def group_mask(keys: Tensor, n: int, m: int) -> Tensor:
    """Keep the n highest keys of every m consecutive inputs. Keys `[out, in]`, `in` divisible by m.

    >>> group_mask(torch.tensor([[4, 1, 3, 2]]), n=2, m=4)
    tensor([[False,  True, False,  True]])
    """
    # Millions of sorts of m keys are slow. A key's rank in its group is the number of keys that come before it: that
    # takes m (m - 1) / 2 comparisons of columns, vectorised over all groups. `<=` puts the earlier of equals first.
    columns = keys.reshape(-1, m).unbind(1)  # not a view: a Conv1D is transposed
    ranks = [torch.zeros_like(columns[0], dtype=torch.uint8) for _ in columns]
    for later in range(m):
        for earlier in range(later):
            before = columns[earlier] <= columns[later]
            ranks[later] += before
            ranks[earlier] += ~before
    return (torch.stack(ranks, dim=1) < m - n).view(keys.shape)
