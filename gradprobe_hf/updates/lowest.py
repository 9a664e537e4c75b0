"""Lowest: the mask of the lowest scores of a part of a matrix, without ordering all of them."""

from __future__ import annotations

import torch
from torch import Tensor

SAMPLED = 61  # one value of so many; prime, so that the sample has all columns of a matrix
SMALLEST_SAMPLE = 1000  # of fewer values, ordering all takes no time


def lowest(scores: Tensor, budget: int) -> Tensor:
    """True for so many of the lowest, of equal ones for the first; of the shape of `scores`."""
    if budget == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    flat = scores.flatten()
    last = kth_smallest(flat, budget)
    mask = flat < last
    mask[(flat == last).nonzero().flatten()[: budget - int(mask.count_nonzero())]] = True
    return mask.view(scores.shape)


def kth_smallest(values: Tensor, k: int) -> Tensor:
    """The k-th smallest, from 1, of a vector.

    Of many values only those are ordered that lie between two quantiles of a sample, which nearly always hold it.
    """
    sample = values[::SAMPLED]
    if len(sample) < SMALLEST_SAMPLE:
        return values.kthvalue(k).values
    place, margin = k / len(values) * len(sample), 2 * len(sample) ** 0.5  # four standard deviations at least
    first, last = max(0, int(place - margin)), min(len(sample) - 1, int(place + margin))
    low, high = sample.sort().values[[first, last]]
    near = values[(values >= low) & (values <= high)]
    left = k - int((values < low).count_nonzero())
    return near.kthvalue(left).values if 0 < left <= len(near) else values.kthvalue(k).values
