"""Task metrics: what a model predicts for batches with labels -> accuracy, F1, word error rate, BLEU, ..."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedConfig

from gradprobe_hf.data.batches import Batches
from gradprobe_hf.data.text.special_tokens import is_tokenizer, tokenizer_of
from gradprobe_hf.model.fsdp import is_sharded, resharded
from gradprobe_hf.model.parameters import input_device
from gradprobe_hf.model.passes.patches import eval_mode, seen_on
from gradprobe_hf.probe.engine import Workload
from gradprobe_hf.probe.steps import share
from gradprobe_hf.tasks.columns import IGNORED
from gradprobe_hf.tasks.embeddings import is_for_embedding
from gradprobe_hf.tasks.metrics import Metric
from gradprobe_hf.tasks.predictions import predicted_labels
from gradprobe_hf.tasks.row_reader import is_regression
from gradprobe_hf.tasks.table import Task


@dataclass(frozen=True)
class TaskMetric:
    """A metric of what a model predicts.

    Attributes:
        name: "accuracy", ...
        metric: its row.
        task: whose predictions it is about.
        processing_class: turns token ids into texts.
    """

    name: str
    metric: Metric
    task: Task
    processing_class: Any

    @property
    def sign(self) -> int:
        """1 where lower is better, -1 where higher is."""
        return -1 if self.metric.higher_is_better else 1


def metric_of(
    task: Task | None, name: str | None, batches: Batches, processing_class: Any, config: PreTrainedConfig
) -> TaskMetric | None:
    """The metric that was asked for; the task's default, where these batches and the model allow it; else None.

    Raises:
        ValueError: the one that was asked for is none of the task's, or cannot be measured on these batches.
    """
    if task is None:
        if name is not None:
            raise ValueError(f"metric={name!r}: it is not known what this model is for; give a metric_fn.")
        return None
    asked, name = name is not None, name or task.default_metric
    if name is None:
        return None
    metric = task.metric(name)
    lacks = _lacks(metric, batches, processing_class) or _lacks_classes(task, batches, config)
    if lacks and asked:
        raise ValueError(f"metric={name!r} cannot be measured: {lacks}.")
    if not lacks:
        metric.check()
    return None if lacks else TaskMetric(name, metric, task, processing_class)


def _lacks(metric: Metric, batches: Batches, processing_class: Any) -> str:
    """What a metric misses in these batches, in words; "": nothing."""
    if not batches:
        return "there is nothing to measure on, give an evaluation (--evaluation)"
    labels = [batch.get("labels") for batch in batches]
    if not all(isinstance(one, Tensor) for one in labels) and any("input_ids" not in batch for batch in batches):
        return "the evaluation batches have no 'labels'"
    if metric.compares != "embeddings" and any(isinstance(one, Tensor) and one.is_floating_point() for one in labels):
        return "the labels are measures, not classes"
    if metric.compares == "embeddings" and not all(map(is_for_embedding, batches)):
        return "the evaluation batches have no embeddings to compare with"
    if metric.compares == "texts" and not is_tokenizer(tokenizer_of(processing_class)):
        return "its texts need a tokenizer, and none was found beside the model: pass processing_class="
    return ""


def _lacks_classes(task: Task, batches: Batches, config: PreTrainedConfig) -> str:
    """What the labels of these batches miss to be compared with the most likely classes, in words; "": nothing."""
    if task.predict is not predicted_labels:
        return ""
    if task.one_label and task.name != "multiple-choice" and is_regression(config):
        return "the model predicts one number, which is no class: give a metric_fn"
    for batch in batches:
        labels = batch.get("labels")
        if not isinstance(labels, Tensor):
            return "the evaluation batches have no 'labels'"
        if task.one_label and labels.ndim > 1:
            return "the labels are several of a row: give a metric_fn"
        if not task.one_label and "input_ids" in batch and labels.shape != batch["input_ids"].shape:
            return "the labels are not one of each token: give a metric_fn"
    return ""


@torch.no_grad()
def measure_metric(work: Workload, measured: TaskMetric, label: str = "evaluation") -> float:
    """The metric over all batches. All processes share them and return the same.

    Args:
        label: for the progress bar and for errors.

    Raises:
        ValueError: no prediction could be compared.
    """
    model, device = work.model, input_device(work.model)
    predictions: list[Any] = []
    references: list[Any] = []
    assert measured.task.predict is not None, "a task with metrics predicts"
    with work.telling(), resharded(model), eval_mode(model), seen_on(model, device):
        steps = share(list(work.batches), work.processes, is_sharded(model))
        for batch, counted in tqdm(
            steps, desc=f"{label}: {measured.name}", unit="batch", disable=not work.progress, leave=False
        ):
            found, right = measured.task.predict(model, send_to_device(batch, device), measured.processing_class)
            if counted:
                predictions.append(found)
                references.append(right)
    # Read once, behind the loop, and brought together: a metric need not be a mean over batches.
    shares = work.processes.gather(_compared(predictions, references))
    said = [value for one, _ in shares for value in one]
    wanted = [value for _, one in shares for value in one]
    if not wanted:
        raise ValueError(f"{label}: there is no label to measure the {measured.name} on.")
    return float(measured.metric.function(said, wanted))


def _compared(predictions: list[Any], references: list[Any]) -> tuple[list[Any], list[Any]]:
    """What was predicted and what is right, of all batches one behind the other, wherever there is a label."""
    said: list[Any] = []
    wanted: list[Any] = []
    for found, right in zip(predictions, references, strict=True):
        if isinstance(right, Tensor):
            counted = right != IGNORED
            found, right = found[counted].tolist(), right[counted].tolist()
        said += found
        wanted += right
    return said, wanted
