"""Masks inside a row: the lowest keys of each row, and of every m consecutive inputs of an n:m pattern."""

from __future__ import annotations

import torch
from torch import Tensor


def row_mask(keys: Tensor, budget: int) -> Tensor:
    """The `budget` lowest keys of every row. Keys `[rows, columns]`."""
    if budget <= 0:
        return torch.zeros_like(keys, dtype=torch.bool)
    cut = keys.kthvalue(budget, dim=1, keepdim=True).values
    below, equal = keys < cut, keys == cut
    return below | (equal & (equal.cumsum(1) <= budget - below.sum(1, keepdim=True)))


def group_mask(keys: Tensor, n: int, m: int) -> Tensor:
    """Keep the n highest keys of every m consecutive inputs. Keys `[out, in]`, `in` divisible by m.

    A key's rank in its group is how many of the others come before it: m (m - 1) / 2 comparisons of whole columns, in
    place of very many very small sorts.
    """
    columns = keys.view(-1, m).unbind(1)
    ranks = [torch.zeros_like(columns[0], dtype=torch.uint8) for _ in columns]
    for later in range(m):
        for earlier in range(later):
            before = columns[earlier] <= columns[later]
            ranks[later] += before
            ranks[earlier] += ~before
    return (torch.stack(ranks, dim=1) < m - n).view(keys.shape)
