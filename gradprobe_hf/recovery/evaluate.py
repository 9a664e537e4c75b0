"""What is measured before a recovery and behind it, on a text or on rows that it is not trained on."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from gradprobe_hf.config.recovery import RecoveryConfig
from gradprobe_hf.data.batch_checks import check_batches
from gradprobe_hf.data.batches import Batches
from gradprobe_hf.data.evidence import check_evidence
from gradprobe_hf.data.labelled import ROWS_MEASURED
from gradprobe_hf.data.text.text_options import PYDOC, TextOptions
from gradprobe_hf.data.windows import WINDOWS_MEASURED, WindowSpec, load_batches, window_length
from gradprobe_hf.evaluation.divergence import PairedMeasurement, measure_pair
from gradprobe_hf.evaluation.task_metric import TaskMetric, measure_metric
from gradprobe_hf.model.families import is_causal
from gradprobe_hf.probe.engine import Workload
from gradprobe_hf.recovery.distil import Workplace
from gradprobe_hf.recovery.text import task_options

MEASURED_AT_ONCE = 4  # windows of the evaluation in one pass


def evaluation_of(source: Any, config: RecoveryConfig, model: PreTrainedModel, processing_class: Any) -> Batches:
    """What is measured on; empty where nothing is."""
    if source is None and is_causal(model):
        source = PYDOC
    if source is False or source is None:
        return Batches.none()
    length = window_length(config.sequence_length, model)
    samples = config.evaluation_samples
    spec = WindowSpec(samples or WINDOWS_MEASURED, length, MEASURED_AT_ONCE, text=TextOptions.of(config))
    task = task_options(model, config, samples or ROWS_MEASURED)
    found = load_batches(source, spec, part="evaluation", model=model, processing_class=processing_class, task=task)
    check_batches(model, found, "evaluation", needs_loss=True)
    check_evidence(model, found, "evaluation")
    return found


def measure_both(
    dense: PreTrainedModel, pruned: PreTrainedModel, batches: Batches, place: Workplace
) -> PairedMeasurement | None:
    """Both models on the evaluation text; None where there is none."""
    if not batches:
        return None
    work = partial(Workload, batches=batches, processes=place.processes, progress=place.progress)
    with place.stopwatch("evaluate"):
        return measure_pair(work(dense), work(pruned))


def scores_of(
    models: Mapping[str, PreTrainedModel], batches: Batches, metric: TaskMetric | None, place: Workplace
) -> dict[str, Any]:
    """The task's metric of models, by what they are called in reports; nothing where there is none."""
    if metric is None:
        return {}
    found: dict[str, Any] = {"name": metric.name, "title": metric.metric.title}
    for name, model in models.items():
        with place.stopwatch("evaluate"):
            work = Workload(model, batches, processes=place.processes, progress=place.progress)
            found[name] = measure_metric(work, metric, f"evaluation ({name})")
    return found
