"""prune_pretrained: load, probe, decide, measure, apply, save. The one file that knows every stage."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from gradprobe_hf.bench.of_shapes import check_measurable, speed_of_decision
from gradprobe_hf.checkpoint.destination import Destination
from gradprobe_hf.checkpoint.result import PruneResult
from gradprobe_hf.checkpoint.write import check_writable
from gradprobe_hf.config.config import GradProbeConfig, resolve_config
from gradprobe_hf.evaluation.divergence import PairedMeasurement
from gradprobe_hf.memory.memory_plan import open_run
from gradprobe_hf.model.files.offload_store import check_store_room, existing_parent
from gradprobe_hf.model.fsdp import is_sharded
from gradprobe_hf.model.loading.load import folders_of
from gradprobe_hf.model.passes.loss import LossFunction
from gradprobe_hf.model.passes.own_forward import with_own_forward
from gradprobe_hf.model.passes.upcast import upcast_products
from gradprobe_hf.reconstruction.new_weights import NewWeights
from gradprobe_hf.recovery.checks import check_trainable
from gradprobe_hf.recovery.of_pruning import FOLDER, recovered_weights, text_read_before
from gradprobe_hf.recovery.result import told_if_worse
from gradprobe_hf.recovery.resuming import check_own
from gradprobe_hf.report.build import build_report
from gradprobe_hf.run.context import RunContext, RunRequest
from gradprobe_hf.run.decide import decide_pruning
from gradprobe_hf.run.decision import PruningDecision
from gradprobe_hf.run.evaluate import Judge, Metric, evaluate_metric, evaluate_pair
from gradprobe_hf.run.findings import Findings
from gradprobe_hf.run.reach import reachable
from gradprobe_hf.run.request.agreement import check_same_call
from gradprobe_hf.run.request.checks import check_request
from gradprobe_hf.run.request.compatibility import check_resumable
from gradprobe_hf.run.request.foreseen import foreseen_warnings
from gradprobe_hf.run.request.inputs import choosing_apart, load_inputs, written
from gradprobe_hf.run.snapshots import Snapshots, batch_identity, check_begun, rows_at_once, run_identity
from gradprobe_hf.runtime.option_checks import check_callable, check_outside
from gradprobe_hf.runtime.paths import expanded, expanded_folder, expanded_model
from gradprobe_hf.runtime.plain_computation import plain_computation
from gradprobe_hf.runtime.processes import join_processes
from gradprobe_hf.runtime.scratch import alone_in

logger = logging.getLogger(__name__)


@plain_computation()
@with_own_forward
def prune_pretrained(
    model_or_id: PreTrainedModel | str | Path,
    config: GradProbeConfig | None = None,
    *,
    calibration: Any = None,
    processing_class: Any = None,
    evaluation: Any = None,
    loss_fn: LossFunction | None = None,
    metric_fn: Metric | None = None,
    apply: bool = True,
    output_dir: str | Path | None = None,
    overwrite: bool = False,
    push_to_hub: bool | str = False,
    hub_private_repo: bool | None = None,
    resume_dir: str | Path | None = None,
    progress: bool = True,
    **from_pretrained_kwargs: Any,
) -> PruneResult:
    """Prune a pretrained model using gradients of its loss.

    The model changes only at the very end: whenever this raises or is interrupted, at whatever stage, every weight has
    the bits it had before, in memory and on disk.

    Under `accelerate launch` or torchrun every process calls this with the same arguments and a whole, unwrapped model
    (or one that FSDP2 shards): they share the batches, reach the same masks, and the main one writes.

    Args:
        model_or_id: a Hub id, a folder, or a loaded `PreTrainedModel`, offloaded by Accelerate or not. With
            `merge_adapters=True` also an adapter's id or folder, or a model with PEFT adapters (`PeftModel`).
        config: how to prune; the defaults remove 50% of the weights of the blocks, and change the others.
        calibration: text or batches to measure gradients on. `"self"` (default: text that a causal language model
            writes itself), `"pydoc"` (the Python manual, always there), a `.txt`, `.jsonl`, `.parquet`, `.csv` or
            `.tsv` file or a folder of one kind, a Hub dataset `id[:config[:split]]`, a list of texts or of rows, a
            `datasets.Dataset` (texts, chats or `input_ids`), a `DataLoader`, or any re-iterable of batches that
            `model(**batch)` accepts. A dict of names and weights is a mixture: `{"mine.jsonl": 2, "self": 1}`.
        processing_class: the tokenizer; loaded from the model's name by default.
        evaluation: the same choices, to measure the loss before and after. Default: of a text or data set of your own
            its split for that, or what calibration leaves of it; of a causal language model that is calibrated on
            `"self"` or `"pydoc"`, a part of `"pydoc"` that is never calibrated on. False: nothing.
        loss_fn: `loss_fn(model, batch)` returns the loss *summed* over tokens, in place of the model's own.
        metric_fn: `metric_fn(model)` returns a number of which more is better, an accuracy say: what `max_metric_drop`
            is about, in place of the perplexity or the task's `metric`. It may call the model, save it or read its
            weights: they are the pruned ones meanwhile. Of an offloaded or sharded model it may call it alone.
        apply: False leaves the weights as they are; masks and report are made all the same.
        output_dir: where to save the checkpoint. An existing folder is refused unless `overwrite` is set.
        push_to_hub: upload it: to this repository, or with True to one of the name of `output_dir`.
        hub_private_repo: whether a repository that is created is private.
        resume_dir: a folder to save the state of the run in: every `save_every` batches of a probe, what a search for
            structures has measured, every block that is reconstructed, and checkpoints of a recovery. Called again with
            the same arguments, a run that was killed goes on from there, to the same bits.
        progress: show progress bars.
        from_pretrained_kwargs: for loading by name: `device_map` (default: the accelerator, if there is one; also
            `"disk"`: weights are read when they are needed, and the checkpoint itself is never written to),
            `max_memory`, `dtype`, `revision`, `gguf_file`, `trust_remote_code`, ... `offload_folder` is also where
            files of the run go: weights on disk that have to be written, and accumulators on disk (default: a
            temporary folder). Two are no arguments of transformers: `merge_adapters=True` folds PEFT adapters into the
            weights, of a model in memory into a copy, which is pruned in its place; `allow_missing_weights=True` takes
            weights that a checkpoint lacks as initialised.

    Raises:
        ValueError: an option, a pattern, the data or the loss is wrong; the message names the value and the remedy.
        FileExistsError: `output_dir` exists.
        MemoryError: out of memory; the message names the stage and what would help.
        OSError: no such model, no network or login, or a full disk.
        ConnectionError: another process ended.
    """
    config = resolve_config(config)
    model_or_id = expanded_model(model_or_id)
    output_dir, resume_dir = expanded(output_dir), expanded(resume_dir)
    from_pretrained_kwargs = expanded_folder(from_pretrained_kwargs)
    check_callable("metric_fn", metric_fn, ("model",))
    if metric_fn is not None and config.metric is not None:
        raise ValueError(f"metric={config.metric!r} and metric_fn are two metrics: give one of them.")
    if metric_fn is not None and config.max_metric_drop is None:
        raise ValueError("metric_fn is what max_metric_drop is about: set that too, or leave metric_fn out.")
    out = Destination.of(output_dir, overwrite, push_to_hub, hub_private_repo, from_pretrained_kwargs.get("token"))
    check_same_call(
        config.to_dict() | {"apply": apply, "overwrite": overwrite},
        output_dir=output_dir,
        push_to_hub=push_to_hub,
        resume_dir=resume_dir,
        loss_fn=loss_fn,
        metric_fn=metric_fn,
    )
    out.check(*folders_of(model_or_id, from_pretrained_kwargs), resume_dir=resume_dir)
    check_outside("offload_folder", from_pretrained_kwargs.get("offload_folder"), output_dir)
    check_outside("resume_dir", resume_dir, output_dir)
    if resume_dir is not None:
        check_resumable(config, f"resume_dir={str(resume_dir)!r}")
        with join_processes().telling():
            check_writable(existing_parent(Path(resume_dir).absolute()), f"resume_dir={str(resume_dir)!r}")
            if config.recovery_steps:
                check_own(Path(resume_dir) / FOLDER, output_dir)
    request = RunRequest(
        model_or_id,
        config,
        calibration,
        processing_class,
        evaluation,
        loss_fn,
        from_pretrained_kwargs,
        resume_dir=resume_dir,
        progress=progress,
    )
    check_request(request, prune_pretrained)
    context = load_inputs(request)
    if config.max_metric_drop is not None and not context.evaluation and metric_fn is None:
        raise ValueError(
            "max_metric_drop needs something to measure: give an evaluation (--evaluation), or a metric_fn."
        )
    if config.max_metric_drop is not None and metric_fn is None:
        context = choosing_apart(context)
    trained_on = None
    if config.recovery_steps:
        check_trainable(context.model, f"recovery_steps={config.recovery_steps}")
        with context.stopwatch("read data"):
            trained_on = text_read_before(context, calibration, resume_dir, output_dir)
    if config.measure_speed:
        check_measurable(context.model)
    rows = None
    if resume_dir is not None:
        check_begun(resume_dir, _identity(context, metric_fn), context.processes)
        rows = rows_at_once(resume_dir, context.processes) if config.batch_size == "auto" else None
    if apply:
        changed = {target.parameter for target in context.targets}
        room = partial(check_store_room, context.model, changed, output_dir, context.processes.count)
        context.processes.in_all(room)
    out = out.checked(
        context.model,
        context.processes,
        processing_class=context.processing_class,
        is_smaller=context.config.structure is not None,
    )
    with upcast_products(context.model):  # as what it is compared with
        judge = None if metric_fn is None else Judge.of(context, metric_fn)
    state = None if resume_dir is None else Path(resume_dir)
    with alone_in(state, context.processes), open_run(written(context), rows=rows) as context:
        snapshots = _snapshots(context, resume_dir, metric_fn)
        context = replace(context, snapshots=snapshots, findings=Findings.of(snapshots))
        context = reachable(context)
        foreseen = foreseen_warnings(context)
        decision = decide_pruning(context, judge)
        measured, metric = _measured(context, decision), _task_metric(context, decision)
        speed = _speed(context, decision)
    recovered = None
    if config.recovery_steps:
        recovered = recovered_weights(context, decision, calibration, measured, resume_dir, trained_on)
        measured, metric = recovered.measured, metric and {**metric, "pruned": recovered.metric}
    report = build_report(context, decision, measured, metric, foreseen)
    report = replace(report, speed=speed)
    if recovered is not None:
        report = told_if_worse(replace(report, recovery=recovered.described))
    for warning in report.warnings[len(foreseen) :]:
        logger.warning(warning)
    result = PruneResult(
        context.model,
        decision.masks,
        report,
        config,
        context.processing_class,
        context.targets,
        context.processes,
        decision.new_weights,
        NewWeights() if recovered is None else recovered.parameters,
        decision.removal,
    )
    out = out.settled(context.model, context.processes)
    # Whatever fails in here, even an upload, gives the weights back; a checkpoint that was written stays.
    with result.applied(keep=apply, together=True):
        # None keeps its zeros if the main one could not save them.
        report = context.processes.in_all(partial(out.write, result, context.stopwatch), patiently=True)
        if context.snapshots is not None:
            # What was trained is saved by now: had that failed, the same call would go on from its last step.
            context.snapshots.finish(*([FOLDER] if config.recovery_steps else []))
        handed_back = result.handed_back() if apply else ""
    report = replace(report, timings=dict(context.stopwatch.seconds))
    weights = handed_back or result.handed_back()
    return replace(result, report=report, weights=weights, output_dir=out.output_dir)


def _snapshots(context: RunContext, resume_dir: str | Path | None, metric_fn: Metric | None) -> Snapshots | None:
    """Where the run's state is saved, after a check that all of what is there is of this run."""
    if resume_dir is None:
        return None
    identity = _identity(context, metric_fn) | batch_identity(context.calibration)
    in_step = is_sharded(context.model)
    every = context.config.save_every
    snapshots = Snapshots(Path(resume_dir), identity, every, context.processes, context.stopwatch, in_step)
    snapshots.check()
    return snapshots


def _identity(context: RunContext, metric_fn: Metric | None) -> dict[str, Any]:
    """Of the run, of the matrices that were asked for: which of them the text reaches follows from it."""
    texts = {"calibration": context.calibration, "evaluation": context.selection}
    functions = {"loss_fn": context.loss_fn, "metric_fn": metric_fn}
    return run_identity(context.model, context.config.to_dict(), texts, functions, context.processes)


def _measured(context: RunContext, decision: PruningDecision) -> PairedMeasurement | None:
    """The loss before and after, where there is a text to measure on."""
    if not context.evaluation:
        return None
    with context.stopwatch("evaluate"):
        return evaluate_pair(context, decision)


def _speed(context: RunContext, decision: PruningDecision) -> dict[str, Any] | None:
    """Speed and memory of what is left beside the dense model's, where that is asked for."""
    if not context.config.measure_speed:
        return None
    with context.stopwatch("speed"):
        found = speed_of_decision(context, decision)
    return None if found is None else found.to_dict()


def _task_metric(context: RunContext, decision: PruningDecision) -> dict[str, Any] | None:
    """The task's metric before and after, where there is one."""
    if context.metric is None:
        return None
    found: dict[str, Any] = {"name": context.metric.name, "title": context.metric.metric.title}
    for name, made in (("dense", None), ("pruned", decision)):
        with context.stopwatch(f"evaluate {name}"):
            found[name] = evaluate_metric(context, made, name)
    return found
