"""The cut: the key below which exactly a budget of keys lies, found without sorting or concatenating them.

A radix select in two digits: a histogram of the high 16 bits of all keys tells which bin the k-th smallest key is in,
and a histogram of the low 16 bits of the keys in that bin tells which key it is. Keys are streamed once for each, so
they never have to be in memory together, and only the two histograms cross processes. Keys equal to the cut are taken
in index order, which makes the budget exact and the choice the same on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.selection.keys import LAST

_LOW_BITS = 16
_HIGH_BINS = (LAST >> _LOW_BITS) + 1  # half of 2^16: no key is far above LAST
_LOW_BINS = 1 << _LOW_BITS


@dataclass(frozen=True)
class Cut:
    """Where a budget ends: every key below `key` is pruned, and the first `ties` keys equal to it."""

    key: int
    ties: int


class Below:
    """Masks of the keys below a cut, called with the consecutive chunks of one stream.

    >>> below = Below(Cut(key=3, ties=1))
    >>> below(torch.tensor([[5, 3, 2]])), below(torch.tensor([[3, 1, 9]]))
    (tensor([[False,  True,  True]]), tensor([[False,  True, False]]))
    """

    def __init__(self, cut: Cut) -> None:
        self.cut, self.ties_left = cut, cut.ties

    def __call__(self, keys: Tensor) -> Tensor:
        mask = keys < self.cut.key
        if self.ties_left:
            equal = (keys == self.cut.key).flatten().nonzero().flatten()[: self.ties_left]
            mask.view(-1)[equal] = True
            self.ties_left -= len(equal)
        return mask


def find_cut(stream: Callable[[], Iterable[Tensor]], budget: int, processes: Processes | None = None) -> Cut:
    """The exact cut below which `budget` keys lie, in two passes over the stream.

    Args:
        stream: called twice; each call yields all keys, int32 of any shape.
        budget: the number of keys to prune.
        processes: others that stream other keys towards the same budget. Two collectives.

    >>> find_cut(lambda: [torch.tensor([5, 3, 3, 9], dtype=torch.int32)], budget=2)
    Cut(key=3, ties=2)
    """
    if budget <= 0:
        return Cut(key=0, ties=0)
    together = processes or Processes()
    # Summed on the CPU: matrices may live on several devices, and histograms are small.
    counts = torch.zeros(_HIGH_BINS, dtype=torch.int64)
    for keys in stream():
        counts += torch.bincount(keys.flatten() >> _LOW_BITS, minlength=_HIGH_BINS).cpu()
    high, rank = _bin_of(together.sum_(counts), budget)  # the same in all processes, so no key has to be sent
    counts = torch.zeros(_LOW_BINS, dtype=torch.int64)
    for keys in stream():
        inside = keys[keys >> _LOW_BITS == high] & (_LOW_BINS - 1)
        counts += torch.bincount(inside, minlength=_LOW_BINS).cpu()
    low, ties = _bin_of(together.sum_(counts), rank)
    return Cut(key=(high << _LOW_BITS) + low, ties=ties)


def _bin_of(counts: Tensor, rank: int) -> tuple[int, int]:
    """The bin that holds the key of this rank (from 1), and its rank inside the bin."""
    cumulative = counts.cumsum(0)
    chosen = int(torch.searchsorted(cumulative, rank))
    return chosen, rank - (int(cumulative[chosen - 1]) if chosen else 0)
