"""What a recovery gives back: the model, and the report of its pruning with what the training came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from gradprobe_hf.checkpoint.saving import Savable
from gradprobe_hf.checkpoint.write import Checkpoint
from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.config.recovery import RecoveryConfig
from gradprobe_hf.data.batches import Batches
from gradprobe_hf.estimation.peak import higher, peak_memory
from gradprobe_hf.evaluation.divergence import PairedMeasurement
from gradprobe_hf.model.families import objective
from gradprobe_hf.model.loading.processing import about_missing_processing
from gradprobe_hf.model.parameters import parameter_bytes, parameter_count
from gradprobe_hf.model.targets import default_targets, every_matrix
from gradprobe_hf.recovery.distil import Trained
from gradprobe_hf.recovery.text import RecoveryText
from gradprobe_hf.report.build import published_name, versions
from gradprobe_hf.report.report import SPARSE, MatrixRow, Report
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.tasks.table import counted_as, task_for

_WORSE = "Recovery made the model worse on"  # how the warning begins
# And those of `Trained`, and of the teacher.
_OF_TRAINING = ("No step brought", "As it is stored", "The recovery trained on text alone", "What was pruned is")


@dataclass(frozen=True, repr=False)
class RecoverResult(Savable):
    """What `recover_pretrained` returns.

    Attributes:
        model: the model; its zeros are where they were.
        report: that of the pruning, where there is one; `report.recovery` and `report.evaluation` are of the recovery.
        config: how the model was pruned; None where that was not done with this package.
        recovery: how it was trained.
        processing_class: the tokenizer.
        processes: who took part. The main one writes.
        weights: a fingerprint of the model as it was handed back.
        output_dir: where it was saved; None: nowhere.
    """

    model: PreTrainedModel
    report: Report
    config: GradProbeConfig | None
    recovery: RecoveryConfig
    processing_class: Any
    processes: Processes = field(default_factory=Processes)
    weights: str = ""
    output_dir: str | Path | None = None

    @property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint(self.model, self.processing_class, self.config, self.report)


@dataclass(frozen=True)
class Taught:
    """What a report says of the dense model that a recovery goes towards: name, parameters, their bytes, and whether it
    is sparse itself, having been pruned before."""

    name: str
    parameters: int
    bytes: int
    is_sparse: bool

    @classmethod
    def by(cls, teacher: PreTrainedModel) -> Taught:
        targets = every_matrix(teacher)
        zeros = sum(int((target.matrix(teacher) == 0).sum()) for target in targets)
        is_sparse = zeros >= SPARSE * sum(target.numel for target in targets)
        return cls(published_name(teacher), parameter_count(teacher), parameter_bytes(teacher), is_sparse)


def described(measured: PairedMeasurement | None, metric: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """What was measured of the dense and the pruned model, in JSON types; None where nothing was.

    Args:
        metric: the task's, of both, where there is one.
    """
    return None if measured is None else {**measured.to_dict(), "metric": dict(metric) if metric else None}


def described_recovery(
    trained: Trained, text: RecoveryText, config: RecoveryConfig, teacher: Taught, before: dict[str, Any] | None
) -> dict[str, Any]:
    """The section of a report, in JSON types.

    Args:
        before: what was measured of the dense and the pruned model, as `described`.
    """
    return {
        **trained.to_dict(),
        "held_out": {str(step): value for step, value in trained.held_out.items()},
        "rows": "windows" if text.layout.is_causal else "rows",
        "unit": "tokens" if "input_ids" in text.rows[0] else "rows",
        "windows": len(text.trained),
        "held_out_windows": text.held_out,
        "text": dict(text.described),
        "options": config.to_dict(),
        "teacher": asdict(teacher),
        "before": before,
    }


def recovered_report(
    report: Report,
    model: PreTrainedModel,
    recovery: dict[str, Any],
    evaluation: Batches,
    after: dict[str, Any] | None,
    seconds: Mapping[str, float],
) -> Report:
    """The report of a pruning, after the recovery; what was measured before it stands in `recovery`."""
    # The rows of a model that lost whole structures are of the dense one's matrices: what they say stays.
    found = every_matrix(model) if report.structure is None else ()
    targets = {target.name: target for target in found}
    rows = [
        replace(row, zeros_after=int((targets[row.name].matrix(model) == 0).sum())) if row.name in targets else row
        for row in report.matrices
    ]
    if (earlier := report.recovery) is not None:
        recovery = {**recovery, "earlier_steps": earlier["steps"] + earlier.get("earlier_steps", 0)}
    measured = None
    if after is not None:
        task = task_for(report.model.get("task"), type(model).__name__, model.config.is_encoder_decoder)
        row, term = ("windows", "tokens") if task is None else counted_as(task, evaluation)
        measured = {**evaluation.describe(), "rows": row, "term": term, **after}
    recovered = replace(
        report,
        matrices=rows,
        evaluation=measured,
        recovery=recovery,
        timings=timings_of(report, seconds),
        # With the seconds of the pruning goes its memory.
        memory=dict(report.memory) | higher(peak_memory(), report.memory),
        versions=versions(),
    )
    return told_if_worse(recovered)


def told_if_worse(report: Report) -> Report:
    """With the recovery's warnings, and one where it led away from the dense model on what is measured; without those
    of an earlier one."""
    others = [said for said in report.warnings if not said.startswith((_WORSE, *_OF_TRAINING))]
    own = (report.recovery or {}).get("warnings", ())  # not in reports of before
    worse = made_worse(report)
    return replace(report, warnings=[*others, *own, *([] if worse is None else [worse])])


def made_worse(report: Report) -> str | None:
    """The warning; None where the model came nearer, or nothing was measured, or trained."""
    recovery, after = report.recovery, report.evaluation
    if recovery is None or after is None or (before := recovery["before"]) is None:
        return None
    if after["divergence"] is None:
        # A fine-tuned model is surer than it is right. A pruned one may have less loss, and more as it comes nearer.
        what, then, now, aim = "loss", before["pruned"]["loss"], after["pruned"]["loss"], after["dense"]["loss"]
    else:
        what, then, now, aim = "KL from the dense model", before["divergence"]["kl"], after["divergence"]["kl"], 0.0
    if now <= then or abs(now - aim) <= abs(then - aim):
        return None
    kind = "text" if recovery["rows"] == "windows" else "data"
    return (
        f"{_WORSE} {after['source']}: {what} {then:.4f} before, and {now:.4f} after. Train it on {kind} that is "
        "like that, or on more, or leave the recovery out."
    )


def timings_of(report: Report, seconds: Mapping[str, float]) -> dict[str, float]:
    """Those of a report, and of the stages of a recovery."""
    return dict(report.timings) | {f"recover: {stage}": took for stage, took in seconds.items()}


def report_without_pruning(model: PreTrainedModel, dense: PreTrainedModel, processing_class: Any) -> Report:
    """What can be said of a model that something else has pruned."""
    task = task_for(None, type(model).__name__, model.config.is_encoder_decoder)
    rows, inside = [], {target.name for target in default_targets(model)}
    for target in every_matrix(model):
        zeros, before = (int((target.matrix(one) == 0).sum()) for one in (model, dense))
        if target.name not in inside and zeros <= before:  # nobody has pruned it
            continue
        rows.append(
            MatrixRow(
                name=target.name,
                block=target.block,
                role=target.role,
                shape=target.shape,
                weights=target.numel,
                budget=zeros,
                pruned=max(0, zeros - before),
                zeros_before=before,
                zeros_after=zeros,
            )
        )
    described = {
        "name": published_name(dense),
        "class": type(model).__name__,
        "objective": objective(model),
        "task": task.name if task else None,
        "parameters": parameter_count(model),
        "target_weights": sum(row.weights for row in rows),
        "dtype": str(model.dtype).removeprefix("torch."),
        "processing_class": type(processing_class).__name__,
    }
    lacking = about_missing_processing(dense, processing_class)
    return Report(model=described, config={}, matrices=rows, warnings=lacking)
