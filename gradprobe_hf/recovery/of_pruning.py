"""The recovery of a run of `prune_pretrained`: the model as it would be left, trained as a copy beside the dense one.

The dense model is the one that was probed: its weights are in memory, and stay as they are until all has succeeded. The
copy is float32 while it trains, so that 16 bytes for each parameter are needed beside the model itself. Structures that
go whole are zeros in it, as everywhere until the end: it trains no faster for them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from gradprobe_hf.config.recovery import RecoveryConfig
from gradprobe_hf.data.text.self_generated import KeptText
from gradprobe_hf.data.text.text_options import is_written
from gradprobe_hf.evaluation.divergence import PairedMeasurement, measure_pair
from gradprobe_hf.evaluation.task_metric import measure_metric
from gradprobe_hf.model.fingerprint import model_fingerprint
from gradprobe_hf.model.passes.routing import routed
from gradprobe_hf.model.passes.upcast import upcast_products
from gradprobe_hf.reconstruction.new_weights import NewWeights
from gradprobe_hf.recovery.distil import Workplace, distil, teacher_of, weights_of, workplace
from gradprobe_hf.recovery.result import Taught, described, described_recovery
from gradprobe_hf.recovery.resuming import check_state_fits
from gradprobe_hf.recovery.text import Reading, RecoveryText, check_written, read_text
from gradprobe_hf.run.apply import applied
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.run.decision import PruningDecision
from gradprobe_hf.run.request.inputs import default_calibration
from gradprobe_hf.runtime.stopwatch import Stopwatch
from gradprobe_hf.structures.removal import Removal

FOLDER = "recovery"  # in the folder of a run that may be resumed


@dataclass(frozen=True)
class RecoveredWeights:
    """What a recovery came to.

    Attributes:
        parameters: parameter name -> its new values.
        described: the section of the report.
        measured: the dense and the recovered model on the evaluation, where there is one.
        metric: the recovered model's, of the task, where there is one.
    """

    parameters: NewWeights
    described: dict[str, Any]
    measured: PairedMeasurement | None
    metric: float | None


def text_read_before(
    context: RunContext,
    calibration: Any,
    resume_dir: str | Path | None = None,
    output_dir: str | Path | None = None,
) -> RecoveryText | None:
    """The text that is trained on, read before any work; None of what the model has yet to write itself.

    Args:
        calibration: as the caller named it: more of it is read.
        output_dir: as of `check_state_fits`.

    Raises:
        ValueError: it cannot be trained on, or is measured on, too.
        OSError: the state of the training does not fit on the disk.
    """
    source, config = _source(context, calibration), _config(context)
    check_state_fits(None if resume_dir is None else Path(resume_dir) / FOLDER, context.model, config, output_dir)
    check_written(context.model, source)
    if is_written(source):
        return None
    found = read_text(
        source, config, Reading(context.model, context.processing_class, context.processes, progress=False)
    )
    found.check_apart(context.evaluation)
    return found


def recovered_weights(
    context: RunContext,
    decision: PruningDecision,
    calibration: Any,
    before: PairedMeasurement | None,
    resume_dir: str | Path | None,
    text: RecoveryText | None = None,
) -> RecoveredWeights:
    """Train what a decision leaves; the model itself stays as it is, and so does the state in `resume_dir`.

    Args:
        calibration: as the caller named it: more of it is read.
        before: the dense and the pruned model.
        text: what was read of it before; None: nothing.

    Raises:
        ValueError: text that is too short, or a folder with the state of another run.
        MemoryError: with what would help.
    """
    config, dense = _config(context), context.model
    folder = None if resume_dir is None else Path(resume_dir) / FOLDER
    stopwatch = Stopwatch()  # of its own: the state of the run has the seconds of what came before
    with (
        upcast_products(dense),
        workplace(folder, context.processes, stopwatch, context.progress, keeps=True) as place,
    ):
        if text is None:
            with stopwatch("read data"):
                text = read_text(_source(context, calibration), config, _reading(context, place))
                text.check_apart(context.evaluation)
        with applied(dense, context.targets, decision.masks, keep=False, new_weights=decision.new_weights):
            student = copy.deepcopy(dense)
        teacher, gone = teacher_of(dense, text, config, place), _without_part(student, decision.removal)
        # No token is sent to experts that are zero, in training as in the smaller model.
        with routed(student, {} if decision.removal is None else decision.removal.routes):
            trained = distil(student, teacher, text, config, place, gone)
            measured = None if before is None else _measured(context, student)
            metric = None if context.metric is None else _metric(context, student)
        weights = NewWeights()
        for name, values in weights_of(student).items():
            weights.add(name, values)
    context.stopwatch.add(stopwatch.seconds)
    return RecoveredWeights(
        weights, described_recovery(trained, text, config, Taught.by(dense), described(before)), measured, metric
    )


def _without_part(student: PreTrainedModel, removal: Removal | None) -> frozenset[str]:
    """Parameters of blocks that go whole: whatever they were trained to, no file would have it."""
    if removal is None:
        return frozenset()
    return frozenset(name for name, _ in student.named_parameters() if removal.name(name) is None)


def _config(context: RunContext) -> RecoveryConfig:
    return RecoveryConfig.of_pruning(context.config, context.processes.count)


def _source(context: RunContext, calibration: Any) -> Any:
    return default_calibration(context.model) if calibration is None else calibration


def _reading(context: RunContext, place: Workplace) -> Reading:
    kept = None
    if place.resumable:
        path = place.folder / f"own_text-{place.processes.rank}.safetensors"
        kept = KeptText(path, model_fingerprint(context.model), place.processes)
    return Reading(context.model, context.processing_class, place.processes, place.progress, kept)


def _measured(context: RunContext, student: Any) -> PairedMeasurement:
    dense = context.workload_on(context.evaluation)
    with context.stopwatch("evaluate"):
        return measure_pair(dense, replace(dense, model=student), label="evaluation of what was recovered")


def _metric(context: RunContext, student: Any) -> float:
    assert context.metric is not None, "asked for where there is one"
    work = replace(context.workload_on(context.evaluation), model=student)
    with context.stopwatch("evaluate recovered"):
        return measure_metric(work, context.metric, "evaluation (recovered)")
