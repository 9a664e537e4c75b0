"""The schedule: which probe pairs lead to the final masks.

one shot      one pair at the final budget
rounds        a pair at each of several budgets, each on the model as the one before would prune it; every round
              decides anew about all weights, so that a pruned one can come back with its original value
search        rounds from `initial_sparsity` by `sparsity_step`, until the metric has dropped by more than
              `max_metric_drop`; then the largest budget that keeps it, by bisection on the scores at hand
sequential    `sequential.py`: one step of blocks after the other
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gradprobe_hf.decisions.search import FINEST, Limit, levels
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.run.diagnostics import Diagnostics
from gradprobe_hf.run.probing.probe_pair import Position, ProbePair
from gradprobe_hf.run.probing.probe_state import begun_in
from gradprobe_hf.selection.packed_masks import PackedMasks

# What the metric is of the model that masks lead to: lower is better.
Measured = Callable[[PackedMasks], float]


def decide_in_rounds(context: RunContext, diagnostics: Diagnostics) -> PackedMasks:
    """The masks of the last round; of the only one, where there are no `rounds`."""
    begun = begun_in(context.snapshots)
    masks = PackedMasks()
    for number, sparsity in enumerate(context.config.rounds or (context.config.final_sparsity,)):
        if begun is None or begun.pair <= number:
            at = Position(number, served=masks, begun=begun)
            masks = ProbePair(context, context.targets, diagnostics, at).run(sparsity)
    return masks


def search(context: RunContext, diagnostics: Diagnostics, measured: Measured, dense: float) -> PackedMasks:
    """The sparsest masks found whose metric is within `max_metric_drop` of the dense model's; if none is, of nothing.

    Where the score needs no probe, its scores of the model as it is serve every budget.

    Args:
        measured: the metric of what becomes of the model under masks; lower is better.
        dense: the metric of the model as it is.
    """
    config = context.config
    limit = Limit.of(dense, config.max_metric_drop)
    begun, probes = begun_in(context.snapshots), config.needs.probes
    pair, best, kept = None, PackedMasks(), 0.0
    for number, sparsity in enumerate(levels(config.first_level, config.sparsity_step, config.final_sparsity)):
        if begun is not None and begun.pair > number:
            kept = sparsity  # its masks are what the snapshot serves
            continue
        if pair is None or probes:
            pair = None  # its statistics go before there are others
            pair = ProbePair(context, context.targets, diagnostics, Position(number, served=best, begun=begun))
            masks = pair.run(sparsity)
            best = pair.served
        else:
            masks = pair.masks_at(sparsity)
        value = measured(masks)
        diagnostics.curve.append(_point(sparsity, value, limit, probed=probes))
        if not limit.keeps(value):
            return _Bisection(pair, measured, limit, best).between(kept, sparsity)
        best, kept = masks, sparsity
    return best


@dataclass(frozen=True)
class _Bisection:
    """Between a budget that keeps the limit and one that does not, on the statistics of one probe pair.

    Attributes:
        best: masks of the one that keeps it; empty where none has.
    """

    pair: ProbePair
    measured: Measured
    limit: Limit
    best: PackedMasks

    def between(self, low: float, high: float) -> PackedMasks:
        found = None
        while high - low > FINEST:
            middle = (low + high) / 2
            masks = self.pair.masks_at(middle)
            value = self.measured(masks)
            self.pair.diagnostics.curve.append(_point(middle, value, self.limit, probed=False))
            if self.limit.keeps(value):
                found, low = masks, middle
            else:
                high = middle
        if found is not None:
            return found
        # What is kept was decided, and measured, with the rows' importance of the pair before.
        self.pair.diagnostics.row_fisher = self.pair.row_fisher_before
        return self.best or self.pair.masks_at(0.0)


def _point(sparsity: float, value: float, limit: Limit, probed: bool) -> dict[str, Any]:
    within = limit.keeps(value)
    return {"sparsity": sparsity, "metric": value, "limit": limit.value, "within": within, "probed": probed}
