"""Rows of a comparison: one configuration after the other in one context; nothing is measured twice.

The first probe is the same for every joint configuration, so it is made once with the terms that any of them needs;
configurations that differ in their weight update alone share their masks. Every row is measured through what the model
is served: its weights stay as they are throughout.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gradprobe_hf.comparison.baselines import shared_terms
from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.data.batches import Batches
from gradprobe_hf.evaluation.divergence import Divergence
from gradprobe_hf.evaluation.perplexity import Measurement
from gradprobe_hf.model.parameters import parameter_bytes, parameter_count
from gradprobe_hf.probe.engine import ProbePass, run_probe
from gradprobe_hf.probe.statistics import Statistics
from gradprobe_hf.report.build import matrix_rows, pruned_before
from gradprobe_hf.report.report import finite
from gradprobe_hf.run.context import RunContext, SharedProbe
from gradprobe_hf.run.decide import conclude, decide_masks, decide_pruning
from gradprobe_hf.run.decision import PruningDecision
from gradprobe_hf.run.diagnostics import Diagnostics
from gradprobe_hf.run.evaluate import evaluate, evaluate_metric, evaluate_pair
from gradprobe_hf.runtime.stopwatch import Stopwatch
from gradprobe_hf.selection.packed_masks import PackedMasks
from gradprobe_hf.structures.removal import Removal
from gradprobe_hf.structures.table import shape_words

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ComparedRow:
    """One configuration of a comparison.

    Attributes:
        sparsity: the true share of zeros in the target matrices; of what goes whole, where anything does.
        perplexity: None for a model that has none.
        divergence: from the dense model; None for a model that predicts no tokens.
        metric: the task's; None where none is measured.
        seconds: that it takes alone, without the evaluation: a first probe that was shared counts in every row.
        passes: forward and backward passes over the calibration data, counted in the same way.
        parameters, bytes: of the checkpoint that would be written.
        removed: structure -> how many go whole; empty where single weights go.
    """

    method: str
    sparsity: float
    zeros: int
    weights: int
    loss: float
    perplexity: float | None
    seconds: float
    passes: dict[str, float]
    parameters: int
    bytes: int
    removed: dict[str, int] = field(default_factory=dict)
    divergence: Divergence | None = None
    metric: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return finite(asdict(self))


class Comparison:
    """Rows of one context, made one after the other.

    Args:
        context: of every row, but for the configuration.
        configs: what will be compared: the first probe is shared by those that begin with it. Without any, every row
            makes its own.

    Attributes:
        removals: of the rows so far, by the words for what goes whole.
        origin: what the rows so far found out about what the model was before, as a report says it.
    """

    def __init__(self, context: RunContext, configs: Sequence[GradProbeConfig] = ()) -> None:
        weighs_rows = any(config.update_row.weighs_rows for config in configs)
        self._context = replace(context, keeps_row_fisher=weighs_rows)
        self._terms = shared_terms(configs)
        self.removals: dict[str, Removal] = {}
        self.origin: dict[str, Any] = {}
        self._decided: dict[str, tuple[PackedMasks | None, Diagnostics, float]] = {}

    def context(self, config: GradProbeConfig, stopwatch: Stopwatch | None = None) -> RunContext:
        """For a run with this configuration; it has the first probe, if it begins with that."""
        needs, stopwatch = config.needs, stopwatch or Stopwatch()
        storage = replace(self._context.storage, dtype=config.accumulator_dtype)
        alike = storage == self._context.storage and needs.terms <= self._terms
        shares = needs.probes and bool(self._terms) and alike
        if shares and self._context.shared_probe is None:
            with stopwatch("probe 0"):
                self._context = replace(self._context, shared_probe=self._probe())
        shared = self._context.shared_probe if shares else None
        return replace(
            self._context, config=config, storage=storage, shared_probe=shared, snapshots=None, stopwatch=stopwatch
        )

    def row(self, method: str, config: GradProbeConfig) -> ComparedRow:
        """Prune with `config`, measure, and let go of what was pruned.

        Raises:
            ValueError: what `decide_pruning` raises.
        """
        decision, seconds = self.decision(config)
        found = evaluate_pair(self._context, decision, method)
        row = self.describe(method, config, decision, seconds, found.pruned)
        return replace(row, divergence=found.divergence, metric=self.metric(decision, method))

    def metric(self, decision: PruningDecision | None, label: str) -> float | None:
        """The task's metric of the model as a decision would leave it (None: as it is), where there is one."""
        return None if self._context.metric is None else evaluate_metric(self._context, decision, label)

    def row_if_possible(self, method: str, config: GradProbeConfig) -> ComparedRow | None:
        """The row; None where this model cannot be pruned so, and then the log says why."""
        try:
            return self.row(method, config)
        except ValueError as error:
            logger.warning("%s is left out of the comparison: %s", method, error)
            return None

    def decision(self, config: GradProbeConfig) -> tuple[PruningDecision, float]:
        """What goes, and the seconds that it takes alone."""
        context = self.context(config)
        if config.structure is not None:
            begun = time.perf_counter()
            return decide_pruning(context), time.perf_counter() - begun
        masks, diagnostics, before = self._masks(context)
        begun = time.perf_counter()
        return conclude(context, masks, diagnostics), before + time.perf_counter() - begun

    def describe(
        self, method: str, config: GradProbeConfig, decision: PruningDecision, seconds: float, found: Measurement
    ) -> ComparedRow:
        """The row of a decision and its measurement."""
        rows = matrix_rows(replace(self._context, config=config), decision)
        self.origin |= pruned_before(self._context, rows)
        model, removal = self._context.model, decision.removal
        # Of what goes whole that alone: a weight that stays may be zero, and is in the file all the same.
        zeros = sum(row.zeros_after if removal is None else row.pruned for row in rows)
        weights = sum(row.weights for row in rows)
        if removal is not None:
            self.removals[shape_words(removal.plan.going)] = removal
        return ComparedRow(
            method=method,
            sparsity=zeros / weights,
            zeros=zeros,
            weights=weights,
            loss=found.loss,
            perplexity=found.perplexity,
            seconds=round(seconds, 1),
            passes=decision.diagnostics.passes,
            parameters=removal.parameters(model) if removal else parameter_count(model),
            bytes=removal.bytes(model) if removal else parameter_bytes(model),
            removed=dict(removal.plan.going) if removal else {},
        )

    def measured(
        self,
        decision: PruningDecision | None,
        label: str,
        evaluation: Batches | None = None,
        allows_nan: bool = False,
    ) -> Measurement:
        """The loss of the model as a decision would leave it (None: as it is); on another text, if one is given."""
        context = self._context if evaluation is None else replace(self._context, evaluation=evaluation)
        return evaluate(context, decision, label, allows_nan)

    def _masks(self, context: RunContext) -> tuple[PackedMasks | None, Diagnostics, float]:
        """Those of an earlier row that differs in its weight update alone, or new ones; and the seconds they took."""
        alone = context.config
        # A metric is of what is reconstructed, and an update that chooses its mask has none before it.
        if alone.max_metric_drop is None and not alone.update_row.chooses_mask:
            alone = alone.varied(preset=None, update="none", dense_target=None, damping=GradProbeConfig.damping)
        key = json.dumps(alone.to_dict(), sort_keys=True)
        if key not in self._decided:
            diagnostics, begun = Diagnostics(), time.perf_counter()
            masks = decide_masks(context, diagnostics)
            seconds = time.perf_counter() - begun + (context.shared_probe.seconds if context.shared_probe else 0.0)
            self._decided[key] = masks, diagnostics, seconds
        masks, diagnostics, seconds = self._decided[key]
        return masks, diagnostics.copy(), seconds

    def _probe(self) -> SharedProbe:
        context, begun = self._context, time.perf_counter()
        statistics = Statistics(context.targets, self._terms, context.model, context.storage)
        # With a spike limit, so that energies are remembered for whichever configuration limits its second probe.
        one = ProbePass(context.targets, statistics, spike_limit=1.0, refuses_flat=True, label="probe 0 (shared)")
        loss = run_probe(context.workload, one)
        statistics.reduce(context.processes)
        return SharedProbe(statistics, loss.mean, time.perf_counter() - begun)
