"""The cut: the key below which an exact budget lies, without sorting or concatenating.

The exact k-th smallest of any number of keys is found with two histograms, of their high and then of their low 16 bits
(a radix select). Keys are streamed once for each; only histograms cross processes. Ties at the cut go in index order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.selection.keys import LAST

_LOW_BITS = 16
_HIGH_BINS = (LAST >> _LOW_BITS) + 1
_LOW_BINS = 1 << _LOW_BITS


@dataclass(frozen=True)
class Cut:
    """Where a budget ends: every key below `key` goes, and the first `ties` keys equal to it."""

    key: int
    ties: int


class Below:
    """The mask of the keys below a cut, for the consecutive chunks of one stream: ties are taken in index order."""

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
        processes: others that stream other keys towards the same budget.

    >>> find_cut(lambda: [torch.tensor([5, 3, 3, 9], dtype=torch.int32)], budget=2)
    Cut(key=3, ties=2)
    """
    if budget <= 0:
        return Cut(key=0, ties=0)
    together = processes or Processes()
    # Histograms are small, and matrices may live on several devices: they are summed on the CPU.
    counts = torch.zeros(_HIGH_BINS, dtype=torch.int64)
    for keys in stream():
        counts += torch.bincount(keys.flatten() >> _LOW_BITS, minlength=_HIGH_BINS).cpu()
    high, left = _bin_of(together.sum_(counts), budget)
    counts = torch.zeros(_LOW_BINS, dtype=torch.int64)
    for keys in stream():
        inside = keys[keys >> _LOW_BITS == high] & (_LOW_BINS - 1)
        counts += torch.bincount(inside, minlength=_LOW_BINS).cpu()
    low, ties = _bin_of(together.sum_(counts), left)
    return Cut(key=(high << _LOW_BITS) + low, ties=ties)


def _bin_of(counts: Tensor, rank: int) -> tuple[int, int]:
    """The bin that holds the key of this rank (from 1), and its rank inside the bin."""
    cumulative = counts.cumsum(0)
    chosen = int(torch.searchsorted(cumulative, rank))
    return chosen, rank - (int(cumulative[chosen - 1]) if chosen else 0)
