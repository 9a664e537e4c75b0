"""Bounds: the least and the most that may be pruned of each matrix, where one budget is spent over several."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

from torch import Tensor

from gradprobe_hf.model.targets import Target
from gradprobe_hf.selection.cut import Below, Cut, find_cut
from gradprobe_hf.selection.keys import LAST, Keys

KEPT = LAST + 2  # behind an infinite score, which is at `LAST + 1` here


def bounded(keys: Keys, bounds: tuple[float, float], unit: Sequence[Target], budget: int) -> Keys:
    """Keys under which any cut of the unit respects the bounds.

    In each matrix the lowest keys, as many as the lower bound asks for, become 0 and are pruned first; the highest,
    which the upper bound keeps, become `KEPT` and are pruned last. Those between keep their order across matrices.

    Args:
        bounds: the least and the most to prune of each matrix, as fractions of it.
        budget: how many weights of the unit are pruned.
    """
    cuts: dict[str, tuple[Cut, Cut]] = {}
    least_share, most_share = (Fraction(str(float(bound))) for bound in bounds)  # 0.07 of 100 weights are 7
    # Bounds are rounded to whole weights, inwards. Over many small matrices rounded lower bounds may add up to more
    # than the budget, or upper ones to less; then that side is rounded outwards, and the budget can be met exactly.
    rounds_down = sum(math.ceil(least_share * target.numel) for target in unit) > budget
    rounds_up = sum(math.floor(most_share * target.numel) for target in unit) < budget

    def cuts_of(target: Target) -> tuple[Cut, Cut]:
        lower, upper = least_share * target.numel, most_share * target.numel
        least = math.floor(lower) if rounds_down else math.ceil(lower)
        most = math.ceil(upper) if rounds_up else math.floor(upper)
        return find_cut(lambda: keys(target), least), find_cut(lambda: keys(target), most)

    def changed(target: Target) -> Iterator[Tensor]:
        if target.name not in cuts:  # keys are streamed several times
            cuts[target.name] = cuts_of(target)
        pruned_first, pruned_at_all = (Below(cut) for cut in cuts[target.name])
        for chunk in keys(target):
            # Key 0 now stands for the least alone. All others are one higher: weights that are zero already and not
            # part of it are still the first of the rest, before a score of 0, but no longer pruned before the least of
            # every other matrix.
            # What is zero already stays so, and counts, though it be more than the upper bound.
            kept = ~pruned_at_all(chunk) & (chunk != 0)
            yield (chunk + 1).masked_fill_(kept, KEPT).masked_fill_(pruned_first(chunk), 0)

    return changed
