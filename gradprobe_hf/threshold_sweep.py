"""The threshold sweep: what thresholds of the published rule come to, from one pair of probes.

Several sparsities of the candidates come from the same pair: the first probe proposes for each, and the second has
shrunk the candidates of the largest. There a row is what a run gives; below it, a run would have shrunk fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
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
from gradprobe_hf.model.targets import Target
from gradprobe_hf.run.context import RunContext, RunRequest
from gradprobe_hf.run.decide import PruningDecision
from gradprobe_hf.run.diagnostics import Diagnostics
from gradprobe_hf.run.inputs import choosing_apart, load_inputs, written
from gradprobe_hf.run.probe_pair import ProbePair
from gradprobe_hf.run.reach import reachable
from gradprobe_hf.run.request_checks import check_request
from gradprobe_hf.runtime.option_checks import check_drop
from gradprobe_hf.selection.packed_masks import PackedMasks
from gradprobe_hf.selection.published_rule import thresholds as thresholds_of

# The method of every row.
_METHOD: dict[str, Any] = {"probes": 2, "rule": "threshold", "update": "none"}
THRESHOLDS = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0)
BISECTIONS = 6


@dataclass(frozen=True)
class ThresholdRow:
    """One threshold: the true sparsity of the target matrices, and the loss (in nats) and perplexity there.

    Attributes:
        candidates: the share of the weights that was proposed.
    """

    gradient_threshold: GradientThreshold
    sparsity: float
    zeros: int
    loss: float
    perplexity: float | None
    candidates: float


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
        tuned_sparsity: of the candidates that go with the tuned threshold: the configuration's `sparsity`.
        left_dense: blocks for which no threshold kept the limit (`order="sequential"`): its `exclude`.
    """

    dense: Measurement
    rows: list[ThresholdRow]
    tuned: GradientThreshold | None = None
    reported: TunedMeasurement | None = None
    tuned_sparsity: float | None = None
    left_dense: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        reported = None if self.reported is None else asdict(self.reported)
        rows = [asdict(row) for row in self.rows]
        return {
            "dense": self.dense.to_dict(),
            "rows": rows,
            "tuned": self.tuned,
            "tuned_sparsity": self.tuned_sparsity,
            "left_dense": list(self.left_dense),
            "reported": reported,
        }


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
    config = _threshold_rule(resolve_config(config))
    check_without_recovery(config)
    in_turn = config.order == "sequential"
    wanted, shares = _thresholds(thresholds, config), _sparsities(sparsities, config)
    if in_turn:
        _check_in_turn(wanted, max_metric_drop)
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
        sweep = _Sweep(context)
        if max_metric_drop is None:
            return ThresholdSweep(sweep.dense, sweep.rows(wanted, shares))
        limit = allowed(_metric(sweep.dense), max_metric_drop)
        numbers = [one for one in wanted if isinstance(one, (int, float))]
        rows = sweep.rows_in_turn(numbers, shares, limit) if in_turn else sweep.rows(wanted, shares, limit)
        kept = [row for row in rows if _metric(row) <= limit]
        if not kept:
            return ThresholdSweep(sweep.dense, rows)
        tuned = max(kept, key=lambda row: row.zeros)
        return ThresholdSweep(
            sweep.dense,
            rows,
            tuned.gradient_threshold,
            sweep.reported(tuned),
            tuned.candidates,
            _left_dense(context.targets, tuned) if in_turn else (),
        )


class _Sweep:
    """One pair of probes of a context, and what is measured of its decisions."""

    def __init__(self, context: RunContext) -> None:
        self._context, self._comparison, self._diagnostics = context, Comparison(context), Diagnostics()
        self._chosen_by = context.selection or context.evaluation
        self.dense = self._comparison.measured(None, "dense", self._chosen_by)
        self._pair = ProbePair(context, context.targets, self._diagnostics)
        self._pair.run(context.config.final_sparsity)
        self._in_turn: dict[float, PackedMasks] = {}  # sparsity of the candidates -> what was chosen block by block

    def rows(
        self, wanted: Sequence[GradientThreshold], sparsities: Sequence[float], limit: float | None = None
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

    def rows_in_turn(self, numbers: Sequence[float], sparsities: Sequence[float], limit: float) -> list[ThresholdRow]:
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
        self, numbers: Sequence[float], sparsity: float, limit: float
    ) -> tuple[dict[str, float], PackedMasks]:
        """Pattern of each block -> the largest threshold that keeps its share of the drop; a block without is dense."""
        candidates = self._candidates(sparsity)
        within = {number: self._pair.masks_within(number, candidates) for number in sorted(numbers, reverse=True)}
        patterns = list(dict.fromkeys(map(_pattern, self._context.targets)))
        dense, chosen = _metric(self.dense), dict[str, float]()
        for number, pattern in enumerate(patterns, 1):
            share = dense + (limit - dense) * number / len(patterns)
            for threshold in within:
                masks = self._put_together(chosen | {pattern: threshold}, within)
                if _metric(self._row(threshold, sparsity, masks)) <= share:
                    chosen[pattern] = threshold
                    break
        in_order = sorted(chosen, key=lambda pattern: pattern == "*")  # the first that matches wins
        return {pattern: chosen[pattern] for pattern in in_order}, self._put_together(chosen, within)

    def _put_together(self, chosen: Mapping[str, float], within: Mapping[float, PackedMasks]) -> PackedMasks:
        """Of each block the masks of its threshold; nothing of the others."""
        found, any_ = PackedMasks(), next(iter(within.values()))
        for target in self._context.targets:
            threshold, name = chosen.get(_pattern(target)), target.name
            packed = torch.zeros_like(any_.packed(name)) if threshold is None else within[threshold].packed(name)
            found.add_packed(name, packed, any_.columns(name))
        return found


def _pattern(target: Target) -> str:
    """Of the names of its block."""
    return f"{target.block}.*" if target.block else "*"


def _left_dense(targets: Sequence[Target], row: ThresholdRow) -> tuple[str, ...]:
    assert isinstance(row.gradient_threshold, Mapping), "chosen block by block"
    return tuple(one for one in dict.fromkeys(map(_pattern, targets)) if one not in row.gradient_threshold)


def _thresholds(thresholds: Any, config: GradProbeConfig) -> list[GradientThreshold]:
    if isinstance(thresholds, str) or not isinstance(thresholds, Sequence):
        raise TypeError(f"thresholds must be a list of thresholds, like [0.1, 0.5], got {thresholds!r}.")
    wanted = [replace(config, gradient_threshold=one).gradient_threshold for one in thresholds]
    if not wanted:
        raise ValueError("thresholds is empty: there is nothing to try.")
    return wanted


def _sparsities(sparsities: Any, config: GradProbeConfig) -> list[float]:
    """Each one that a configuration may have."""
    if sparsities is None:
        return [config.final_sparsity]
    if isinstance(sparsities, str) or not isinstance(sparsities, Sequence) or not sparsities:
        raise TypeError(f"sparsities must be a list of them, like [0.3, 0.5], got {sparsities!r}.")
    if "sparsity" in config.given:
        raise ValueError(
            f"sparsity={config.sparsity!r} has no part in a sweep with sparsities={list(sparsities)!r}: leave it unset."
        )
    return [config.varied(sparsity=one).final_sparsity for one in sparsities]


def _check_in_turn(wanted: Sequence[GradientThreshold], max_metric_drop: float | str | None) -> None:
    """Raise ValueError for what cannot be chosen block by block."""
    if max_metric_drop is None:
        raise ValueError(
            "order='sequential' has no part in a sweep without max_metric_drop, by which thresholds are chosen block "
            "by block: set that, or leave order unset."
        )
    for one in wanted:
        if not isinstance(one, (int, float)):
            raise ValueError(f"order='sequential' chooses numbers, one for each block: leave out {one!r}.")


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
