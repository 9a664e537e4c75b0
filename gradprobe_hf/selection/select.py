"""Selection: scores -> a mask that meets the budget to the element. Masks: bool `[out, in]`, True = pruned."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradprobe_hf.model.targets import Target
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.scores.budget import Budget, Scope
from gradprobe_hf.scores.groups import group_mask, row_mask
from gradprobe_hf.selection.bounds import bounded
from gradprobe_hf.selection.cut import Below, Cut, find_cut
from gradprobe_hf.selection.keys import Keys
from gradprobe_hf.selection.packed_masks import PackedMasks


def select_masks(
    targets: Sequence[Target],
    keys: Keys,
    budget: Budget,
    processes: Processes | None = None,
    sharded: bool = False,
) -> PackedMasks:
    """Prune the lowest keys, exactly `round(sparsity * weights)` of them in every unit of the budget's scope.

    Args:
        targets: the matrices; ties are pruned in this order.
        keys: called with a target two or three times; has to yield the same keys each time.
        budget: without bounds where the model is sharded.
        processes: those that select from the same scores. Only histograms are exchanged.
        sharded: each process has its own rows of every matrix, and gets their masks. Otherwise each has whole matrices:
            processes share the counting, and all get the same masks.
    """
    if budget.group is not None or budget.scope == "row":
        return _select_in_rows(targets, keys, budget)
    masks = PackedMasks()
    for unit in units(targets, budget.scope):
        count = round(budget.sparsity * sum(target.numel for target in unit))
        within = keys if budget.bounds is None else bounded(keys, budget.bounds, unit, count)
        _select_unit(masks, unit, within, count, processes or Processes(), sharded)
    return masks


def _select_in_rows(targets: Sequence[Target], keys: Keys, budget: Budget) -> PackedMasks:
    masks = PackedMasks()
    for target in targets:
        count = round(budget.sparsity * target.shape[1])
        # Rows are whole in every process, so none has to know of another: `run/request/compatibility.py` refuses these
        # scopes for a matrix that is sharded by inputs.
        parts = (
            group_mask(part, *budget.group) if budget.group is not None else row_mask(part, count)
            for part in keys(target)
        )
        masks.add(target.name, list(parts))
    return masks


def units(targets: Sequence[Target], scope: Scope) -> list[list[Target]]:
    """The groups of matrices that share a budget; those outside the blocks, whose `block` is "", are one unit."""
    grouped: dict[str, list[Target]] = {}
    for target in targets:
        label = {"global": "", "block": target.block}.get(scope, target.name)
        grouped.setdefault(label, []).append(target)
    return list(grouped.values())


def _select_unit(
    masks: PackedMasks, unit: Sequence[Target], keys: Keys, budget: int, processes: Processes, sharded: bool
) -> None:
    """Add the masks of matrices that share one budget."""
    # Histograms are summed over processes, so every key has to be counted exactly once.
    counted = unit if sharded else processes.mine(unit)
    cut = find_cut(lambda: (part for target in counted for part in keys(target)), budget, processes)
    before = _ties_before(unit, keys, cut, processes) if sharded else None
    below = Below(cut)  # one for all matrices: it counts the ties that are left to take
    for index, target in enumerate(unit):
        if before is not None:
            below.ties_left = max(0, cut.ties - before[index])
        masks.add(target.name, [below(part) for part in keys(target)])


def _ties_before(unit: Sequence[Target], keys: Keys, cut: Cut, processes: Processes) -> list[int]:
    """For each target how many keys equal to the cut come before this process's rows of it. A collective.

    Index order is over whole matrices: all rows of the targets before, then of this target the rows of lower ranks.
    """
    own = torch.tensor([sum(int((part == cut.key).sum()) for part in keys(target)) for target in unit])
    everyone = torch.stack(processes.all_gather(own))  # [processes, targets]
    earlier_targets = everyone.sum(0).cumsum(0) - everyone.sum(0)
    return (earlier_targets + everyone[: processes.rank].sum(0)).tolist()
