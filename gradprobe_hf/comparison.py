"""Comparison: one model, one text and one budget through several configurations; nothing is measured twice.

The first probe is the same for every joint configuration, so it is made once with the terms that any of them needs;
configurations that differ in their weight update alone share their masks. Every row is measured through what the model
is served: its weights stay as they are throughout.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from gradprobe_hf.config import GradProbeConfig
from gradprobe_hf.data.batches import Batches
from gradprobe_hf.evaluation.perplexity import Measurement
from gradprobe_hf.model.loss import LossFunction
from gradprobe_hf.probe.engine import ProbePass, run_probe
from gradprobe_hf.probe.statistics import Statistics
from gradprobe_hf.report.build import matrix_rows, published_name, versions
from gradprobe_hf.report.plots import save_comparison
from gradprobe_hf.report.report import finite
from gradprobe_hf.run.compatibility import check_targets
from gradprobe_hf.run.context import RunContext, RunRequest, SharedProbe
from gradprobe_hf.run.decide import PruningDecision, conclude, decide_masks, evaluate
from gradprobe_hf.run.diagnostics import Diagnostics
from gradprobe_hf.run.inputs import load_inputs
from gradprobe_hf.run.memory_plan import open_run
from gradprobe_hf.runtime.stopwatch import Stopwatch
from gradprobe_hf.scores.evidence import Term
from gradprobe_hf.selection.packed_masks import PackedMasks

logger = logging.getLogger(__name__)

# The published ways first, then what this package adds.
BASELINES: dict[str, dict[str, Any]] = {
    "magnitude": {"score": "magnitude", "probes": 0},
    "wanda": {"score": "wanda", "probes": 0},
    "sparsegpt": {"score": None, "probes": None, "update": "sparsegpt"},
    "one probe": {"score": "fisher", "probes": 1},
    "two probes": {"score": "fisher", "probes": 2},
    "one probe + admm": {"score": "fisher", "probes": 1, "update": "admm"},
}
# A baseline is made as it was published: what else the configuration does is not done to it.
_PLAIN: dict[str, Any] = {
    "preset": None,
    "rule": "budget",
    "scope": None,
    "update": "none",
    "dense_target": None,
    "min_matrix_sparsity": None,
    "max_matrix_sparsity": None,
    "order": "joint",
    "rounds": (),
    "max_metric_drop": None,
    "initial_sparsity": None,
}
# What all configurations of a comparison have in common.
_SHARED = ("num_samples", "sequence_length", "seed", "include", "exclude", "evaluation_samples")

RESULT_NAME = "comparison.json"


def baselines(config: GradProbeConfig, sparsity: float | None = None) -> dict[str, GradProbeConfig]:
    """The configurations to compare `config` with, at `sparsity` or its own: the same pattern, text and matrices."""
    common = {**_PLAIN, "sparsity": config.sparsity if sparsity is None or config.group else sparsity}
    return {name: config.varied(**{**common, **options}) for name, options in BASELINES.items()}


def most_demanding(configs: Sequence[GradProbeConfig]) -> GradProbeConfig:
    """The first that probes, if any does: what memory has to be planned for."""
    return next((config for config in configs if config.needs.probes), configs[0])


def feasible(context: RunContext, configs: Mapping[str, GradProbeConfig]) -> dict[str, GradProbeConfig]:
    """Those that these matrices can be pruned with; of the others the log says why not."""
    found = {}
    for name, config in configs.items():
        try:
            check_targets(context.model, context.targets, config)
            found[name] = config
        except ValueError as error:
            logger.warning("%s is left out of the comparison: %s", name, error)
    return found


@dataclass(frozen=True)
class ComparedRow:
    """One configuration of a comparison.

    Attributes:
        sparsity: the true share of zeros in the target matrices.
        perplexity: None for a model that has none.
        seconds: that it takes alone, without the evaluation: a first probe that was shared counts in every row.
        passes: forward and backward passes over the calibration data, counted in the same way.
    """

    method: str
    sparsity: float
    zeros: int
    weights: int
    loss: float
    perplexity: float | None
    seconds: float
    passes: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        return finite(asdict(self))


class Comparison:
    """Rows of one context, made one after the other.

    Args:
        context: of every row, but for the configuration.
        configs: what will be compared: the first probe is shared by those that begin with it. Without any, every row
            makes its own.
    """

    def __init__(self, context: RunContext, configs: Sequence[GradProbeConfig] = ()) -> None:
        weighs_rows = any(config.update_row.weighs_rows for config in configs)
        self._context = replace(context, keeps_row_fisher=weighs_rows)
        self._terms = shared_terms(configs)
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
        return self.describe(method, config, decision, seconds, self.measured(decision, method))

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
        masks, diagnostics, before = self._masks(context)
        begun = time.perf_counter()
        return conclude(context, masks, diagnostics), before + time.perf_counter() - begun

    def describe(
        self, method: str, config: GradProbeConfig, decision: PruningDecision, seconds: float, found: Measurement
    ) -> ComparedRow:
        """The row of a decision and its measurement."""
        rows = matrix_rows(replace(self._context, config=config), decision)
        zeros, weights = sum(row.zeros_after for row in rows), sum(row.weights for row in rows)
        return ComparedRow(
            method=method,
            sparsity=zeros / weights,
            zeros=zeros,
            weights=weights,
            loss=found.loss,
            perplexity=found.perplexity,
            seconds=round(seconds, 1),
            passes=decision.diagnostics.passes,
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
        one = ProbePass(context.targets, statistics, spike_limit=1.0, label="probe 0 (shared)")
        loss = run_probe(context.workload, one)
        statistics.reduce(context.processes)
        return SharedProbe(statistics, loss.mean, time.perf_counter() - begun)


def shared_terms(configs: Sequence[GradProbeConfig]) -> frozenset[Term]:
    """What a first probe that serves all of them has to keep; nothing, where none would share it."""
    probing = [config.needs.terms for config in configs if config.needs.probes]
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
    on_row: Callable[[Compared], None] | None = None,
    progress: bool = True,
    **from_pretrained_kwargs: Any,
) -> Compared:
    """One model, text and budget through several configurations. The model is left as it was.

    Args:
        model_or_id: a Hub id, a folder, or a loaded model.
        config: the budget, the pattern, the text and the memory that all have in common.
        configs: what is compared, by name; default: `baselines(config)`.
        calibration, processing_class, evaluation, loss_fn, from_pretrained_kwargs: as in `prune_pretrained`; an
            evaluation there must be.
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
    request = RunRequest(
        model_or_id,
        most_demanding([config, *chosen.values()]),
        calibration,
        processing_class,
        evaluation,
        loss_fn,
        from_pretrained_kwargs,
        always_calibrate=True,
        progress=progress,
    )
    loaded = load_inputs(request)
    check_evaluation(loaded)
    with open_run(loaded, shares_probe=bool(shared_terms(list(chosen.values())))) as context:
        chosen = _possible(context, chosen, known)
        comparison = Comparison(context, list(chosen.values()))
        found = Compared(
            published_name(context.model),
            comparison.measured(None, "dense"),
            [],
            {name: other.to_dict() for name, other in chosen.items()},
            context.calibration.describe(),
            context.evaluation.describe(),
        )
        for name, other in chosen.items():
            made = comparison.row_if_possible if known.get(name) == other else comparison.row
            with context.stopwatch(name):
                row = made(name, other)
            if row is None:
                continue
            found.rows.append(row)
            if on_row is not None:
                on_row(found)
    if not found.rows:
        raise ValueError("this model could be pruned in none of these ways; the log says why.")
    return found


def check_evaluation(context: RunContext) -> None:
    """Raise ValueError where there is nothing to measure on."""
    if not context.evaluation:
        raise ValueError("this needs an evaluation: give a text to measure on (--evaluation).")


def _possible(
    context: RunContext, chosen: Mapping[str, GradProbeConfig], known: Mapping[str, GradProbeConfig]
) -> dict[str, GradProbeConfig]:
    """What this model can be pruned with. A baseline that it cannot is left out; any other is an error."""
    for name, other in chosen.items():
        if known.get(name) != other:
            check_targets(context.model, context.targets, other)
    possible = feasible(context, {name: other for name, other in chosen.items() if known.get(name) == other})
    found = {name: other for name, other in chosen.items() if name in possible or known.get(name) != other}
    if not found:
        raise ValueError("this model can be pruned in none of these ways; the log says why.")
    return found


def _check_common(name: str, config: GradProbeConfig, common: GradProbeConfig) -> None:
    for option in _SHARED:
        if getattr(config, option) != getattr(common, option):
            raise ValueError(
                f"{name!r} has {option}={getattr(config, option)!r} and the others {getattr(common, option)!r}: a "
                "comparison is made on the same text and matrices."
            )
