"""The threshold sweep: what thresholds of the published rule come to, from one pair of probes.

Several sparsities of the candidates come from the same pair: the first probe proposes for each, and the second has
shrunk the candidates of the largest. There a row is what a run gives; below it, a run would have shrunk fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from gradprobe_hf.comparison.compare import check_evaluation, check_without_recovery
from gradprobe_hf.config.config import GradProbeConfig, resolve_config
from gradprobe_hf.config.values import GradientThreshold
from gradprobe_hf.decisions.search import Limit
from gradprobe_hf.memory.memory_plan import open_run
from gradprobe_hf.model.passes.loss import LossFunction
from gradprobe_hf.model.passes.own_forward import with_own_forward
from gradprobe_hf.run.context import RunRequest
from gradprobe_hf.run.reach import reachable
from gradprobe_hf.run.request.agreement import check_same_call
from gradprobe_hf.run.request.checks import check_request
from gradprobe_hf.run.request.foreseen import foreseen_warnings
from gradprobe_hf.run.request.inputs import choosing_apart, load_inputs, written
from gradprobe_hf.runtime.option_checks import check_drop
from gradprobe_hf.runtime.plain_computation import plain_computation
from gradprobe_hf.selection.published_rule import thresholds as thresholds_of
from gradprobe_hf.threshold_sweep.measurements import ThresholdMeasurements, left_dense
from gradprobe_hf.threshold_sweep.options import check_in_turn, checked_sparsities, checked_thresholds, threshold_rule
from gradprobe_hf.threshold_sweep.rows import ThresholdSweep, metric_of

THRESHOLDS = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0)


@plain_computation()
@with_own_forward
def sweep_gradient_thresholds(
    model_or_id: PreTrainedModel | str | Path,
    thresholds: Sequence[GradientThreshold] = THRESHOLDS,
    config: GradProbeConfig | None = None,
    *,
    sparsities: Sequence[float] | None = None,
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
        config: whose candidates are decided about, with `probes=2, rule="threshold", update="none"`. With
            `order="sequential"` and `max_metric_drop`, thresholds are chosen block by block: in each the largest
            number that keeps the drop up to there, in proportion to the blocks so far, which stay pruned.
        sparsities: of candidates, in place of the configuration's `sparsity`: every threshold is tried with each.
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
    config = resolve_config(config)
    if config.structure is not None:
        raise ValueError(
            f"structure={config.structure!r} has no part in a sweep of thresholds, which decide about single weights. "
            "Leave structure unset."
        )
    config = threshold_rule(config)
    check_without_recovery(config)
    if config.metric is not None:
        raise ValueError(
            f"metric={config.metric!r} has no part in a sweep, whose rows and max_metric_drop are of the loss. Leave "
            "metric unset."
        )
    in_turn = config.order == "sequential"
    wanted, shares = checked_thresholds(thresholds, config), checked_sparsities(sparsities, config)
    if in_turn:
        check_in_turn(wanted, max_metric_drop)
    config = config.varied(sparsity=max(shares), order="joint")
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
    options = config.to_dict() | {"thresholds": wanted, "sparsities": shares, "max_metric_drop": max_metric_drop}
    check_same_call(options, loss_fn=loss_fn)
    loaded = load_inputs(request)
    check_evaluation(loaded)
    if max_metric_drop is not None:
        loaded = choosing_apart(loaded)
    for one in wanted:
        thresholds_of(loaded.targets, one)  # says which pattern does not fit, before any work
    with open_run(written(loaded)) as context:
        context = reachable(context)
        foreseen_warnings(context)
        for one in wanted:
            thresholds_of(context.targets, one)  # nor any that names only what is left out
        sweep = ThresholdMeasurements(context)
        if max_metric_drop is None:
            return ThresholdSweep(sweep.dense, sweep.rows(wanted, shares))
        limit = Limit.of(metric_of(sweep.dense), max_metric_drop)
        numbers = [one for one in wanted if isinstance(one, (int, float))]
        rows = sweep.rows_in_turn(numbers, shares, limit) if in_turn else sweep.rows(wanted, shares, limit)
        # Block by block a row may be of no block at all: a dense model, and no threshold.
        kept = [row for row in rows if row.gradient_threshold != {} and limit.keeps(metric_of(row))]
        if not kept:
            return ThresholdSweep(sweep.dense, rows)
        tuned = max(kept, key=lambda row: row.zeros)
        return ThresholdSweep(
            sweep.dense,
            rows,
            tuned.gradient_threshold,
            sweep.reported(tuned),
            tuned.candidates,
            left_dense(context.targets, tuned) if in_turn else (),
        )
