"""The threshold sweep: what thresholds of the published rule come to, from one pair of probes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from gradprobe_hf.comparison.compare import check_evaluation, check_without_recovery
from gradprobe_hf.comparison.rows import Comparison
from gradprobe_hf.config.config import GradProbeConfig, resolve_config
from gradprobe_hf.config.values import GradientThreshold
from gradprobe_hf.data.batches import Batches
from gradprobe_hf.decisions.search import allowed
from gradprobe_hf.evaluation.perplexity import Measurement
from gradprobe_hf.memory.memory_plan import open_run
from gradprobe_hf.model.loss import LossFunction
from gradprobe_hf.run.context import RunRequest
from gradprobe_hf.run.decide import PruningDecision
from gradprobe_hf.run.diagnostics import Diagnostics
from gradprobe_hf.run.inputs import choosing_apart, load_inputs, written
from gradprobe_hf.run.probe_pair import ProbePair
from gradprobe_hf.run.reach import reachable
from gradprobe_hf.run.request_checks import check_request
from gradprobe_hf.runtime.option_checks import check_drop
from gradprobe_hf.selection.published_rule import thresholds as thresholds_of

# The method of every row.
_METHOD: dict[str, Any] = {"probes": 2, "rule": "threshold", "update": "none"}
THRESHOLDS = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0)
BISECTIONS = 6


@dataclass(frozen=True)
class ThresholdRow:
    """One threshold: the true sparsity of the target matrices, and the loss (in nats) and perplexity there."""

    gradient_threshold: GradientThreshold
    sparsity: float
    zeros: int
    loss: float
    perplexity: float | None


@dataclass(frozen=True)
class TunedMeasurement:
    """What a tuned threshold comes to on text that did not choose it: the dense model, and the threshold's row."""

    dense: Measurement
    row: ThresholdRow


@dataclass(frozen=True)
class ThresholdSweep:
    """What `sweep_gradient_thresholds` returns.

    Attributes:
        dense: the loss of the model as it is.
        rows: in the order in which they were tried; those of the bisection are the last.
        tuned: the threshold with the most zeros whose metric is within `max_metric_drop`; None if there is none, or
            nothing was asked.
        reported: the tuned threshold and the dense model on the half of the evaluation that did not choose it; `dense`
            and `rows` are of the half that did. None where nothing was tuned.
    """

    dense: Measurement
    rows: list[ThresholdRow]
    tuned: GradientThreshold | None = None
    reported: TunedMeasurement | None = None

    def to_dict(self) -> dict[str, Any]:
        reported = None if self.reported is None else asdict(self.reported)
        rows = [asdict(row) for row in self.rows]
        return {"dense": self.dense.to_dict(), "rows": rows, "tuned": self.tuned, "reported": reported}


def sweep_gradient_thresholds(
    model_or_id: PreTrainedModel | str | Path,
    thresholds: Sequence[GradientThreshold] = THRESHOLDS,
    config: GradProbeConfig | None = None,
    *,
    max_metric_drop: float | str | None = None,
    calibration: Any = None,
    processing_class: Any = None,
    evaluation: Any = None,
    loss_fn: LossFunction | None = None,
    progress: bool = True,
    **from_pretrained_kwargs: Any,
) -> ThresholdSweep:
    """Measure the threshold decision at several thresholds; the model is probed twice in all, and left as it was.

    Args:
        thresholds: each a number, a dict from patterns, or `"adaptive"`.
        config: whose candidates are decided about, with `probes=2, rule="threshold", update="none"`.
        max_metric_drop: also look, by bisection between the numbers, for the sparsest model whose perplexity is up by
            no more than this, absolute or like `"5%"`. One half of the evaluation then chooses, and the threshold it
            chose is reported on the other.
        calibration, processing_class, evaluation, loss_fn, from_pretrained_kwargs: as in `prune_pretrained`; an
            evaluation there must be.
        progress: show progress bars.

    Raises:
        ValueError: a threshold or a drop that is none, an option without a part in it, nothing to measure on; and what
            `prune_pretrained` raises.
    """
    if max_metric_drop is not None:
        check_drop(max_metric_drop)
    config = _threshold_rule(resolve_config(config))
    check_without_recovery(config)
    if config.order != "joint":
        raise ValueError(
            "thresholds are measured on masks of the whole model: order='sequential' has no part in it; leave it unset."
        )
    if isinstance(thresholds, str) or not isinstance(thresholds, Sequence):
        raise TypeError(f"thresholds must be a list of thresholds, like [0.1, 0.5], got {thresholds!r}.")
    wanted = [replace(config, gradient_threshold=one).gradient_threshold for one in thresholds]
    if not wanted:
        raise ValueError("thresholds is empty: there is nothing to try.")
    request = RunRequest(
        model_or_id,
        config,
        calibration,
        processing_class,
        evaluation,
        loss_fn,
        from_pretrained_kwargs,
        progress=progress,
    )
    check_request(request, sweep_gradient_thresholds)
    loaded = load_inputs(request)
    check_evaluation(loaded)
    if max_metric_drop is not None:
        loaded = choosing_apart(loaded)
    for one in wanted:
        thresholds_of(loaded.targets, one)  # says which pattern does not fit, before any work
    with open_run(written(loaded)) as context:
        context = reachable(context)
        for one in wanted:
            thresholds_of(context.targets, one)  # nor any that names only what is left out
        comparison, diagnostics = Comparison(context), Diagnostics()
        chosen_by = context.selection or context.evaluation
        dense = comparison.measured(None, "dense", chosen_by)
        pair = ProbePair(context, context.targets, diagnostics)
        pair.run(config.final_sparsity)

        def tried(threshold: GradientThreshold, batches: Batches = chosen_by) -> ThresholdRow:
            label = f"threshold {threshold}"
            decision = PruningDecision(pair.masks_within(threshold), diagnostics)
            found = comparison.measured(decision, label, batches, allows_nan=True)
            row = comparison.describe(label, config, decision, 0.0, found)
            return ThresholdRow(threshold, row.sparsity, row.zeros, row.loss, row.perplexity)

        rows = [tried(threshold) for threshold in wanted]
        if max_metric_drop is None:
            return ThresholdSweep(dense, rows)
        limit = allowed(_metric(dense), max_metric_drop)
        rows += refined(rows, limit, tried)
        kept = [row for row in rows if _metric(row) <= limit]
        if not kept:
            return ThresholdSweep(dense, rows)
        tuned = max(kept, key=lambda row: row.zeros).gradient_threshold
        unseen = TunedMeasurement(comparison.measured(None, "dense"), tried(tuned, context.evaluation))
    return ThresholdSweep(dense, rows, tuned, unseen)


def _threshold_rule(config: GradProbeConfig) -> GradProbeConfig:
    """The configuration with the method of every row.

    Raises:
        ValueError: another method was asked for.
    """
    of_preset = "preset" in config.given
    for name, value in _METHOD.items():
        if (of_preset or name in config.given) and getattr(config, name) != value:
            option, stands_for = ("preset", f"preset={config.preset!r}, which is ") if of_preset else (name, "")
            raise ValueError(
                f"{stands_for}{name}={getattr(config, name)!r} has no part in a sweep of thresholds, which is of two "
                f"probes and changes no kept weight: leave {option} unset, or set {name}={value!r}."
            )
    if "gradient_threshold" in config.given and config.rule == "threshold":
        raise ValueError(
            f"gradient_threshold={config.gradient_threshold!r} has no part in a sweep, which takes thresholds=: leave "
            "it unset."
        )
    return config.varied(**_METHOD, preset=None)


def refined(
    rows: Sequence[ThresholdRow], limit: float, tried: Callable[[GradientThreshold], ThresholdRow]
) -> list[ThresholdRow]:
    """More rows: bisection between the last number that keeps the limit and the first behind it that does not."""
    numbers = sorted((row for row in rows if isinstance(row.gradient_threshold, (int, float))), key=_threshold)
    within = [_threshold(row) for row in numbers if _metric(row) <= limit]
    beyond = [_threshold(row) for row in numbers if _metric(row) > limit and within and _threshold(row) > within[-1]]
    found: list[ThresholdRow] = []
    if beyond:
        low, high = within[-1], beyond[0]
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            found.append(tried(middle))
            low, high = (middle, high) if _metric(found[-1]) <= limit else (low, middle)
    return found


def _metric(found: Measurement | ThresholdRow) -> float:
    return found.loss if found.perplexity is None else found.perplexity


def _threshold(row: ThresholdRow) -> float:
    assert isinstance(row.gradient_threshold, (int, float)), "chosen so"
    return float(row.gradient_threshold)
