"""Selection: scores -> a mask that meets the budget to the element.

No sorting and no concatenation: the bit pattern of a non-negative float32 orders like its value, so the exact k-th
smallest of any number of scores is found with two histograms, of the high and then of the low 16 bits (a radix
select). Scores are recomputed, a few rows of a matrix at a time, in each of the three passes: two that find the cut,
one that applies it.

Keys, `int32 [rows, in]`: 0 for a weight that is zero already (it counts towards the budget first), else the score's
bits plus one. Ties at the cut are taken in index order. An infinite score sorts last: it is pruned only if nothing else
is left. PackedMasks: bool `[out, in]`, True = pruned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradprobe_hf.config import Scope
from gradprobe_hf.model.targets import Target
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.selection.packed_masks import PackedMasks

Keys = Callable[[Target], Iterable[Tensor]]  # a matrix's keys, as consecutive chunks of rows
Bounds = tuple[float, float]  # the least and the most of a matrix that may go, as fractions of it

_INFINITY_BITS = 0x7F80_0000
LAST = _INFINITY_BITS + 1  # the key of an infinite score
_LOW_BITS = 16
_HIGH_BINS = (_INFINITY_BITS + 1 >> _LOW_BITS) + 1
_LOW_BINS = 1 << _LOW_BITS


@dataclass(frozen=True)
class Cut:
    """Where a budget ends: every key below `key` goes, and the first `ties` keys equal to it."""

    key: int
    ties: int


def score_keys(score: Tensor, weight: Tensor, name: str) -> Tensor:
    """Sortable keys, `int32 [out, in]`.

    Raises:
        ValueError: a NaN or negative score; the message names the matrix.
    """
    bits = (score.float() + 0.0).contiguous().view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    lowest, highest = torch.aminmax(bits)
    if lowest < 0 or highest > _INFINITY_BITS:
        raise ValueError(
            f"{name} has scores that are NaN or negative, so its weights cannot be ordered. Look for NaN in its "
            "weights or in the calibration loss (float16 overflows: try dtype=bfloat16), or exclude this matrix."
        )
    return (bits + 1).masked_fill_(weight == 0, 0)


def key_range(keys: Tensor) -> tuple[float, float]:
    """The lowest and highest score behind sortable keys; a weight that was zero already counts as a score of 0."""
    bits = torch.stack(torch.aminmax(keys)).sub(1).clamp_(min=0)
    lowest, highest = bits.view(torch.float32).tolist()
    return lowest, highest


def select_masks(
    targets: Sequence[Target],
    keys: Keys,
    sparsity: float,
    scope: Scope = "global",
    group: tuple[int, int] | None = None,
    bounds: Bounds | None = None,
    processes: Processes | None = None,
    sharded: bool = False,
) -> PackedMasks:
    """Prune the lowest keys, exactly `round(sparsity * weights)` of them in every unit of the scope.

    Args:
        targets: the matrices, in the order in which ties are cut.
        keys: called with a target, two times or three; must give the same keys each time.
        sparsity: fraction in [0, 1).
        scope: the unit a budget is spent over.
        group: (n, m) of an n:m pattern: in every m consecutive inputs m - n are pruned, and `sparsity` and `scope`
            are not looked at.
        bounds: the least and the most that may go of each matrix; the budget lies between their sums. Not where the
            model is sharded.
        processes: who else selects from the same scores. Only histograms are exchanged.
        sharded: each process has rows of its own, and gets their masks. Otherwise each has all of them: the
            processes share the counting, and all get the same masks.
    """
    masks = PackedMasks()
    if group is not None or scope == "row":
        for target in targets:
            budget = round(sparsity * target.shape[1])
            masks.add(
                target.name,
                [group_mask(part, *group) if group is not None else row_mask(part, budget) for part in keys(target)],
            )
        return masks
    for unit in units(targets, scope):
        budget = round(sparsity * sum(target.numel for target in unit))
        within = keys if bounds is None else bounded(keys, bounds, unit, budget)
        _select_unit(masks, unit, within, budget, processes or Processes(), sharded)
    return masks


def bounded(keys: Keys, bounds: Bounds, unit: Sequence[Target], budget: int) -> Keys:
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
        certain, possible = (_Below(cut) for cut in cuts[target.name])
        for these in keys(target):
            # Zeros that are no part of the least come behind what is, like every other weight.
            yield these.clamp_min(1).masked_fill_(~possible(these), LAST).masked_fill_(certain(these), 0)

    return changed


class _Below:
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


def units(targets: Sequence[Target], scope: Scope) -> list[list[Target]]:
    """The groups of matrices that share a budget; what lies outside of the blocks is one unit."""
    grouped: dict[str, list[Target]] = {}
    for target in targets:
        label = {"global": "", "block": target.block}.get(scope, target.name)
        grouped.setdefault(label, []).append(target)
    return list(grouped.values())


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


def _select_unit(
    masks: PackedMasks, unit: Sequence[Target], keys: Keys, budget: int, processes: Processes, sharded: bool
) -> None:
    counted = unit if sharded else processes.mine(unit)
    cut = find_cut(lambda: (part for target in counted for part in keys(target)), budget, processes)
    before = _ties_elsewhere(unit, keys, cut, processes) if sharded else None
    below = _Below(cut)
    for index, target in enumerate(unit):
        if before is not None:
            below.ties_left = max(0, cut.ties - before[index])
        masks.add(target.name, [below(these) for these in keys(target)])


def _ties_elsewhere(unit: Sequence[Target], keys: Keys, cut: Cut, processes: Processes) -> list[int]:
    """For each target how many keys equal to the cut come before this process's rows of it, in index order."""
    own = torch.tensor([sum(int((part == cut.key).sum()) for part in keys(target)) for target in unit])
    everyone = torch.stack(processes.gather(own))  # [processes, targets]
    earlier_targets = everyone.sum(0).cumsum(0) - everyone.sum(0)
    return (earlier_targets + everyone[: processes.rank].sum(0)).tolist()


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
