"""One pair of probes of a context, and what is measured of the decisions that thresholds come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradprobe_hf.comparison.rows import Comparison
from gradprobe_hf.config.values import GradientThreshold
from gradprobe_hf.data.batches import Batches
from gradprobe_hf.decisions.search import Limit
from gradprobe_hf.model.targets import Target
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.run.decision import PruningDecision
from gradprobe_hf.run.diagnostics import Diagnostics
from gradprobe_hf.run.probing.probe_pair import ProbePair
from gradprobe_hf.selection.packed_masks import PackedMasks
from gradprobe_hf.threshold_sweep.bisection import refined
from gradprobe_hf.threshold_sweep.rows import ThresholdRow, TunedMeasurement, metric_of


class ThresholdMeasurements:
    """One pair of probes of a context, and what is measured of its decisions."""

    def __init__(self, context: RunContext) -> None:
        self._context, self._comparison, self._diagnostics = context, Comparison(context), Diagnostics()
        self._chosen_by = context.selection or context.evaluation
        self.dense = self._comparison.measured(None, "dense", self._chosen_by)
        self._pair = ProbePair(context, context.targets, self._diagnostics)
        self._pair.run(context.config.final_sparsity)
        self._in_turn: dict[float, PackedMasks] = {}  # sparsity of the candidates -> what was chosen block by block

    def rows(
        self, wanted: Sequence[GradientThreshold], sparsities: Sequence[float], limit: Limit | None = None
    ) -> list[ThresholdRow]:
        """Every threshold with every sparsity; with a limit, bisection between the thresholds of each sparsity."""
        found: list[ThresholdRow] = []
        for sparsity in sparsities:
            candidates = self._candidates(sparsity)

            def tried(threshold: GradientThreshold, sparsity: float = sparsity, c: Any = candidates) -> ThresholdRow:
                return self._row(threshold, sparsity, self._pair.masks_within(threshold, c))

            rows = [tried(threshold) for threshold in wanted]
            found += rows if limit is None else [*rows, *refined(rows, limit, tried)]
        return found

    def rows_in_turn(self, numbers: Sequence[float], sparsities: Sequence[float], limit: Limit) -> list[ThresholdRow]:
        """A row for each sparsity, whose thresholds are chosen block by block."""
        found = []
        for sparsity in sparsities:
            chosen, self._in_turn[sparsity] = self._chosen_in_turn(numbers, sparsity, limit)
            found.append(self._row(chosen, sparsity, self._in_turn[sparsity]))
        return found

    def reported(self, row: ThresholdRow) -> TunedMeasurement:
        """A row and the dense model, on the text that did not choose."""
        masks = self._in_turn.get(row.candidates)
        if masks is None:
            masks = self._pair.masks_within(row.gradient_threshold, self._candidates(row.candidates))
        again = self._row(row.gradient_threshold, row.candidates, masks, self._context.evaluation)
        return TunedMeasurement(self._comparison.measured(None, "dense"), again)

    def _candidates(self, sparsity: float) -> PackedMasks | None:
        """Those of a budget; None: all that the second probe has shrunk."""
        return None if sparsity == self._context.config.final_sparsity else self._pair.propose(sparsity)

    def _row(
        self, threshold: GradientThreshold, candidates: float, masks: PackedMasks, batches: Batches | None = None
    ) -> ThresholdRow:
        label, decision = f"threshold {threshold}", PruningDecision(masks, self._diagnostics)
        found = self._comparison.measured(decision, label, batches or self._chosen_by, allows_nan=True)
        row = self._comparison.describe(label, self._context.config, decision, 0.0, found)
        return ThresholdRow(threshold, row.sparsity, row.zeros, row.loss, row.perplexity, candidates)

    def _chosen_in_turn(
        self, numbers: Sequence[float], sparsity: float, limit: Limit
    ) -> tuple[dict[str, float], PackedMasks]:
        """Pattern of each block -> the largest threshold that keeps its share of the drop; a block without is dense."""
        candidates = self._candidates(sparsity)
        tried = {number: self._pair.masks_within(number, candidates) for number in sorted(numbers, reverse=True)}
        patterns = list(dict.fromkeys(map(_pattern, self._context.targets)))
        chosen = dict[str, float]()
        for number, pattern in enumerate(patterns, 1):
            share = limit.part(number / len(patterns))
            for threshold in tried:
                masks = self._put_together(chosen | {pattern: threshold}, tried)
                if share.keeps(metric_of(self._row(threshold, sparsity, masks))):
                    chosen[pattern] = threshold
                    break
        in_order = sorted(chosen, key=lambda pattern: pattern == "*")  # the first that matches wins
        return {pattern: chosen[pattern] for pattern in in_order}, self._put_together(chosen, tried)

    def _put_together(self, chosen: Mapping[str, float], tried: Mapping[float, PackedMasks]) -> PackedMasks:
        """Of each block the masks of its threshold; nothing of the others."""
        found, any_ = PackedMasks(), next(iter(tried.values()))
        for target in self._context.targets:
            threshold, name = chosen.get(_pattern(target)), target.name
            packed = torch.zeros_like(any_.packed(name)) if threshold is None else tried[threshold].packed(name)
            found.add_packed(name, packed, any_.columns(name))
        return found


def _pattern(target: Target) -> str:
    """Of the names of its block."""
    return f"{target.block}.*" if target.block else "*"


def left_dense(targets: Sequence[Target], row: ThresholdRow) -> tuple[str, ...]:
    assert isinstance(row.gradient_threshold, Mapping), "chosen block by block"
    return tuple(one for one in dict.fromkeys(map(_pattern, targets)) if one not in row.gradient_threshold)
