"""Comparison: one model, one text and one budget through several configurations; nothing is measured twice.

The first probe is the same for every joint configuration, so it is made once with the terms that any of them needs;
configurations that differ in reconstruction alone share their masks. Every row is measured through what the model is
served: its weights stay as they are throughout.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from gradprobe_hf.config import GradProbeConfig
from gradprobe_hf.data.batches import Batches
from gradprobe_hf.decisions.decision import evidence_needed
from gradprobe_hf.evaluation.perplexity import Measurement, measure
from gradprobe_hf.model.loss import LossFunction
from gradprobe_hf.probe.attachment import serving
from gradprobe_hf.probe.engine import run_probe
from gradprobe_hf.probe.matrix import Term
from gradprobe_hf.probe.statistics import Statistics
from gradprobe_hf.report.build import matrix_rows, published_name, versions
from gradprobe_hf.report.plots import save_comparison
from gradprobe_hf.report.report import ComparedRow, finite
from gradprobe_hf.run.compatibility import check_targets
from gradprobe_hf.run.context import Diagnostics, FirstProbe, RunContext
from gradprobe_hf.run.decide import PruningDecision, conclude, decide
from gradprobe_hf.run.inputs import Loading
from gradprobe_hf.run.study import study
from gradprobe_hf.runtime.stopwatch import Stopwatch
from gradprobe_hf.selection.packed_masks import PackedMasks

logger = logging.getLogger(__name__)

# The published ways first, then what this package adds.
BASELINES: dict[str, dict[str, Any]] = {
    "magnitude": {"strategy": "magnitude", "decision": "none"},
    "wanda": {"strategy": "wanda", "decision": "none"},
    "sparsegpt": {"strategy": "sparsegpt", "decision": "none"},
    "one probe": {"strategy": "fisher", "decision": "none"},
    "two probes": {"strategy": "fisher", "decision": "path"},
    "one probe + admm": {"strategy": "fisher", "decision": "none", "reconstruction": "admm"},
}
# A baseline is made as it was published: what else the configuration does is not done to it.
_PLAIN: dict[str, Any] = {
    "scope": None,
    "min_matrix_sparsity": None,
    "max_matrix_sparsity": None,
    "order": "joint",
    "rounds": (),
    "max_metric_drop": None,
    "initial_sparsity": None,
    "reconstruction": "none",
    "dense_target": None,
    "preset": None,
}
# What all configurations of a comparison have in common.
_SHARED = ("num_samples", "sequence_length", "seed", "include", "exclude", "evaluation_samples")

RESULT_NAME = "comparison.json"


def baselines(config: GradProbeConfig, sparsity: float | None = None) -> dict[str, GradProbeConfig]:
    """The configurations to compare `config` with, at `sparsity` or its own: the same pattern, text and matrices."""
    common = {**_PLAIN, "sparsity": config.sparsity if sparsity is None or config.group else sparsity}
    return {name: replace(config, **{**common, **options}) for name, options in BASELINES.items()}


def most_demanding(configs: Sequence[GradProbeConfig]) -> GradProbeConfig:
    """The first that probes, if any does: what memory has to be planned for."""
    return next((config for config in configs if evidence_needed(config).passes == "probe"), configs[0])


def feasible(setting: RunContext, configs: Mapping[str, GradProbeConfig]) -> dict[str, GradProbeConfig]:
    """Those that these matrices can be pruned with; of the others the log says why not."""
    found = {}
    for name, config in configs.items():
        try:
            check_targets(setting.model, setting.targets, config)
            found[name] = config
        except ValueError as error:
            logger.warning("%s is left out of the comparison: %s", name, error)
    return found


class Comparison:
    """Rows of one setting, made one after the other.

    Args:
        setting: of every row, but for the configuration.
        held_out: what all rows are measured on.
        terms: of the first probe that they share, see `terms_of`; where there are none, every row makes its own.
    """

    def __init__(self, setting: RunContext, held_out: Batches, terms: frozenset[Term] = frozenset()) -> None:
        self._setting, self._held_out, self._terms = replace(setting, is_shared=True), held_out, terms
        self._decided: dict[str, tuple[PackedMasks | None, Diagnostics, float]] = {}

    def setting(self, config: GradProbeConfig, stopwatch: Stopwatch | None = None) -> RunContext:
        """For a run with this configuration; it has the first probe, if it begins with that."""
        needed, stopwatch = evidence_needed(config), stopwatch or Stopwatch()
        keeping = replace(self._setting.keeping, dtype=config.accumulator_dtype)
        alike = keeping == self._setting.keeping and needed.terms <= self._terms
        shares = needed.passes == "probe" and bool(self._terms) and alike
        if shares and self._setting.first is None:
            with stopwatch("probe 0"):
                self._setting = replace(self._setting, first=self._probe())
        first = self._setting.first if shares else None
        return replace(self._setting, config=config, keeping=keeping, first=first, journal=None, stopwatch=stopwatch)

    def row(self, method: str, config: GradProbeConfig) -> ComparedRow:
        """Prune with `config`, measure, and let go of what was pruned.

        Raises:
            ValueError: what `reach_verdict` raises.
        """
        verdict, seconds = self.verdict(config)
        return self.describe(method, config, verdict, seconds, self.measured(verdict.masks, verdict.updates, method))

    def row_if_possible(self, method: str, config: GradProbeConfig) -> ComparedRow | None:
        """The row; None where this model cannot be pruned so, and then the log says why."""
        try:
            return self.row(method, config)
        except ValueError as error:
            logger.warning("%s is left out of the comparison: %s", method, error)
            return None

    def verdict(self, config: GradProbeConfig) -> tuple[PruningDecision, float]:
        """What goes, and the seconds that it takes alone."""
        setting = self.setting(config)
        masks, findings, before = self._masks(setting)
        begun = time.perf_counter()
        return conclude(setting, masks, findings), before + time.perf_counter() - begun

    def describe(
        self, method: str, config: GradProbeConfig, verdict: PruningDecision, seconds: float, found: Measurement
    ) -> ComparedRow:
        """The row of a verdict and its measurement."""
        setting = self._setting
        rows = matrix_rows(setting.model, setting.targets, config, verdict, setting.processes)
        zeros, weights = sum(row.zeros_after for row in rows), sum(row.weights for row in rows)
        return ComparedRow(
            method=method,
            sparsity=zeros / weights,
            zeros=zeros,
            weights=weights,
            loss=found.loss,
            perplexity=found.perplexity,
            seconds=round(seconds, 1),
            passes=verdict.findings.passes,
        )

    def measured(
        self,
        masks: Mapping[str, Any],
        updates: Mapping[str, Any],
        label: str,
        held_out: Batches | None = None,
        is_trial: bool = False,
    ) -> Measurement:
        """The loss of the model as it would be under masks and updates; on another text, if one is given."""
        setting = self._setting
        with serving(setting.model, setting.targets, masks, replaced=updates):
            return measure(
                setting.model,
                held_out or self._held_out,
                setting.loss_fn,
                f"evaluation ({label})",
                setting.progress,
                setting.processes,
                is_trial,
            )

    def _masks(self, setting: RunContext) -> tuple[PackedMasks | None, Diagnostics, float]:
        """Those of an earlier row that differs in reconstruction alone, or new ones; and the seconds they took."""
        alone = setting.config
        if alone.max_metric_drop is None:  # else the metric is of what is reconstructed
            alone = replace(alone, reconstruction="none", dense_target=None, damping=GradProbeConfig.damping)
        key = json.dumps(alone.to_dict(), sort_keys=True)
        if key not in self._decided:
            findings, begun = Diagnostics(), time.perf_counter()
            masks = decide(setting, findings, self._held_out, None)
            seconds = time.perf_counter() - begun + (setting.first.seconds if setting.first else 0.0)
            self._decided[key] = masks, findings, seconds
        masks, findings, seconds = self._decided[key]
        return masks, findings.copy(), seconds

    def _probe(self) -> FirstProbe:
        setting, begun = self._setting, time.perf_counter()
        assert setting.batches is not None, "what is compared is calibrated"
        statistics = Statistics(setting.targets, self._terms, setting.model, setting.keeping)
        loss = run_probe(
            setting.model,
            setting.targets,
            setting.batches,
            statistics,
            spike_limit=1.0,  # so that energies are remembered, for whichever configuration limits its second probe
            loss_fn=setting.loss_fn,
            checkpointing=setting.checkpointing,
            processes=setting.processes,
            label="probe 0 (shared)",
            progress=setting.progress and setting.processes.is_main,
        )
        statistics.reduce(setting.processes)
        return FirstProbe(statistics, loss.mean, time.perf_counter() - begun)


def terms_of(configs: Mapping[str, GradProbeConfig]) -> frozenset[Term]:
    """What a first probe that serves all of them has to keep; nothing, where none would share it."""
    needed = [evidence_needed(config) for config in configs.values()]
    probing = [one.terms for one in needed if one.passes == "probe"]
    return frozenset().union(*probing) if len(probing) > 1 else frozenset()


@dataclass(frozen=True)
class Compared:
    """What `compare_pretrained` returns.

    Attributes:
        model: its name.
        dense: the loss of the model as it is.
        rows: one for each configuration.
        configs: the configurations, as plain data.
        calibration, evaluation: the texts, with their protocols and fingerprints.
    """

    model: str
    dense: Measurement
    rows: list[ComparedRow]
    configs: dict[str, dict[str, Any]]
    calibration: dict[str, Any]
    evaluation: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return finite(
            {
                "model": self.model,
                "dense": self.dense.to_dict(),
                "rows": [row.to_dict() for row in self.rows],
                "configs": self.configs,
                "calibration": self.calibration,
                "evaluation": self.evaluation,
                "versions": versions(),
            }
        )

    def save(self, directory: str | Path) -> None:
        """Write `comparison.json` and `comparison.png` into `directory`; whole, or not at all."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".comparison-") as beside:
            scratch, rows = Path(beside), [row.to_dict() for row in self.rows]
            (scratch / RESULT_NAME).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
            save_comparison(rows, self.dense.to_dict(), self.evaluation["source"], scratch)
            for made in scratch.iterdir():
                made.replace(folder / made.name)


def compare_pretrained(
    model_or_id: PreTrainedModel | str | Path,
    config: GradProbeConfig | None = None,
    configs: Mapping[str, GradProbeConfig] | None = None,
    *,
    calibration: Any = None,
    processing_class: Any = None,
    evaluation: Any = None,
    loss_fn: LossFunction | None = None,
    loading: Loading | None = None,
    on_row: Callable[[Compared], None] | None = None,
    progress: bool = True,
) -> Compared:
    """One model, text and budget through several configurations. The model is left as it was.

    Args:
        model_or_id: a Hub id, a folder, or a loaded model.
        config: the budget, the pattern, the text and the memory that all have in common.
        configs: what is compared, by name; default: `baselines(config)`.
        calibration, processing_class, evaluation, loss_fn: as in `prune_pretrained`; an evaluation there must be.
        loading: where the weights go, and which they are.
        on_row: called with what there is whenever a row is made.
        progress: show progress bars.

    Raises:
        ValueError: configurations on other text or matrices, or nothing to measure on; and what `prune_pretrained`
            raises.
    """
    config = config or GradProbeConfig()
    known = baselines(config)
    chosen = dict(known if configs is None else configs)
    if not chosen:
        raise ValueError("configs is empty: there is nothing to compare.")
    for name, other in chosen.items():
        _check_common(name, other, config)
    with study(
        model_or_id,
        most_demanding([config, *chosen.values()]),
        calibration=calibration,
        processing_class=processing_class,
        evaluation=evaluation,
        loss_fn=loss_fn,
        loading=loading,
        is_shared=bool(terms_of(chosen)),
        progress=progress,
    ) as (setting, held_out):
        for name, other in chosen.items():
            if known.get(name) != other:
                check_targets(setting.model, setting.targets, other)
        possible = feasible(setting, {name: other for name, other in chosen.items() if known.get(name) == other})
        chosen = {name: other for name, other in chosen.items() if name in possible or known.get(name) != other}
        if not chosen:
            raise ValueError("this model can be pruned in none of these ways; the log says why.")
        comparison = Comparison(setting, held_out, terms_of(chosen))
        assert setting.batches is not None, "what is studied is calibrated"
        found = Compared(
            published_name(setting.model),
            comparison.measured(PackedMasks(), {}, "dense"),
            [],
            {name: other.to_dict() for name, other in chosen.items()},
            setting.batches.describe(),
            held_out.describe(),
        )
        for name, other in chosen.items():
            made = comparison.row_if_possible if known.get(name) == other else comparison.row
            with setting.stopwatch(name):
                row = made(name, other)
            if row is None:
                continue
            found.rows.append(row)
            if on_row is not None:
                on_row(found)
        if not found.rows:
            raise ValueError("this model could be pruned in none of these ways; the log says why.")
        return found


def _check_common(name: str, config: GradProbeConfig, common: GradProbeConfig) -> None:
    for option in _SHARED:
        if getattr(config, option) != getattr(common, option):
            raise ValueError(
                f"{name!r} has {option}={getattr(config, option)!r} and the others {getattr(common, option)!r}: a "
                "comparison is made on the same text and matrices."
            )
