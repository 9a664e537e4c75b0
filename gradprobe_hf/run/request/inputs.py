"""Inputs: what every run begins with: the model, its targets, and the texts. Everything wrong is said here."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from gradprobe_hf.data.batch_checks import check_text_options
from gradprobe_hf.data.batches import Batches
from gradprobe_hf.data.text.paper_protocol import WIKITEXT
from gradprobe_hf.data.text.self_generated import KeptText
from gradprobe_hf.data.text.text_options import DEFAULT_LENGTH, PYDOC, SELF, is_written
from gradprobe_hf.data.windows import EVALUATION_SEED, TextOptions, Writing, window_length
from gradprobe_hf.evaluation.task_metric import metric_of
from gradprobe_hf.model.families import is_causal
from gradprobe_hf.model.fingerprint import model_fingerprint
from gradprobe_hf.model.fsdp import check_sharding, is_sharded
from gradprobe_hf.model.loading.load import Loaded, load
from gradprobe_hf.model.loading.placement import to_accelerator
from gradprobe_hf.model.loading.processing import load_processing_class
from gradprobe_hf.model.parameters import is_offloaded, unload_leftovers
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.run.context import RunContext, RunRequest
from gradprobe_hf.run.request.agreement import check_same_batches, check_same_models
from gradprobe_hf.run.request.compatibility import check_plain, check_targets
from gradprobe_hf.run.request.reading import Reading
from gradprobe_hf.run.request.weight_limits import weight_limits
from gradprobe_hf.run.shapes.equality import check_example
from gradprobe_hf.run.snapshots import folder_of
from gradprobe_hf.runtime.processes import PATIENCE, Processes, join_processes
from gradprobe_hf.runtime.stopwatch import Stopwatch
from gradprobe_hf.tasks.table import auto_classes, task_for

logger = logging.getLogger(__name__)


def load_inputs(request: RunRequest) -> RunContext:
    """Load the model, find its targets and read the texts.

    Raises:
        ValueError: matrices that cannot be pruned as configured, or data of which nothing can be made.
        OSError: no such model or text.
    """
    config, processes, stopwatch = request.config, join_processes(PATIENCE), Stopwatch()
    progress = request.progress and processes.is_main
    with stopwatch("load"):
        with processes.telling():
            loaded, processing_class = _load(request, processes)
            model = loaded.model
            check_sharding(model)
        check_same_models(processes, model=model)
        check_plain(model, config)
        targets = find_targets(model, config.include, config.exclude)
        check_targets(model, targets, config)
        if config.structure is not None:
            processes.on_main(partial(check_example, model, targets, config))
        task = task_for(config.task, type(model).__name__, model.config.is_encoder_decoder)
    if config.sequence_length is None and (length := window_length(None, model)) < DEFAULT_LENGTH:
        logger.info("windows have %d tokens, as many as the model reads of a text", length)
    with stopwatch("read data"):
        writing = Writing(processes, _kept_text(request, model, processes))
        reads_text = request.always_calibrate or config.needs.passes != "none"
        reading = Reading(
            config,
            model,
            processing_class,
            task,
            writing,
            has_own_loss=request.loss_fn is not None,
            evaluates_alone=not reads_text,
            progress=progress,
        )
        calibration = default_calibration(model) if request.calibration is None else request.calibration
        calibrate = partial(reading.calibration, calibration)
        unwritten = calibrate if reads_text and is_written(calibration) else None
        with processes.telling():
            calibrated = calibrate() if reads_text and unwritten is None else Batches.none()
            measured = _evaluation(request.evaluation, calibration, reading)
            if unwritten is None:
                check_text_options(TextOptions.of(config), calibrated, measured)
            if task is not None:
                task.check_length(config.sequence_length, model.main_input_name)
            metric = metric_of(task, config.metric, measured, processing_class, model.config)
        check_same_batches(processes, calibration=calibrated.fingerprint, evaluation=measured.fingerprint)
    folder = request.from_pretrained_kwargs.get("offload_folder")
    return RunContext(
        model=model,
        processing_class=processing_class,
        targets=targets,
        config=config,
        calibration=calibrated,
        evaluation=measured,
        task=task,
        metric=metric,
        loss_fn=request.loss_fn,
        processes=processes,
        stopwatch=stopwatch,
        progress=progress,
        folder=None if folder is None else Path(folder),
        origin=loaded.origin,
        of_loading=loaded.warnings,
        unwritten=unwritten,
    )


def written(context: RunContext) -> RunContext:
    """With the text that the model itself writes, if it is calibrated on that.

    It takes minutes, so that everything that may be wrong is looked at between `load_inputs` and this.
    """
    if context.unwritten is None:
        return context
    with context.stopwatch("write calibration text"):
        return replace(context, calibration=context.unwritten(), unwritten=None)


def choosing_apart(context: RunContext) -> RunContext:
    """With one half of the evaluation to choose a sparsity or a threshold by, and the other to report on.

    What was chosen by a measurement looks better in it than it is: of many attempts one that was lucky there wins.

    Raises:
        ValueError: an evaluation of one row.
    """
    chosen_by, reported = context.evaluation.halves(EVALUATION_SEED)
    return replace(context, selection=chosen_by, evaluation=reported)


def default_calibration(model: PreTrainedModel) -> str:
    """The model's own text, where it can write and its weights are at hand."""
    if not is_causal(model) or not model.can_generate():
        return PYDOC
    if is_offloaded(model) or is_sharded(model):
        # To write is to read every weight for every token.
        logger.warning(
            "calibrating on the Python manual: this model would write text of its own too slowly, because its weights "
            "are not all where it computes. Give a text that is like what the model is for (calibration, "
            "--calibration), or 'self' all the same."
        )
        return PYDOC
    return SELF


def _kept_text(request: RunRequest, model: PreTrainedModel, processes: Processes) -> KeptText | None:
    """Where a run that may be resumed keeps the text that the model has written."""
    if request.resume_dir is None:
        return None
    path = folder_of(Path(request.resume_dir), processes) / "own_text.safetensors"
    return KeptText(path, model_fingerprint(model), processes)


def _load(request: RunRequest, processes: Processes) -> tuple[Loaded, Any]:
    kwargs = {name: value for name, value in request.from_pretrained_kwargs.items() if value is not None}
    if isinstance(request.model_or_id, nn.Module):  # then the folder is for accumulators alone
        kwargs.pop("offload_folder", None)
    elif request.config.accumulator_device == "disk" and kwargs.get("device_map") is None:
        kwargs.pop("offload_folder", None)  # it is for accumulators alone here too
    auto = auto_classes(request.config.task)
    limits = partial(weight_limits, config=request.config, processes=processes.count)
    loaded = load(request.model_or_id, auto_classes=auto, limits=limits, dequantize=True, **kwargs)
    if not isinstance(request.model_or_id, nn.Module):
        to_accelerator(loaded.model, kwargs)
    unload_leftovers(loaded.model)
    found = request.processing_class or load_processing_class(
        loaded.model, loaded.processing_name, **loaded.processing_kwargs
    )
    return loaded, found


def _evaluation(evaluation: Any, calibration: Any, reading: Reading) -> Batches:
    """What to measure on: as asked, or the held-out part of the built-in text, or of the user's own."""
    is_paper = reading.config.evaluation_protocol == "paper"
    if evaluation is False:
        if is_paper:
            raise ValueError("evaluation_protocol='paper' has no effect where nothing is measured: leave it unset.")
        return Batches.none()
    if evaluation is not None or is_paper:
        return reading.evaluation(WIKITEXT if evaluation is None else evaluation)
    names = calibration if isinstance(calibration, Mapping) else [calibration]
    if all(isinstance(name, str) and name in (PYDOC, SELF) for name in names):
        if is_causal(reading.model):
            return reading.evaluation(PYDOC)
        return reading.on_manual_if_possible()
    found = reading.held_out(calibration)
    if not found and reading.config.recovery_steps:  # which train on what the calibration leaves
        return reading.on_manual_if_possible()
    return found
