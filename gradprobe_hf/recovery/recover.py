"""recover_pretrained: load, compare, measure, train, measure again, save."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import PartialState
from torch import nn
from transformers import PreTrainedModel

from gradprobe_hf.checkpoint.destination import Destination
from gradprobe_hf.checkpoint.origin import check_made_of, stored_report
from gradprobe_hf.checkpoint.result import PruneResult
from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.config.recovery import RecoveryConfig, resolve_recovery
from gradprobe_hf.data.batch_checks import check_batches
from gradprobe_hf.data.batches import Batches
from gradprobe_hf.data.evidence import check_evidence
from gradprobe_hf.data.labelled import ROWS_MEASURED
from gradprobe_hf.data.self_generated import KeptText
from gradprobe_hf.data.text_options import PYDOC, SELF, TextOptions, is_written
from gradprobe_hf.data.windows import WINDOWS_MEASURED, WindowSpec, load_batches, window_length
from gradprobe_hf.evaluation.divergence import PairedMeasurement, check_one_vocabulary, measure_pair
from gradprobe_hf.evaluation.task_metric import TaskMetric, measure_metric, metric_of
from gradprobe_hf.model.adapters import imported_peft
from gradprobe_hf.model.families import is_causal
from gradprobe_hf.model.fingerprint import weights_fingerprint
from gradprobe_hf.model.loading import Loaded, load, name_of
from gradprobe_hf.model.processing import load_processing_class
from gradprobe_hf.model.upcast import upcast_products
from gradprobe_hf.probe.engine import Workload
from gradprobe_hf.reconstruction.new_weights import NewWeights
from gradprobe_hf.recovery.checks import (
    check_alike,
    check_models,
    check_pruned,
    check_revisions,
    check_texts,
    check_trainable,
)
from gradprobe_hf.recovery.distil import Workplace, check_own, check_top_k, distil, teacher_of, weights_of, workplace
from gradprobe_hf.recovery.result import (
    RecoverResult,
    Taught,
    described,
    described_recovery,
    recovered_report,
    report_without_pruning,
    timings_of,
)
from gradprobe_hf.recovery.text import Reading, RecoveryText, check_written, read_text, task_of, task_options
from gradprobe_hf.report.report import Report
from gradprobe_hf.run.apply import replaced
from gradprobe_hf.run.request.checks import check_columns, check_names, check_processing_class
from gradprobe_hf.runtime.option_checks import check_resume_dir
from gradprobe_hf.runtime.paths import expanded, expanded_folder, expanded_model
from gradprobe_hf.runtime.plain_computation import plain_computation
from gradprobe_hf.runtime.processes import join_processes
from gradprobe_hf.runtime.stopwatch import Stopwatch
from gradprobe_hf.tasks.table import auto_classes

MEASURED_AT_ONCE = 4  # windows of the evaluation in one pass


@plain_computation()
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
    config, processes, stopwatch = resolve_recovery(config), join_processes(), Stopwatch()
    pruned, teacher = expanded_model(pruned), expanded_model(teacher)
    output_dir, resume_dir = expanded(output_dir), expanded(resume_dir)
    from_pretrained_kwargs = expanded_folder(from_pretrained_kwargs)
    out = Destination.of(output_dir, overwrite, push_to_hub, hub_private_repo)
    check_names(from_pretrained_kwargs, recover_pretrained, RecoveryConfig)
    check_models(pruned, teacher, from_pretrained_kwargs)
    check_revisions(pruned, teacher, from_pretrained_kwargs.get("revision"), teacher_revision)
    check_processing_class(processing_class)
    check_texts(text, evaluation)
    check_columns(TextOptions.of(config), text, evaluation)
    out.check(name_of(pruned.model if isinstance(pruned, PruneResult) else pruned), name_of(teacher))
    if resume_dir is not None:
        check_resume_dir(resume_dir, output_dir)
        check_own(Path(resume_dir), output_dir)
    with stopwatch("load"):
        named = {"auto_classes": auto_classes(config.task), **from_pretrained_kwargs}
        student = _Student.of(pruned, named, processing_class)
        dense = _Dense(teacher, named | {"revision": teacher_revision}, student.model)
        student.check(dense, config)
        check_written(student.model, text)
        if student.processing_class is None:
            student = replace(student, processing_class=load_processing_class(dense.model, **dense.kwargs))
    report = student.report or report_without_pruning(student.model, dense.model, student.processing_class)
    with (
        upcast_products(dense.model, student.model),
        workplace(None if resume_dir is None else Path(resume_dir), processes, stopwatch, progress) as place,
    ):
        with stopwatch("read data"):
            measured_on = _evaluation(evaluation, config, dense.model, student.processing_class)
            task = task_of(dense.model, config)
            metric = metric_of(task, config.metric, measured_on, student.processing_class)
            # A text that is too short comes before a repository is created, and one that is yet to be written after.
            given = None if is_written(text) else _read(text, config, dense, student, place)
        out = out.checked(student.model, processes)
        with stopwatch("read data"):
            trained_on = given or _read(text, config, dense, student, place)
            trained_on.check_apart(measured_on)
        before, taught = _measured(dense.model, student.model, measured_on, place), Taught.by(dense.model)
        scores = _scores({"dense": dense.model, "pruned": student.model}, measured_on, metric, place)
        teaching = teacher_of(dense.model, trained_on, config, place)
        if config.teacher_top_k is not None:
            dense.release()
        training = student.for_training()
        trained = distil(training, teaching, trained_on, config, place)
        after = _measured(dense.model, training, measured_on, place)
        scores_after = _scores({"pruned": training}, measured_on, metric, place)
        weights = NewWeights()
        if training is not student.model:
            for name, values in weights_of(training).items():
                weights.add(name, values)
        with replaced(student.model, weights):
            section = described_recovery(trained, trained_on, config, taught, described(before, scores))
            measured = described(after, scores | scores_after)
            result = RecoverResult(
                student.model,
                recovered_report(report, student.model, section, measured_on, measured, stopwatch.seconds),
                student.config,
                config,
                student.processing_class,
                processes,
            )
            report = out.write(result, stopwatch)
            result = replace(result, report=replace(report, timings=timings_of(report, stopwatch.seconds)))
            processes.barrier()  # none keeps the new weights if the main one could not save them
    return replace(result, weights=result.handed_back())


@dataclass(frozen=True)
class _Student:
    """The pruned model.

    Attributes:
        owned: whether it was loaded here, so that it may be trained itself.
        report, config: of its pruning, where that was done with this package.
    """

    model: PreTrainedModel
    owned: bool
    processing_class: Any
    report: Report | None = None
    config: GradProbeConfig | None = None

    @classmethod
    def of(cls, pruned: Any, kwargs: Mapping[str, Any], processing_class: Any) -> _Student:
        if isinstance(pruned, PruneResult):
            return cls(pruned.model, False, processing_class or pruned.processing_class, pruned.report, pruned.config)
        if isinstance(pruned, nn.Module):
            loaded = load(pruned)
            found = processing_class or load_processing_class(loaded.model, loaded.processing_name)
            return cls(loaded.model, loaded.model is not pruned, found)
        loaded = load(pruned, **kwargs)
        found = processing_class or load_processing_class(loaded.model, loaded.processing_name, **kwargs)
        model = loaded.model.to(PartialState().device)
        report, config = stored_report(str(pruned), kwargs)
        return cls(model, True, found, report, config)

    def check(self, dense: _Dense, config: RecoveryConfig) -> None:
        """Raise ValueError where the two models do not go together, or one cannot be used."""
        task_of(self.model, config)
        check_trainable(self.model, "recovery")
        check_alike(self.model, dense.model)
        dense.check_origin(self.report)
        if dense.processing_class is not None and self.processing_class is not None:
            check_one_vocabulary(self.processing_class, dense.processing_class, ("the pruned model", "the teacher"))
        check_pruned(self.model, dense.model)
        check_top_k(dense.model, config.teacher_top_k)
        if config.lora_r is not None:
            imported_peft()  # before anything is trained

    def for_training(self) -> PreTrainedModel:
        """The model to train: a copy of one that is the caller's."""
        return self.model if self.owned else copy.deepcopy(self.model)


class _Dense:
    """The teacher; one that is named can be let go, and is read again when it is asked for.

    Adapters are folded into it, unasked: nothing is pruned of it.

    Args:
        beside: the model on whose device it is to be.
    """

    def __init__(self, teacher: Any, kwargs: Mapping[str, Any], beside: PreTrainedModel) -> None:
        self._named = None if isinstance(teacher, nn.Module) else teacher
        self.kwargs = {name: value for name, value in kwargs.items() if (name, value) != ("revision", None)}
        self._device = beside.device
        self._kept: Loaded | None = load(teacher, merge_adapters=None) if self._named is None else None

    @property
    def _loaded(self) -> Loaded:
        if self._kept is None:
            self._kept = load(self._named, merge_adapters=None, **self.kwargs)  # type: ignore[arg-type]
            self._kept.model.to(self._device)
        return self._kept

    @property
    def model(self) -> PreTrainedModel:
        return self._loaded.model

    @property
    def processing_class(self) -> Any:
        """The tokenizer of a model that is named."""
        if self._named is None:
            return None
        return load_processing_class(self.model, self._loaded.processing_name, **self.kwargs)

    def check_origin(self, report: Report | None) -> None:
        """Raise ValueError where it is named, and is not what was pruned."""
        if self._named is not None:
            check_made_of(report, self._loaded, f"teacher={str(self._named)!r}")

    def release(self) -> None:
        if self._named is not None:
            self._kept = None


def _evaluation(source: Any, config: RecoveryConfig, model: PreTrainedModel, processing_class: Any) -> Batches:
    """What is measured on; empty where nothing is."""
    if source is None and is_causal(model):
        source = PYDOC
    if source is False or source is None:
        return Batches.none()
    length = window_length(config.sequence_length, model)
    text = TextOptions.of(config)
    if source == PYDOC:  # one document, of which windows are cut whatever is done with those that are trained on
        text = replace(text, packing=True)
    samples = config.evaluation_samples
    spec = WindowSpec(samples or WINDOWS_MEASURED, length, MEASURED_AT_ONCE, text=text)
    task = task_options(model, config, samples or ROWS_MEASURED)
    found = load_batches(source, spec, part="evaluation", model=model, processing_class=processing_class, task=task)
    check_batches(model, found, "evaluation", needs_loss=True)
    check_evidence(model, found, "evaluation")
    return found


def _read(text: Any, config: RecoveryConfig, dense: _Dense, student: _Student, place: Workplace) -> RecoveryText:
    model, kept = dense.model, None
    if place.resumable:
        path = place.folder / f"own_text-{place.processes.rank}.safetensors"
        kept = KeptText(path, weights_fingerprint(model), place.processes)
    return read_text(text, config, Reading(model, student.processing_class, place.processes, place.progress, kept))


def _measured(
    dense: PreTrainedModel, pruned: PreTrainedModel, batches: Batches, place: Workplace
) -> PairedMeasurement | None:
    """Both models on the evaluation text; None where there is none."""
    if not batches:
        return None
    work = partial(Workload, batches=batches, processes=place.processes, progress=place.progress)
    with place.stopwatch("evaluate"):
        return measure_pair(work(dense), work(pruned))


def _scores(
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
