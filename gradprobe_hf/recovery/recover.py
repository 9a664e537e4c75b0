"""recover_pretrained: load, compare, measure, train, measure again, save."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from gradprobe_hf.checkpoint.destination import Destination
from gradprobe_hf.checkpoint.result import PruneResult
from gradprobe_hf.checkpoint.write import check_writable
from gradprobe_hf.config.recovery import RecoveryConfig, resolve_recovery
from gradprobe_hf.data.text.self_generated import KeptText
from gradprobe_hf.data.text.text_options import SELF, TextOptions, is_written
from gradprobe_hf.evaluation.task_metric import metric_of
from gradprobe_hf.model.files.offload_store import existing_parent
from gradprobe_hf.model.fingerprint import model_fingerprint
from gradprobe_hf.model.loading.load import folders_of, name_of
from gradprobe_hf.model.passes.own_forward import with_own_forward
from gradprobe_hf.model.passes.upcast import upcast_products
from gradprobe_hf.reconstruction.new_weights import NewWeights
from gradprobe_hf.recovery.checks import (
    check_dealt,
    check_models,
    check_revisions,
    check_texts,
)
from gradprobe_hf.recovery.distil import Workplace, distil, teacher_of, weights_of, workplace
from gradprobe_hf.recovery.evaluate import evaluation_of, measure_both, scores_of
from gradprobe_hf.recovery.models import Dense, Student
from gradprobe_hf.recovery.result import (
    RecoverResult,
    Taught,
    described,
    described_recovery,
    made_worse,
    recovered_report,
    report_without_pruning,
    timings_of,
)
from gradprobe_hf.recovery.resuming import check_begun, check_own, check_state_fits
from gradprobe_hf.recovery.text import Reading, RecoveryText, check_written, read_text, task_of
from gradprobe_hf.run.apply import replaced
from gradprobe_hf.run.request.agreement import check_same_batches, check_same_call, check_same_models
from gradprobe_hf.run.request.checks import check_columns, check_names, check_processing_class
from gradprobe_hf.runtime.option_checks import check_outside
from gradprobe_hf.runtime.paths import expanded, expanded_folder, expanded_model
from gradprobe_hf.runtime.plain_computation import plain_computation
from gradprobe_hf.runtime.processes import PATIENCE, join_processes
from gradprobe_hf.runtime.stopwatch import Stopwatch
from gradprobe_hf.tasks.table import auto_classes

logger = logging.getLogger(__name__)


@plain_computation()
@with_own_forward
def recover_pretrained(
    pruned: PreTrainedModel | PruneResult | str | Path,
    teacher: PreTrainedModel | str | Path,
    config: RecoveryConfig | None = None,
    *,
    text: Any = SELF,
    evaluation: Any = None,
    processing_class: Any = None,
    output_dir: str | Path | None = None,
    overwrite: bool = False,
    push_to_hub: bool | str = False,
    hub_private_repo: bool | None = None,
    resume_dir: str | Path | None = None,
    progress: bool = True,
    teacher_revision: str | None = None,
    **from_pretrained_kwargs: Any,
) -> RecoverResult:
    """Train the kept weights of a pruned model towards the predictions of the dense one; its zeros stay.

    What is minimised is the mean of `KL(p_dense || p_pruned)` over the tokens of the text; of a model that is no causal
    language model over what has a label: rows that are classified, words, masked tokens, tokens that are to be written.
    What the labels are plays no part. A model in memory changes at the very end: whenever this raises, every weight
    has the bits it had.

    Under `accelerate launch` or torchrun every process calls this with the same arguments: they share the windows of
    each step, and the main one writes. Models that are loaded by name train on the accelerator where there is one.

    Memory, in bytes for each parameter: 16 for the model that trains, and those of the dense model as it is stored; 4
    more for a pruned model that is in memory already, which is trained as a copy.

    Args:
        pruned: a checkpoint folder or Hub id, a loaded model, or what `prune_pretrained` returned.
        teacher: the dense model that it was pruned from: the same architecture, sizes and tokenizer. Of a model that
            an adapter was folded into before it was pruned, the adapter: its folder or id, or a `PeftModel`.
        config: how to train; the defaults take 300 steps of 8 windows.
        text: text to train on, or rows with labels, in all forms that `calibration` of `prune_pretrained` has. Every
            step has fresh windows, if it holds as many. Default: text that the dense model writes itself, where it is
            a causal language model.
        evaluation: another text, to measure perplexity and divergence on, before and after, or rows with labels, to
            measure loss and metric on. Default: of a causal language model a part of `"pydoc"` that is never trained
            on, else nothing. False: nothing.
        processing_class: the tokenizer; loaded from the pruned model's name, or the teacher's, by default.
        output_dir: where to save the checkpoint. An existing folder is refused unless `overwrite` is set.
        push_to_hub: upload it: to this repository, or with True to one of the name of `output_dir`.
        hub_private_repo: whether a repository that is created is private.
        resume_dir: a folder for checkpoints of the training, every `save_steps` steps. Called again with the same
            arguments, a run that was killed goes on from there, to the same bits.
        progress: show progress bars.
        teacher_revision: branch, tag or commit of the teacher on the Hub; `revision` is that of the pruned model.
        from_pretrained_kwargs: for loading both models by name: `trust_remote_code`, `token`, ...

    Returns:
        The model, and a report with what was measured.

    Raises:
        ValueError: an option or a text is wrong, the teacher is of another kind, or no weight was pruned.
        FileExistsError: `output_dir` exists.
        MemoryError: out of memory; the message says what would help.
        TypeError: an option or argument by another name.
        OSError: no such model, no network or login, or a full disk.
    """
    config, processes, stopwatch = resolve_recovery(config), join_processes(PATIENCE), Stopwatch()
    pruned, teacher = expanded_model(pruned), expanded_model(teacher)
    output_dir, resume_dir = expanded(output_dir), expanded(resume_dir)
    from_pretrained_kwargs = expanded_folder(from_pretrained_kwargs)
    out = Destination.of(output_dir, overwrite, push_to_hub, hub_private_repo, from_pretrained_kwargs.get("token"))
    check_names(from_pretrained_kwargs, recover_pretrained, RecoveryConfig)
    check_dealt(config, processes.count)
    with processes.telling():  # a path may be missing on one of several machines
        check_models(pruned, teacher, from_pretrained_kwargs)
        check_revisions(pruned, teacher, from_pretrained_kwargs.get("revision"), teacher_revision)
        check_processing_class(processing_class)
        check_texts(text, evaluation)
    check_columns(TextOptions.of(config), text, evaluation)
    check_same_call(
        config.to_dict() | {"overwrite": overwrite},
        output_dir=output_dir,
        push_to_hub=push_to_hub,
        resume_dir=resume_dir,
    )
    source = pruned.model if isinstance(pruned, PruneResult) else pruned
    read = (*folders_of(source, from_pretrained_kwargs), *folders_of(teacher, from_pretrained_kwargs))
    out.check(*read, resume_dir=resume_dir)
    check_outside("offload_folder", from_pretrained_kwargs.get("offload_folder"), output_dir)
    check_outside("resume_dir", resume_dir, output_dir)
    if resume_dir is not None:
        with processes.telling():
            check_writable(existing_parent(Path(resume_dir).absolute()), f"resume_dir={str(resume_dir)!r}")
            check_own(Path(resume_dir), output_dir)
        check_begun(Path(resume_dir), config, processes)
    with stopwatch("load"):
        named = {"auto_classes": auto_classes(config.task), **from_pretrained_kwargs}
        with processes.telling():
            student = Student.of(pruned, named, processing_class)
            dense = Dense(teacher, named, teacher_revision, student.model)
            student.check(dense, config)
            for doubt in (doubts := dense.check_origin(student.report)):
                logger.warning(doubt)
            check_written(student.model, text)
        check_same_models(processes, pruned=student.model, teacher=dense.model)
        if student.processing_class is None:
            student = replace(student, processing_class=dense.stored_processing_class())
    if resume_dir is not None:
        of = {"weights": model_fingerprint(student.model), "teacher": model_fingerprint(dense.model)}
        check_begun(Path(resume_dir), config, processes, **of)
    check_state_fits(None if resume_dir is None else Path(resume_dir), student.model, config, output_dir)
    report = student.report or report_without_pruning(student.model, dense.model, student.processing_class)
    with (
        upcast_products(dense.model, student.model),
        workplace(
            None if resume_dir is None else Path(resume_dir), processes, stopwatch, progress, keeps=True
        ) as place,
    ):
        with stopwatch("read data"):
            with processes.telling():
                measured_on = evaluation_of(evaluation, config, dense.model, student.processing_class)
                task = task_of(dense.model, config)
                metric = metric_of(task, config.metric, measured_on, student.processing_class, dense.model.config)
            check_same_batches(processes, evaluation=measured_on.fingerprint)
            # A text that is too short comes before a repository is created, and one that is yet to be written after.
            given = None if is_written(text) else _read(text, config, dense, student, place)
        # Of an adapter by its name the model is the base that it was folded into.
        out = out.checked(
            student.model,
            processes,
            processing_class=student.processing_class,
            also_read=(name_of(teacher), dense.model.name_or_path),
        )
        with stopwatch("read data"):
            trained_on = given or _read(text, config, dense, student, place)
            trained_on.check_apart(measured_on)
            if task is not None:
                task.check_length(config.sequence_length, dense.model.main_input_name)
        if place.resumable:
            check_begun(place.folder, config, processes, text=trained_on.described["fingerprint"])
        before, taught = measure_both(dense.model, student.model, measured_on, place), Taught.by(dense.model)
        scores = scores_of({"dense": dense.model, "pruned": student.model}, measured_on, metric, place)
        teaching = teacher_of(dense.model, trained_on, config, place)
        if config.teacher_top_k is not None:
            dense.release()
        training = student.for_training()
        trained = distil(training, teaching, trained_on, config, place)
        after = measure_both(dense.model, training, measured_on, place)
        scores_after = scores_of({"pruned": training}, measured_on, metric, place)
        weights = NewWeights()
        if training is not student.model:
            for name, values in weights_of(training).items():
                weights.add(name, values)
        with replaced(student.model, weights):
            doubted = replace(trained, warnings=(*doubts, *trained.warnings))
            section = described_recovery(doubted, trained_on, config, taught, described(before, scores))
            measured = described(after, scores | scores_after)
            found = recovered_report(report, student.model, section, measured_on, measured, stopwatch.seconds)
            for warning in (*trained.warnings, made_worse(found)):
                if warning is not None:
                    logger.warning(warning)
            result = RecoverResult(
                student.model,
                found,
                student.config,
                config,
                student.processing_class,
                processes,
            )
            out = out.settled(student.model, processes)
            # None keeps the new weights if the main one could not save them.
            report = processes.in_all(partial(out.write, result, stopwatch), patiently=True)
            place.clear()  # here, so that Ctrl-C meanwhile gives the model its weights back
            result = replace(result, report=replace(report, timings=timings_of(report, stopwatch.seconds)))
    return replace(result, weights=result.handed_back(), output_dir=out.output_dir)


def _read(text: Any, config: RecoveryConfig, dense: Dense, student: Student, place: Workplace) -> RecoveryText:
    model, kept = dense.model, None
    if place.resumable:
        path = place.folder / f"own_text-{place.processes.rank}.safetensors"
        kept = KeptText(path, model_fingerprint(model), place.processes)
    return read_text(text, config, Reading(model, student.processing_class, place.processes, place.progress, kept))
