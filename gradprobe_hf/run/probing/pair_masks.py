"""Masks from what a probe pair has measured: the budget that scores are cut at, or candidates that a rule filters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradprobe_hf.decisions.threshold import no_evidence
from gradprobe_hf.model.fsdp import is_sharded
from gradprobe_hf.model.targets import Region, Target
from gradprobe_hf.probe.statistics import Statistics
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.run.diagnostics import Diagnostics
from gradprobe_hf.runtime.row_chunks import row_chunks
from gradprobe_hf.scores.budget import Budget
from gradprobe_hf.scores.evidence import Evidence
from gradprobe_hf.selection.keys import Keys, key_range, keys_of
from gradprobe_hf.selection.packed_masks import PackedMasks
from gradprobe_hf.selection.select import select_masks


@dataclass(frozen=True)
class MeasuredTargets:
    """Some targets, and what is known of them.

    Attributes:
        first: of probe 0; of both probes, where the second has added to them.
        diagnostics: added to.
    """

    context: RunContext
    targets: Sequence[Target]
    first: Statistics
    diagnostics: Diagnostics

    def lowest(self, function: Callable[[Evidence], Tensor], budget: Budget) -> PackedMasks:
        """Those of the lowest scores, as many as the budget says.

        Args:
            function: evidence about some rows of a matrix -> scores `[rows, in]`.
        """
        context = self.context
        if budget.bounds is not None:
            # The attempts of a search begin below the least that goes in the end.
            least, most = budget.bounds
            budget = replace(budget, bounds=(min(least, budget.sparsity), most))
        ranges: dict[str, tuple[float, float]] = {}

        def scored(target: Target, weight: Tensor, part: Region) -> Tensor:
            return function(self._evidence(target, weight, part))

        keys = _noted(keys_of(context.model, scored), ranges)
        masks = select_masks(self.targets, keys, budget, context.processes, is_sharded(context.model))
        self.diagnostics.score_ranges |= ranges
        return masks

    def filtered(self, second: Statistics, candidates: PackedMasks, target: Target, threshold: float) -> list[Tensor]:
        """The mask of one target in portions of its rows: the candidates that the decision's rule lets go.

        What is given back for want of evidence is counted.

        Args:
            second: of probe 1 alone.
            threshold: of the matrix.

        Raises:
            ValueError: gradients that are not finite.
        """
        filters = self.context.config.decision_row.filters
        assert filters is not None, "a rule that filters its candidates"
        model = self.context.model
        matrix, offset = target.matrix(model), target.region(model).rows.start
        found, blind = [], 0
        for rows in row_chunks(matrix.shape) if matrix.numel() else [slice(0, matrix.shape[0])]:
            held = slice(offset + rows.start, offset + rows.stop)
            peaks = self.first[target.name].read("peak", held), second[target.name].read("peak", held)
            _check_finite(target, peaks)
            device = peaks[0].device  # where the matrix is computed with; it may be kept elsewhere
            chosen, weight = candidates.rows(target.name, rows).to(device), matrix[rows].to(device)
            blind += int((chosen & no_evidence(*peaks) & (weight != 0)).sum())
            found.append(filters(chosen, *peaks, threshold, weight))
        self.diagnostics.without_evidence[target.name] = blind
        return found

    def _evidence(self, target: Target, weight: Tensor, part: Region) -> Evidence:
        return Evidence(
            weight=weight,
            statistics=self.first[target.name],
            rows=part.rows,
            columns=part.columns,
            name=target.name,
            inputs=target.shape[1],
            fisher=self.context.config.fisher,
            seed=self.context.config.seed,
        )


def _check_finite(target: Target, peaks: tuple[Tensor, Tensor]) -> None:
    """A comparison with NaN would give everything back, as if the gradient had grown."""
    if not all(bool(torch.isfinite(peak).all()) for peak in peaks):
        raise ValueError(
            f"the gradients of {target.name} are not finite, so they cannot be compared: look for NaN in the model's "
            "weights, or a dtype that overflows (float16: try bfloat16). Nothing was changed."
        )


def _noted(keys: Keys, ranges: dict[str, tuple[float, float]]) -> Keys:
    """The same keys; the lowest and highest score of each matrix are put down in `ranges`."""

    def noted(target: Target) -> Iterator[Tensor]:
        ends = []
        for part in keys(target):
            if target.name not in ranges and part.numel():
                ends.append(key_range(part))
            yield part
        if ends:
            ranges[target.name] = (min(low for low, _ in ends), max(high for _, high in ends))

    return noted
