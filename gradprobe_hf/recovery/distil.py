"""A whole training: a pruned model and a teacher -> the same model with other kept weights, and what was measured.

Memory, in bytes for each parameter: 16 for the pruned model (float32 weights, gradients and two moments of AdamW), and
those of the dense model as it is stored (2 in bfloat16), unless its predictions were written to disk. With adapters
(`lora_r`), which are few, it is 4, and a byte for each mask.
"""

from __future__ import annotations

import copy
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback

from gradprobe_hf.config.recovery import RecoveryConfig
from gradprobe_hf.memory.memory_errors import memory_errors
from gradprobe_hf.model.families import is_causal
from gradprobe_hf.model.fingerprint import model_fingerprint
from gradprobe_hf.model.passes.upcast import upcast_products
from gradprobe_hf.model.targets import Target, default_targets, every_matrix, find_targets
from gradprobe_hf.recovery.adapters import with_adapters
from gradprobe_hf.recovery.divergence import divergence_as_left
from gradprobe_hf.recovery.resuming import (
    PREDICTIONS,
    checkpoint_to_resume,
    disk_errors,
    ended_state,
    remove_state,
    seconds_until,
)
from gradprobe_hf.recovery.teacher import LiveTeacher, Teacher, Writing, written
from gradprobe_hf.recovery.text import RecoveryText
from gradprobe_hf.recovery.trainer import (
    BestState,
    ProgressBar,
    RecoveryTrainer,
    accelerate_kept,
    best_step,
    forward_kept,
    generators_kept,
    held_out,
    training_arguments,
    without_dropout,
)
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.runtime.scratch import alone_in, remove_scratch, scratch_folder
from gradprobe_hf.runtime.stopwatch import Stopwatch
from gradprobe_hf.selection.packed_masks import PackedMasks
from gradprobe_hf.tasks.table import is_text_alone, task_of_class
from gradprobe_hf.training.keeper import is_unlearned
from gradprobe_hf.training.lora import masked_adapters, merge_with_masks
from gradprobe_hf.training.sparsity import SparsityCallback

logger = logging.getLogger(__name__)

_SEEN_AFTER = 30  # seconds, in which a network disk shows a new file everywhere
LOST = 0.1  # of what training gained: where the model as it is stored has lost as much again, that is told


@dataclass(frozen=True)
class Workplace:
    """Where a training runs.

    Attributes:
        folder: for checkpoints, the best state and the teacher's predictions; all processes see it.
        resumable: whether checkpoints are written, and a run that was killed goes on from the last.
        stopwatch: of a recovery alone: its checkpoints have the seconds.
    """

    folder: Path
    resumable: bool
    processes: Processes
    stopwatch: Stopwatch
    progress: bool

    def clear(self) -> None:
        """Remove the folder, when no process needs the state any more. A collective."""
        self.processes.barrier()
        if self.processes.is_main:
            if self.resumable:
                with suppress(OSError):
                    remove_state(self.folder)
            remove_scratch(self.folder)


@dataclass(frozen=True)
class Trained:
    """What a training came to.

    Attributes:
        steps: that were taken.
        best_step: whose state was kept; 0: no step was better than none.
        held_out: step -> mean divergence on the held-out text there, in nats per token.
        held_out_as_left: the same of the model that was handed back: in its own type, adapters folded in.
        tokens: that were trained on, those of several epochs as often; where rows differ in length the mean of them all
            counts for each.
        seconds: of all of them, in a run that was resumed those of the calls before, too.
        warnings: what became of it otherwise than a reader would think.
    """

    steps: int
    best_step: int
    held_out: dict[int, float]
    held_out_as_left: float
    tokens: int
    seconds: float
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@contextmanager
def workplace(
    resume_dir: Path | None, processes: Processes, stopwatch: Stopwatch, progress: bool, *, keeps: bool = False
) -> Iterator[Workplace]:
    """A folder for one training: the one that is given, or a temporary one. It is removed if the body succeeds.

    Args:
        keeps: whether one that is given stays: what was trained is yet to be saved, and the caller removes it then.
    """
    folder = resume_dir or processes.on_main(partial(scratch_folder, "recovery"))
    folder.mkdir(parents=True, exist_ok=True)
    here = Workplace(folder, resume_dir is not None, processes, stopwatch, progress and processes.is_main)
    try:
        if processes.count > 1:
            _check_shared(folder, processes)
        with alone_in(resume_dir, processes):
            yield here
        if not keeps:
            here.clear()
    finally:
        if resume_dir is None and processes.is_main:
            remove_scratch(folder)
        with suppress(OSError):  # nothing was begun
            folder.rmdir()


def _check_shared(folder: Path, processes: Processes) -> None:
    """Raise ValueError where not all processes see one folder: they read the best state there, which one has written.

    Each has made it by its name, so that its being there tells nothing.
    """
    marked = processes.on_main(partial(_marked, folder))
    try:
        processes.in_all(partial(_check_seen, folder, marked))
    finally:
        if processes.is_main:
            (folder / marked).unlink()


def _marked(folder: Path) -> str:
    """The name of a file that is in the folder now."""
    handle, path = tempfile.mkstemp(prefix=".seen-", dir=folder)
    os.close(handle)
    return Path(path).name


def _check_seen(folder: Path, name: str) -> None:
    """Raise ValueError where this process does not see what the main one has made."""
    deadline = time.monotonic() + _SEEN_AFTER
    while not (folder / name).is_file():
        if time.monotonic() > deadline:
            raise ValueError(
                f"one of the processes does not see the main one's folder {folder}. On several machines set resume_dir "
                "(--resume-dir) to a folder on a disk that all of them see."
            )
        time.sleep(0.1)


def teacher_of(model: PreTrainedModel, text: RecoveryText, config: RecoveryConfig, place: Workplace) -> Teacher:
    """The dense model itself, or what it has written to disk; then it is of no more use to the training.

    Raises:
        ValueError: more tokens than the vocabulary has.
        OSError: they do not fit on the disk.
    """
    k = config.teacher_top_k
    if k is None:
        return LiveTeacher(model, text.layout)
    check_top_k(model, k)
    how = Writing(place.folder / PREDICTIONS, k, config.batch_size, place.processes, place.progress)
    with memory_errors(place.stopwatch, remedies(config)), place.stopwatch("dense model's predictions"):
        return written(model, text, how)


def check_top_k(model: PreTrainedModel, k: int | None) -> None:
    """Raise ValueError where the vocabulary has no more tokens than are to be kept."""
    if k is None:
        return
    if not is_causal(model):
        raise ValueError(
            f"teacher_top_k={k} is of a causal language model's vocabulary, and a {type(model).__name__} is none: "
            "leave it unset."
        )
    outputs = model.get_output_embeddings()
    vocabulary = model.config.get_text_config().vocab_size if outputs is None else outputs.weight.shape[0]
    if k >= vocabulary:
        raise ValueError(
            f"teacher_top_k={k} of a vocabulary of {vocabulary:,} tokens: leave it unset, and all predictions count."
        )


def distil(
    student: PreTrainedModel,
    teacher: Teacher,
    text: RecoveryText,
    config: RecoveryConfig,
    place: Workplace,
    frozen: Set[str] = frozenset(),
) -> Trained:
    """Train every weight of `student` that is not zero, in place; its zeros stay. The best state is what is left.

    A model without zeros, that is smaller than the dense one, is trained whole.

    Its parameters are float32 while it trains, and of their own type again afterwards.

    Args:
        frozen: names of parameters that stay as they are.

    Raises:
        ValueError: the folder holds a run of something else.
        MemoryError: with what would help.
    """
    bf16 = student.dtype == torch.bfloat16 if config.bf16 == "auto" else config.bf16
    targets, masks = _masks(student, adapted=config.lora_r is not None)
    weights = model_fingerprint(student)
    of = {"weights": weights, "teacher": teacher.identity, "text": text.described["fingerprint"]}
    checkpoint = checkpoint_to_resume(place.folder, config, place.processes, of) if place.resumable else None
    place.stopwatch.add(seconds_until(checkpoint))
    best = BestState(place.folder, config.early_stopping_patience)
    with (
        memory_errors(place.stopwatch, remedies(config)),
        disk_errors(place.folder, place.resumable),
        place.stopwatch("recovery"),
        _training_modes(student, torch.bfloat16 if bf16 else None, frozen),
        _kept_zero(student, targets, masks, config) as (trains, keepers),
    ):
        arguments = training_arguments(
            config,
            place.folder,
            processes=place.processes,
            saves=place.resumable,
            on_cpu=student.device.type == "cpu",
        )
        # A run that is resumed has measured where it began.
        arguments.eval_on_start = checkpoint is None
        trainer = RecoveryTrainer(
            trains,
            arguments,
            teacher,
            place.processes,
            layout=text.layout,
            bf16=bf16,
            stopwatch=place.stopwatch,
            train_dataset=_whole_steps(text.trained, config.batch_size, config.steps),
            eval_dataset=text.kept_back,
            callbacks=[*([ProgressBar()] if place.progress else []), *keepers, best],
        )
        if (ended := ended_state(checkpoint, config, best)) is not None:
            trainer.state = ended
        else:
            with place.processes.losing():
                trainer.train(resume_from_checkpoint=checkpoint)
        place.processes.barrier()
        if config.gradient_checkpointing:
            _stop_recomputing(student)
        best.load(trains)
        measured, steps = held_out(trainer.state.log_history), trainer.state.global_step
    with memory_errors(place.stopwatch, remedies(config)), place.stopwatch("recovery"):
        size = arguments.per_device_eval_batch_size
        left = divergence_as_left(student, text, size, teacher, place.processes)
    warnings = (*_warnings(measured, left, student.dtype), *_about_media(student, text))
    tokens = round(steps * config.batch_size * text.tokens / len(text.trained))
    return Trained(steps, best_step(measured), measured, left, tokens, place.stopwatch.seconds["recovery"], warnings)


def _warnings(measured: Mapping[int, float], left: float, dtype: torch.dtype) -> list[str]:
    """Where no step helped, or rounding took much of what was gained. Args: see `Trained`."""
    begun, best = measured[0], measured[best_step(measured)]
    if best_step(measured) == 0:
        return [
            f"No step brought the divergence on the held-out text below its beginning ({begun:.4f}): the weights are "
            "as they were. Try a lower learning_rate, or more text."
        ]
    if left - best <= LOST * (begun - best):
        return []
    wider = "bf16=False (--bf16 off)" if dtype == torch.float32 else "dtype=float32 (--dtype float32)"
    return [
        f"As it is stored, in {str(dtype).removeprefix('torch.')}, the model diverges by {left:.4f} on the held-out "
        f"text, where training measured {best:.4f} and began with {begun:.4f}. With {wider} less is lost by rounding."
    ]


def _about_media(student: PreTrainedModel, text: RecoveryText) -> list[str]:
    """Where a model that also sees or hears is trained on text."""
    task = task_of_class(type(student).__name__, student.config.is_encoder_decoder)
    if task is None or task.medium is None or not is_text_alone(task, text.rows):
        return []
    media = task.medium.what
    return [
        f"The recovery trained on text alone, and a {type(student).__name__} reads {media}, too: whether its answers "
        f"about {media} are better or worse for it is not known. Measure them."
    ]


@contextmanager
def _training_modes(student: PreTrainedModel, autocast: torch.dtype | None, frozen: Set[str]) -> Iterator[None]:
    """In the body of the `with` the model can be trained; behind it, it and this process are as they were."""
    with (
        accelerate_kept(),
        generators_kept(),
        torch.enable_grad(),
        upcast_products(student, autocast=autocast),
        _trainable(student, frozen),
        without_dropout(student),
        forward_kept(student),
    ):
        yield


@contextmanager
def _kept_zero(
    student: PreTrainedModel, targets: tuple[Target, ...], masks: PackedMasks, config: RecoveryConfig
) -> Iterator[tuple[Any, list[TrainerCallback]]]:
    """What is trained, and the callbacks that keep its zeros: the model itself, or adapters inside the mask.

    Adapters are folded in behind the body of the `with`, if that succeeds.
    """
    if config.lora_r is None:
        yield student, [SparsityCallback(masks)]
        return
    torch.manual_seed(config.seed)  # adapters begin at random, and Trainer seeds later
    adapted = with_adapters(student, targets, config.lora_r)
    with masked_adapters(adapted, masks):
        yield adapted, []
        merge_with_masks(adapted, masks)


def _whole_steps(rows: list[dict[str, Any]], batch_size: int, steps: int) -> list[dict[str, Any]]:
    """The rows, and as many of them again as make every step of an epoch a whole one.

    A step of fewer would be another one in two processes, or in two parts, than in one.
    """
    if steps * batch_size <= len(rows):  # none twice, while there are others
        return rows[: len(rows) - len(rows) % batch_size]
    return [*rows, *islice(cycle(rows), -len(rows) % batch_size)]


def _constants(model: nn.Module) -> set[str]:
    """Parameters that the class itself never trains: Whisper's sinusoids, which other tools make anew.

    Of a model in memory its user may have frozen others, all of them say.
    """
    try:
        with torch.device("meta"):
            made = type(model)(copy.deepcopy(model.config))
    except Exception:  # a class that is made otherwise
        return set()
    return {name for name, parameter in made.named_parameters() if not parameter.requires_grad}


@contextmanager
def _trainable(model: nn.Module, frozen: Set[str]) -> Iterator[None]:
    """In the body of the `with`, floating-point parameters in float32 at least, with a gradient if they are not frozen.

    Steps of a hundred-thousandth of a weight are lost in bfloat16.
    """
    fixed = frozen | _constants(model)
    types = {name: (parameter.dtype, parameter.requires_grad) for name, parameter in model.named_parameters()}
    use_cache = getattr(model.config, "use_cache", None)  # Trainer's to set
    try:
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
                parameter.requires_grad_(name not in fixed)
        yield
    finally:
        for name, parameter in model.named_parameters():
            parameter.grad = None
            if name in types:
                dtype, required = types[name]
                parameter.data = parameter.data.to(dtype)
                parameter.requires_grad_(required)
        if use_cache is not None:
            model.config.use_cache = use_cache  # type: ignore[union-attr]


def _stop_recomputing(model: Any) -> None:
    """Undo what Trainer leaves switched on; transformers 5.2x calls it both ways."""
    name = "activation_checkpointing_disable"
    getattr(model, name if hasattr(model, name) else "gradient_checkpointing_disable")()


def _masks(student: PreTrainedModel, adapted: bool) -> tuple[tuple[Target, ...], PackedMasks]:
    """The matrices of the blocks, and all else with zeros, and their masks; of one without zeros it is empty.

    Where whole structures are gone, a few weights, or the row of a padding token, may be zero all the same.

    Args:
        adapted: whether adapters train, and no weight itself: then only what can have one is to be masked.
    """
    inside, masks = {target.name for target in default_targets(student)}, PackedMasks()
    every = find_targets(student, include=["*"]) if adapted else every_matrix(student)
    for target in every:
        zero = target.matrix(student).flatten(1) == 0
        count = int(zero.sum())
        if target.name in inside or (count and not is_unlearned(target, count)):
            masks.add(target.name, [zero])
    return tuple(target for target in every if target.name in masks), masks


def remedies(config: RecoveryConfig) -> list[str]:
    """Settings that take less memory than the ones in use, those that cost the least time first."""
    found = []
    if config.gradient_accumulation_steps < config.batch_size:
        parts = config.batch_size
        found.append(f"gradient_accumulation_steps={parts} (--gradient-accumulation-steps {parts})")
    if not config.gradient_checkpointing:
        found.append("gradient_checkpointing=True (--gradient-checkpointing on)")
    if config.teacher_top_k is None:
        found.append("teacher_top_k=512 (--teacher-top-k 512)")
    if config.lora_r is None:
        found.append("lora_r=16 (--lora-r 16)")
    return [*found, "a shorter sequence_length (--sequence-length)"]


@torch.no_grad()
def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameter name -> its values; a tied one once."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}
