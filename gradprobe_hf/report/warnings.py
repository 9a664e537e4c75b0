"""Warnings of a finished run: what a reader of its report has to know before they use the model.

One function each, of the whole run to a sentence or none; `WARNINGS` has them in the order in which they are told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.decisions.search import Limit
from gradprobe_hf.evaluation.divergence import PairedMeasurement
from gradprobe_hf.model.fsdp import is_sharded
from gradprobe_hf.model.targets import Target
from gradprobe_hf.report.original import original_of
from gradprobe_hf.report.report import SPARSE, MatrixRow
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.run.decision import PruningDecision
from gradprobe_hf.run.shapes.unit_evidence import units_that_stay
from gradprobe_hf.runtime.row_chunks import row_chunks

MET = 0.95  # of the sparsity that was asked for, before a report warns
TOLERATED = 1.05  # times the latency that was asked for, before a report warns


@dataclass(frozen=True)
class FinishedRun:
    """What a run has come to. The model still has its original weights.

    Attributes:
        rows: of its matrices.
        measured: the losses of the dense and the pruned model, where something was measured.
        metric: the task's metric of both, and its name.
    """

    context: RunContext
    decision: PruningDecision
    rows: Sequence[MatrixRow]
    measured: PairedMeasurement | None
    metric: dict[str, Any] | None

    @property
    def config(self) -> GradProbeConfig:
        return self.context.config

    @property
    def asked(self) -> float:
        """The sparsity that the masks are of: what a search has chosen, where there was one."""
        if self.config.max_metric_drop is None:
            return self.config.final_sparsity
        curve = self.decision.diagnostics.curve
        return max((float(point["sparsity"]) for point in curve if point["within"]), default=0.0)

    @cached_property
    def weights(self) -> int:
        """Of all targets."""
        return sum(row.weights for row in self.rows)

    @cached_property
    def pruned(self) -> int:
        return sum(row.pruned for row in self.rows)

    @cached_property
    def zeros_before(self) -> int:
        return sum(row.zeros_before for row in self.rows)

    @cached_property
    def zeros_after(self) -> int:
        return sum(row.zeros_after for row in self.rows)

    @property
    def was_sparse(self) -> bool:
        """Whether the model had been pruned before."""
        return self.zeros_before >= SPARSE * self.weights


def warnings_of(run: FinishedRun) -> list[str]:
    return [said for about in WARNINGS if (said := about(run)) is not None]


def _unreached(run: FinishedRun) -> str | None:
    """Experts without evidence."""
    names = run.decision.unreached
    if not names:
        return None
    sample = ", ".join(f"`{name}`" for name in names[:3]) + (", ..." if len(names) > 3 else "")
    return (
        f"{len(names)} of {len(run.context.targets)} matrices belong to experts that no token was sent to ({sample}): "
        "without evidence they go last and by magnitude. Calibrate on more text."
    )


def _emptied(run: FinishedRun) -> str | None:
    """Matrices of which nothing is left, in a budget of the whole model: what passes through them alone ends there."""
    if run.config.structure is not None or run.config.final_sparsity == 1:
        return None
    names = [row.name for row in run.rows if row.zeros_before < row.zeros_after == row.weights]
    if not names:
        return None
    sample = ", ".join(f"`{name}`" for name in names[:3]) + (", ..." if len(names) > 3 else "")
    return (
        f"{len(names)} of {len(run.rows)} matrices have no weight left ({sample}): by this calibration theirs cost "
        f"nothing, or less than all others. {advice_where_emptied(run.config)}"
    )


def advice_where_emptied(config: GradProbeConfig) -> str:
    """An option that this configuration may have, and that empties no matrix."""
    if config.group is not None or config.update_row.chooses_mask or config.decision_row.filters is not None:
        return "A lower sparsity leaves some in each."
    # A row, or a matrix, that has the whole budget rounds it.
    scope = "" if config.budget_scope in ("global", "block") else "scope='global' (--scope) with "
    return (
        f"{scope}max_matrix_sparsity={(1 + config.final_sparsity) / 2:.6g} (--max-matrix-sparsity) leaves some in each "
        "that is large enough."
    )


def _raised_damping(run: FinishedRun) -> str | None:
    found = run.decision.damping
    if not found or run.config.holds_out:
        return None
    name, most = max(found.items(), key=lambda item: item[1])
    return (
        f"The Hessians of {len(found)} matrices could not be inverted with damping={run.config.damping}; it "
        f"was raised, at most to {most:g} (`{name}`). More calibration text would help."
    )


def _missed_latency(run: FinishedRun) -> str | None:
    """Where the table promised what the whole model does not keep."""
    found, budget = run.decision.diagnostics.latency, run.config.shape_budget
    if found is None or budget is None or budget.share is None or found["ratio"] <= TOLERATED * budget.share:
        return None
    return (
        f"latency={budget.share:g} was asked for, and a model of the shape that was chosen took {found['ratio']:.2f} "
        f"of {original_of(run.context.origin).whose} time; the table of its blocks said {found['table']:.2f}. Give a "
        "smaller share, or measure again on a machine that does nothing else."
    )


def _budget(run: FinishedRun) -> str | None:
    """Where sparsity is not what was asked for."""
    asked, sparsity = run.asked, run.zeros_after / run.weights
    if run.config.decision_row.filters is not None:
        given_back = sum(run.decision.diagnostics.without_evidence.values())
        return (
            f"The threshold rule reached {sparsity:.2%} of at most {asked:.2%}; it gave back {given_back:,} candidates "
            "for want of evidence."
        )
    if run.config.structure is not None or not asked:  # a search that has kept nothing says so
        return None
    if run.zeros_after > run.pruned and sparsity > asked:
        return (
            f"Some units of the budget held more zeros than it asked for: sparsity is {sparsity:.4%}, not {asked:.4%}."
        )
    if sparsity < MET * asked:
        return (
            "Every unit of the budget (a row, say) rounds its share, and they are small: sparsity is "
            f"{sparsity:.4%}, not {asked:.4%}."
        )
    return None


def _zeros_changed_for_units(run: FinishedRun) -> str | None:
    """Where what is made smaller was sparse, and what makes up for it is not."""
    if run.config.structure is None or not run.was_sparse:
        return None
    left = run.zeros_after - run.pruned
    kept = run.zeros_before * (1 - run.pruned / run.weights)  # about as many, had none of them been changed
    if left >= kept / 2:
        return None
    return (
        f"The model had {run.zeros_before / run.weights:.1%} zeros, and has {left / run.weights:.1%} beside what went "
        "whole: the weights that stay were changed to make up for that, zeros too. Make the dense model smaller and "
        "prune that, or set update='none'."
    )


def _broken_pattern(run: FinishedRun) -> str | None:
    """Where a model with an n:m pattern loses inputs of a matrix that are not whole groups."""
    pattern, removal = run.context.origin.get("pattern"), run.decision.removal
    if pattern is None or removal is None:
        return None
    size = int(pattern.rpartition(":")[2])
    apart = set()
    for _, units in units_that_stay(removal):
        gone = units.columns(removal.units[units.reader.name])
        groups = gone[: len(gone) // size * size].unflatten(0, (-1, size))
        if not torch.equal(groups.any(1), groups.all(1)):
            apart.add(units.reader.role)
    if not apart:
        return None
    return (
        f"The model had a {pattern} pattern, and {', '.join(f'`{role}`' for role in sorted(apart))} will hold it no "
        f"more: where some inputs of a group of {size} go, those after them are in other groups. Make the dense model "
        "smaller, and prune that to the pattern."
    )


def _zeros_filled(run: FinishedRun) -> str | None:
    """Where a sparse model is pruned again, and zeros that it had are weights now."""
    model = run.context.model
    if run.config.structure is not None or not run.was_sparse or is_sharded(model):
        return None
    filled = sum(_filled(model, target, run.decision) for target in run.context.targets)
    if not filled:
        return None
    return (
        f"The model had {run.zeros_before / run.weights:.1%} zeros, and {filled:,} of them "
        f"({filled / run.zeros_before:.1%}) are none now: a weight update gives kept weights new values, and may keep "
        "what was zero; an n:m pattern that held before may hold no more. Prune the dense model to what you want at "
        "once, or set update='none' without a refinement, which fills no zero."
    )


def _filled(model: PreTrainedModel, target: Target, decision: PruningDecision) -> int:
    """Weights of a matrix that were zero and are none any more."""
    updated = decision.new_weights.get(target.name)
    if updated is None:
        return 0
    matrix = target.matrix(model)
    return sum(int(((matrix[rows] == 0) & (updated[rows] != 0)).sum()) for rows in row_chunks(matrix.shape))


def _endless_search(run: FinishedRun) -> str | None:
    """Where the metric did not end the search."""
    drop = run.config.max_metric_drop
    kept = [point["within"] for point in run.decision.diagnostics.curve]
    if drop is None or len(set(kept)) != 1:
        return None
    if not kept[0]:
        return f"No sparsity that was tried keeps the metric within {drop}: nothing was pruned."
    return (
        f"Every sparsity that was tried keeps the metric within {drop}: sparsity={run.config.final_sparsity:g}, the "
        "most that was allowed, ended the search."
    )


def _broken_promise(run: FinishedRun) -> str | None:
    """Where the data that did not choose the sparsity shows more than `max_metric_drop`."""
    measured, task_metric, drop = run.measured, run.context.metric, run.config.max_metric_drop
    if not run.context.selection or measured is None:
        return None
    sign, dense, pruned = 1, measured.dense.metric, measured.pruned.metric
    if task_metric is not None and run.metric is not None:
        sign, dense, pruned = task_metric.sign, run.metric["dense"], run.metric["pruned"]
    if Limit.of(sign * dense, drop).keeps(sign * pruned):
        return None
    return (
        f"On the half of the evaluation that did not choose the sparsity the metric went from {dense:.4g} to "
        f"{pruned:.4g}, beyond max_metric_drop={drop}; more evaluation data would choose with more certainty."
    )


WARNINGS: tuple[Callable[[FinishedRun], str | None], ...] = (
    _unreached,
    _emptied,
    _raised_damping,
    _missed_latency,
    _budget,
    _zeros_changed_for_units,
    _broken_pattern,
    _zeros_filled,
    _endless_search,
    _broken_promise,
)
