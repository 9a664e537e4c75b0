"""Build: one finished run -> its report."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from gradprobe_hf.data.batches import Batches, sketch
from gradprobe_hf.estimation.peak import peak_memory
from gradprobe_hf.evaluation.divergence import PairedMeasurement
from gradprobe_hf.model.families import objective
from gradprobe_hf.model.fsdp import is_sharded
from gradprobe_hf.model.loading.stored_files import is_loaded_here, loaded_commit, loaded_revision
from gradprobe_hf.model.parameters import parameter_count
from gradprobe_hf.model.passes.loss import is_in_nats
from gradprobe_hf.model.targets import Target
from gradprobe_hf.report.report import SPARSE, LeftOut, MatrixRow, Report
from gradprobe_hf.report.warnings import FinishedRun, warnings_of
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.run.decision import PruningDecision
from gradprobe_hf.run.diagnostics import Diagnostics
from gradprobe_hf.runtime.paths import cached_repository, published_as
from gradprobe_hf.runtime.row_chunks import row_chunks
from gradprobe_hf.selection.packed_masks import rows_of
from gradprobe_hf.structures.removal import Removal
from gradprobe_hf.structures.shapes import shape_values
from gradprobe_hf.tasks.table import counted_as

PACKAGES = ("gradprobe_hf", "torch", "transformers", "accelerate", "datasets", "huggingface_hub", "safetensors")


def build_report(
    context: RunContext,
    decision: PruningDecision,
    measured: PairedMeasurement | None,
    metric: dict[str, Any] | None = None,
    foreseen: Sequence[str] = (),
) -> Report:
    """Everything that a reader of the card or the JSON may want to know. The model still has its original weights.

    Args:
        measured: the losses of the dense and the pruned model, where something was measured.
        metric: the task's metric of both, and its name.
        foreseen: warnings that were known before any work.
    """
    config = context.config
    rows = matrix_rows(context, decision)
    evaluation = _data(context, context.evaluation)
    diagnostics = decision.diagnostics
    return Report(
        model=_describe(context) | pruned_before(context, rows),
        config=config.to_dict(),
        matrices=rows,
        unreached=[LeftOut(one.name, one.block, one.role, one.numel) for one in context.unreached],
        calibration=_calibration(context),
        evaluation=None if measured is None else {**(evaluation or {}), **measured.to_dict(), "metric": metric},
        selection=_selection(context, diagnostics, measured),
        probes=diagnostics.probe_losses,
        passes=diagnostics.passes,
        refinement={block: asdict(found) for block, found in decision.matched.items()},
        structure=None if decision.removal is None else _smaller(context, decision.removal, diagnostics),
        curve=diagnostics.curve,
        timings=dict(context.stopwatch.seconds),
        memory={**_peaks(context), "accumulator_bytes": diagnostics.accumulator_bytes},
        execution=context.notes,
        versions=versions(),
        warnings=[*foreseen, *warnings_of(FinishedRun(context, decision, rows, measured, metric))],
    )


def published_name(model: PreTrainedModel) -> str:
    """The model's name; of a local folder its own alone: reports are published, and paths tell about the machine."""
    return published_as(model.name_or_path)


def _source(model: PreTrainedModel) -> dict[str, str]:
    """Which of the weights of a repository were read, as far as it is known: `revision`, if one was named, `commit`."""
    if not is_loaded_here(model):
        return {}
    if Path(model.name_or_path).is_dir():
        is_snapshot = cached_repository(model.name_or_path) is not None
        return {"commit": Path(os.path.abspath(model.name_or_path)).name} if is_snapshot else {}
    found = {"revision": loaded_revision(model), "commit": loaded_commit(model)}
    return {name: value for name, value in found.items() if value is not None}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
            found[package] = "unknown"
    return found


def _peaks(context: RunContext) -> dict[str, int]:
    """The highest memory of the run, in an earlier process too that it goes on from."""
    return peak_memory() if context.snapshots is None else context.snapshots.peaks()


def _data(context: RunContext, batches: Batches) -> dict[str, Any] | None:
    """What the batches are, and what the task calls their rows and the terms of their loss; None of none."""
    if not batches:
        return None
    row, term = counted_as(context.task, batches)
    # A loss of the user's own is a mean over rows.
    return {**batches.describe(), "rows": row, "term": row if context.loss_fn else term}


def _calibration(context: RunContext) -> dict[str, Any] | None:
    """With what it is known again by, when something is measured later."""
    data = _data(context, context.calibration)
    return data and {**data, "sketch": sketch(context.calibration)}


def _describe(context: RunContext) -> dict[str, Any]:
    model, task = context.model, context.task
    return {
        "name": published_name(model),
        **_source(model),
        "class": type(model).__name__.removeprefix("FSDP"),  # FSDP2 renames the class of what it shards
        "objective": objective(model),
        "loss_in_nats": context.loss_fn is None and is_in_nats(model),
        "task": task.name if task else None,
        "parameters": parameter_count(model),
        "target_weights": sum(target.numel for target in context.targets),
        "dtype": str(model.dtype).removeprefix("torch."),
        "processing_class": type(context.processing_class).__name__,
        "has_chat_template": bool(getattr(context.processing_class, "chat_template", None)),
        **({"own_code": own} if (own := _own_code(model)) else {}),
        **context.origin,
    }


def pruned_before(context: RunContext, rows: Sequence[MatrixRow]) -> dict[str, float]:
    """The sparsity of a model that is sparse and says nothing of it: pruned in memory, or by something else."""
    zeros, weights = sum(row.zeros_before for row in rows), sum(row.weights for row in rows)
    return {"pruned_to": zeros / weights} if zeros >= SPARSE * weights and "pruned_to" not in context.origin else {}


def _own_code(model: PreTrainedModel) -> list[str]:
    """The Auto classes that load a model by code of its own, beside its weights; none of a class of transformers.

    The configuration of a checkpoint may name such code where transformers has had a class for it since, and uses that.
    """
    # FSDP2 puts a class of torch in front of that of what it shards.
    cls = next(one for one in type(model).__mro__ if not one.__module__.startswith("torch."))
    if cls.__module__.startswith("transformers."):
        return []
    return sorted(getattr(model.config, "auto_map", None) or {})


def matrix_rows(context: RunContext, decision: PruningDecision) -> list[MatrixRow]:
    """One row a matrix; of a sharded model every process counts its shards."""
    model, targets = context.model, context.targets
    blind, ranges = decision.diagnostics.without_evidence, decision.diagnostics.score_ranges
    counts = torch.tensor([[*_counts(model, target, decision), blind.get(target.name, 0)] for target in targets])
    if is_sharded(model):
        context.processes.sum_(counts)
    return [
        MatrixRow(
            name=target.name,
            block=target.block,
            role=target.role,
            shape=target.shape,
            weights=target.numel,
            budget=round(context.config.final_sparsity * target.numel),
            pruned=pruned,
            zeros_before=before,
            zeros_after=after,
            score_min=ranges.get(target.name, (None, None))[0],
            score_max=ranges.get(target.name, (None, None))[1],
            no_evidence=no_evidence,
        )
        for target, (pruned, before, after, no_evidence) in zip(targets, counts.tolist(), strict=True)
    ]


def _counts(model: PreTrainedModel, target: Target, decision: PruningDecision) -> tuple[int, int, int]:
    """Weights that go, that are zero already, and that will be zero."""
    matrix = target.matrix(model)
    pruned = before = after = 0
    for rows in row_chunks(matrix.shape):
        mask, zero = rows_of(decision.masks, target.name, rows), matrix[rows] == 0
        pruned, before = pruned + int(mask.sum()), before + int(zero.sum())
        updated = decision.new_weights.get(target.name)
        after += int((mask.to(zero.device) | zero if updated is None else updated[rows] == 0).sum())
    return pruned, before, after


def _smaller(context: RunContext, removal: Removal, diagnostics: Diagnostics) -> dict[str, Any]:
    """What goes whole, and what the configuration and the file are before and after."""
    model = context.model
    after, before = shape_values(model.config, removal), model.config.to_dict()
    return {
        "removed": dict(removal.plan.going),
        "blocks": [block for block in removal.plan.blocks if block in removal.blocks],
        "without": diagnostics.blocks_without,
        "candidates": diagnostics.shapes,
        "dense_loss": diagnostics.dense_loss,
        "latency": diagnostics.latency,
        # `head_dim` may be written down now, and be what it was before.
        "before": {name: before.get(name) for name in after if before.get(name) != after[name]},
        "after": {name: value for name, value in after.items() if before.get(name) != value},
        "parameters": {
            "before": parameter_count(model),
            "after": removal.parameters(model),
        },
    }


def _selection(
    context: RunContext, diagnostics: Diagnostics, measured: PairedMeasurement | None
) -> dict[str, Any] | None:
    """What chose the sparsity; None where nothing did."""
    kept = [point for point in diagnostics.curve if point["within"]]
    if not diagnostics.curve:
        return None
    own = "loss" if measured is None or measured.dense.perplexity is None else "perplexity"
    if context.metric is not None:
        own = context.metric.metric.title
    return {
        **(
            {**context.selection.describe(), "sketch": sketch(context.selection)}
            if context.selection
            else {"source": None}
        ),
        "metric": own if context.selection else "metric_fn",
        "limit": diagnostics.curve[-1]["limit"],
        "value": max(kept, key=lambda point: point["sparsity"])["metric"] if kept else None,
    }
