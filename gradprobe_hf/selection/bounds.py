"""Bounds: the least and the most that may go of each matrix, where one budget is spent over several."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch import Tensor

from gradprobe_hf.model.targets import Target
from gradprobe_hf.selection.cut import Below, Cut, find_cut
from gradprobe_hf.selection.keys import LAST, Keys


def bounded(keys: Keys, bounds: tuple[float, float], unit: Sequence[Target], budget: int) -> Keys:
    """Keys of which the lowest of each matrix come first, and the highest last, whatever they are elsewhere."""
    cuts: dict[str, tuple[Cut, Cut]] = {}
    # Whole weights: inside the bounds, unless these together are more, or less, than there is to spend.
    fewer = sum(math.ceil(bounds[0] * target.numel) for target in unit) > budget
    more = sum(math.floor(bounds[1] * target.numel) for target in unit) < budget

    def changed(target: Target) -> Iterator[Tensor]:
        if target.name not in cuts:
            least, most = bounds[0] * target.numel, bounds[1] * target.numel
            low, high = math.floor(least) if fewer else math.ceil(least), math.ceil(most) if more else math.floor(most)
            cuts[target.name] = find_cut(lambda: keys(target), low), find_cut(lambda: keys(target), high)
        certain, possible = (Below(cut) for cut in cuts[target.name])
        for these in keys(target):
            # Zeros that are no part of the least come behind what is, like every other weight.
            yield these.clamp_min(1).masked_fill_(~possible(these), LAST).masked_fill_(certain(these), 0)

    return changed
