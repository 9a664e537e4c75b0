"""prune_pretrained: load, probe, decide, measure, apply, save. The one file that knows every stage."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from gradprobe_hf.accounting import build_report
from gradprobe_hf.application import masks_applied
from gradprobe_hf.calibration import Batches, load_batches
from gradprobe_hf.config import GradProbeConfig
from gradprobe_hf.decision import evidence_needed
from gradprobe_hf.evaluation import Measurement, measure
from gradprobe_hf.hub import check_destination, check_push, check_room, push_folder
from gradprobe_hf.loading import load_model, load_processing_class
from gradprobe_hf.loss import LossFunction, is_causal
from gradprobe_hf.probe import serving
from gradprobe_hf.result import PruneResult
from gradprobe_hf.stopwatch import Stopwatch
from gradprobe_hf.targets import Target, check_editable, check_group, find_targets
from gradprobe_hf.verdict import Verdict, reach_verdict

logger = logging.getLogger(__name__)

BUILT_IN = "pydoc"


def prune_pretrained(
    model_or_id: PreTrainedModel | str | Path,
    config: GradProbeConfig | None = None,
    *,
    calibration: Any = None,
    processing_class: Any = None,
    evaluation: Any = None,
    loss_fn: LossFunction | None = None,
    apply: bool = True,
    output_dir: str | Path | None = None,
    overwrite: bool = False,
    push_to_hub: bool = False,
    hub_model_id: str | None = None,
    hub_private_repo: bool | None = None,
    progress: bool = True,
    **from_pretrained_kwargs: Any,
) -> PruneResult:
    """Prune a pretrained model by asking its gradients.

    The model in memory changes only at the very end: whenever this raises or is interrupted, at whatever stage, every
    weight has the bits it had before.

    Args:
        model_or_id: a Hub id, a folder, or a loaded `PreTrainedModel`.
        config: how to prune; the defaults take 50% of the weights of the blocks.
        calibration: text or batches for the probes. `"pydoc"` (default: the Python manual, always there), `"self"`
            (the model's own text), a `.txt`, `.jsonl` or `.parquet` file or a folder of them, a Hub dataset
            `id[:config[:split]]`, a list of texts, a `datasets.Dataset` (text or `input_ids`), a `DataLoader`, or any
            re-iterable of batches that `model(**batch)` accepts.
        processing_class: the tokenizer; loaded from the model's name by default.
        evaluation: the same choices, to measure the loss before and after. Default: the held-out part of `"pydoc"`
            when calibration is `"pydoc"`, else nothing. False: nothing.
        loss_fn: `loss_fn(model, batch)` returns the loss *summed* over tokens, in place of the model's own.
        apply: False leaves the weights as they are; masks and report are made all the same.
        output_dir: where to save the checkpoint. An existing folder is refused unless `overwrite` is set.
        push_to_hub: upload it to `hub_model_id` (default: the name of `output_dir`), `hub_private_repo` or not.
        progress: show progress bars.
        from_pretrained_kwargs: for loading by name: `dtype`, `revision`, `gguf_file`, `trust_remote_code`, ...

    Raises:
        ValueError: an option, a pattern, the data or the loss is wrong; the message names the value and the remedy.
        FileExistsError: `output_dir` exists.
        OSError: no such model, no network or login, or a full disk.
    """
    config = config or GradProbeConfig()
    repo_id = _repository(push_to_hub, hub_model_id, output_dir)
    if output_dir is not None:
        check_destination(output_dir, _name_of(model_or_id), overwrite)
    stopwatch = Stopwatch()
    with stopwatch("load"):
        model = load_model(model_or_id, **from_pretrained_kwargs)
        processing_class = processing_class or load_processing_class(model, **from_pretrained_kwargs)
        if output_dir is not None:
            check_room(output_dir, model)
        targets = find_targets(model, config.include, config.exclude)
        check_editable(model, targets)
        if config.group is not None:
            check_group(targets, *config.group)
    with stopwatch("read data"):
        data = partial(
            load_batches,
            model=model,
            processing_class=processing_class,
            sequence_length=config.sequence_length,
            batch_size=config.batch_size,
            seed=config.seed,
            progress=progress,
        )
        needs_data = evidence_needed(config).passes != "none"
        calibration = BUILT_IN if calibration is None else calibration
        evaluation = _default_evaluation(evaluation, calibration, model)
        batches = data(calibration, part="calibration", samples=config.num_samples) if needs_data else None
        held_out = (
            data(evaluation, part="evaluation", samples=config.evaluation_samples) if evaluation is not None else None
        )
    if repo_id is not None:  # last of the checks: it creates the repository
        repo_id = check_push(repo_id, hub_private_repo)
    verdict = reach_verdict(model, targets, config, batches, loss_fn=loss_fn, stopwatch=stopwatch, progress=progress)
    measured = _evaluate(model, targets, verdict, held_out, loss_fn, stopwatch, progress) if held_out else {}
    report = build_report(
        model, targets, config, verdict, batches, held_out, measured, dict(stopwatch.seconds), processing_class
    )
    for warning in report.warnings:
        logger.warning(warning)
    result = PruneResult(model, verdict.masks, report, config, processing_class, targets)
    # Whatever fails in here, even an upload, gives the weights back; a checkpoint that was written stays.
    with masks_applied(model, targets, verdict.masks, keep=apply):
        if output_dir is not None:
            with stopwatch("save"):
                result.save_pretrained(output_dir, overwrite=overwrite, repo_id=repo_id)
        if repo_id is not None:
            with stopwatch("upload"):
                push_folder(output_dir, repo_id) if output_dir else result.push_to_hub(repo_id)
    return replace(result, report=replace(report, timings=dict(stopwatch.seconds)))


def _evaluate(
    model: PreTrainedModel,
    targets: tuple[Target, ...],
    verdict: Verdict,
    held_out: Batches,
    loss_fn: LossFunction | None,
    stopwatch: Stopwatch,
    progress: bool,
) -> dict[str, Measurement]:
    """The loss before and after; the pruned model is measured through what it is served, its weights untouched."""
    views: dict[str, AbstractContextManager[None]] = {
        "dense": nullcontext(),
        "pruned": serving(model, targets, verdict.masks),
    }
    measured = {}
    for name, view in views.items():
        with stopwatch(f"evaluate {name}"), view:
            measured[name] = measure(model, held_out, loss_fn, f"evaluation ({name})", progress)
    return measured


def _repository(push_to_hub: bool, hub_model_id: str | None, output_dir: str | Path | None) -> str | None:
    if not push_to_hub:
        return None
    if hub_model_id is None and output_dir is None:
        raise ValueError("push_to_hub=True needs hub_model_id='user/name' (or an output_dir to name it after).")
    return hub_model_id or Path(str(output_dir)).absolute().name


def _name_of(model_or_id: PreTrainedModel | str | Path) -> str:
    return model_or_id.name_or_path if isinstance(model_or_id, PreTrainedModel) else str(model_or_id)


def _default_evaluation(evaluation: Any, calibration: Any, model: PreTrainedModel) -> Any:
    built_in = isinstance(calibration, str) and calibration == BUILT_IN
    if evaluation is None:
        return BUILT_IN if built_in and is_causal(model) else None
    return None if evaluation is False else evaluation
