"""The Trainer of a recovery: its loss is the divergence from the dense model, and the best state of it is kept.

Through Trainer it runs wherever Accelerate does: under DDP each process has its share of the windows of a step, and a
step is the same whatever their number.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import extract_model_from_parallel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.trainer_utils import EvalLoopOutput, SaveStrategy

from gradprobe_hf.config.recovery import RecoveryConfig
from gradprobe_hf.model.families import makes_random
from gradprobe_hf.recovery.checks import check_dealt
from gradprobe_hf.recovery.divergence import mean_divergence, summed_divergence
from gradprobe_hf.recovery.teacher import Teacher
from gradprobe_hf.recovery.text import NEXT_TOKENS, Layout, Row, collated
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.runtime.stopwatch import Stopwatch

logger = logging.getLogger(__name__)

HELD_OUT = "eval_loss"  # what Trainer calls the loss on its evaluation data, which here is the held-out text
BEST_NAME = "best.safetensors"
SECONDS_NAME = "seconds.json"  # of each stage until a checkpoint, in it
BETAS = (0.9, 0.95)
MAX_GRADIENT_NORM = 1.0
_PRECISION = "ACCELERATE_MIXED_PRECISION"
# What Accelerate puts into a module that it prepares, and leaves there.
_PREPARED = ("forward", "_original_forward", "_is_accelerate_prepared")


def training_arguments(
    config: RecoveryConfig, folder: Path, *, processes: Processes, saves: bool, on_cpu: bool
) -> TrainingArguments:
    """Trainer's arguments.

    Args:
        saves: whether checkpoints are written, to resume from.

    Raises:
        ValueError: windows of a step that cannot be dealt to the processes.
    """
    check_dealt(config, processes.count)
    parts = processes.count * config.gradient_accumulation_steps
    # transformers 5.2x calls it both ways, the older one with a warning.
    known = {field.name for field in fields(TrainingArguments)}
    recompute = "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=config.steps,
        per_device_train_batch_size=config.batch_size // parts,
        per_device_eval_batch_size=config.batch_size // parts,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        learning_rate=config.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=config.warm_up,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        weight_decay=0.0,
        max_grad_norm=MAX_GRADIENT_NORM,
        use_cpu=on_cpu,
        eval_strategy="steps",
        eval_steps=config.distance,
        save_strategy="steps" if saves else "no",
        save_steps=config.save_steps,
        save_total_limit=1,
        logging_steps=config.distance,
        remove_unused_columns=False,
        label_names=["labels"],
        report_to="none",
        disable_tqdm=True,
        # A vision tower's have no part in the loss of text. Trainer's default is not to look for such ones where blocks
        # are recomputed, for the sake of a reentrant recomputation, which this is not.
        ddp_find_unused_parameters=True,
        seed=config.seed % 2**32,  # NumPy's generators take no more
        **{recompute: config.gradient_checkpointing, f"{recompute}_kwargs": {"use_reentrant": False}},
    )
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # several devices take a process each; DataParallel would copy the model in every step
    return arguments


class RecoveryTrainer(Trainer):
    """A Trainer whose loss is the divergence from a teacher, a mean over the predictions that count of a whole step.

    Args:
        layout: of the batches.
        bf16: compute in bfloat16 (autocast); the teacher computes as it is stored.
        stopwatch: whose seconds a checkpoint has.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        teacher: Teacher,
        processes: Processes,
        *,
        layout: Layout = NEXT_TOKENS,
        bf16: bool = False,
        stopwatch: Stopwatch | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, args, data_collator=partial(collated, layout=layout), **options)
        self.teacher, self.processes, self.layout, self.bf16 = teacher, processes, layout, bf16
        self.stopwatch = stopwatch or Stopwatch()
        self.model_accepts_loss_kwargs = True  # then Trainer counts `shift_labels` over a step and all processes
        for callback in (PrinterCallback, ProgressCallback):  # both print to standard output
            self.remove_callback(callback)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        evaluating(self.model)
        summed, counted = summed_divergence(model, inputs, self.teacher, self.layout, bf16=self.bf16)
        # DDP takes the mean of the processes' gradients, of which the sum is wanted.
        terms = counted if num_items_in_batch is None else num_items_in_batch
        loss = summed * (1 if num_items_in_batch is None else self.accelerator.num_processes) / terms
        return (loss, {}) if return_outputs else loss

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """A checkpoint of parameters as they are called in memory, and the seconds until it.

        In files those of a mixture go by other names, which Trainer passes over when it goes on from them.
        """
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SECONDS_NAME).write_text(json.dumps(self.stopwatch.so_far()), encoding="utf-8")
        if not isinstance(self.model, PreTrainedModel):  # adapters have names of their own
            super()._save(output_dir, state_dict)
            return
        self.model.save_pretrained = partial(self.model.save_pretrained, save_original_format=False)
        try:
            super()._save(output_dir, state_dict)
        finally:
            del self.model.save_pretrained

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        missing = set(load_result.missing_keys) - set(getattr(self.model, "all_tied_weights_keys", ()))
        if missing or load_result.unexpected_keys:
            names = ", ".join(sorted([*missing, *load_result.unexpected_keys])[:3])
            raise ValueError(
                f"{self.args.output_dir} holds a checkpoint of other parameters than the model's ({names}, ...): "
                "delete it, and the run begins anew."
            )
        self.model.tie_weights()

    @torch.no_grad()
    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """The mean divergence of a prediction for the held-out rows; Trainer's own counts some rows twice."""

        def summed(rows: list[Row]) -> tuple[Tensor, Tensor]:
            evaluating(self.model)
            batch = self._prepare_inputs(self.data_collator(rows))
            with self.compute_loss_context_manager():
                return summed_divergence(self.model, batch, self.teacher, self.layout, bf16=self.bf16)

        rows, size = self.eval_dataset, self.args.per_device_eval_batch_size
        found = mean_divergence(rows, size, summed, self.processes)
        return EvalLoopOutput(None, None, {HELD_OUT: found}, len(rows))


class BestState(TrainerCallback):
    """Keeps the state with the least held-out divergence in a file, the first among equals; stops when it only rises.

    What was measured so far is read from Trainer's log, so that a resumed run decides as one that was not stopped.

    Args:
        folder: for the file.
        patience: measurements in a row, none better than the one before, behind which training stops.
    """

    def __init__(self, folder: Path, patience: int) -> None:
        self.path, self.patience = folder / BEST_NAME, patience

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        measured = held_out(state.log_history)
        best = best_step(measured)
        if state.is_world_process_zero:
            logger.info("step %d: KL %.4f on held-out text", state.global_step, measured[state.global_step])
            if best == state.global_step:
                save_file(_trainable(kwargs["model"]), self.path)
        if self.has_waited(measured):
            control.should_training_stop = True
            # What comes behind the training may fail, and a resumed run has no step to repeat then.
            control.should_save = args.save_strategy != SaveStrategy.NO

    def has_waited(self, measured: Mapping[int, float]) -> bool:
        """Whether the latest measurements, as many as patience has, are none better than the one before.

        Not than the best one: a high learning rate leads away from weights that are good already, those of least
        squares say, and as it goes down the divergence falls below where it began.
        """
        latest = [measured[step] for step in sorted(measured)][-self.patience - 1 :]
        return len(latest) > self.patience and not any(now < before for before, now in pairwise(latest))

    @torch.no_grad()
    def load(self, model: nn.Module) -> None:
        """Put the best state into the model."""
        trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        for name, values in load_file(self.path).items():
            trainable[name].copy_(values)


def held_out(log: list[dict[str, Any]]) -> dict[int, float]:
    """Step -> the held-out divergence there, of Trainer's log."""
    return {int(entry["step"]): float(entry[HELD_OUT]) for entry in log if HELD_OUT in entry}


def best_step(measured: Mapping[int, float]) -> int:
    """The first step with the least divergence; what is not a number is the worst.

    >>> best_step({0: 0.5, 10: 0.3, 20: 0.3, 30: float("nan")})
    10
    """
    return min(measured, key=lambda step: (math.inf if math.isnan(measured[step]) else measured[step], step))


def _trainable(model: nn.Module) -> dict[str, Tensor]:
    plain = extract_model_from_parallel(model, keep_torch_compile=False)
    return {
        name: parameter.detach().cpu().contiguous()
        for name, parameter in plain.named_parameters()
        if parameter.requires_grad
    }


class ProgressBar(TrainerCallback):
    """A bar on standard error."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.bar = tqdm(total=state.max_steps, initial=state.global_step, desc="recovery", unit="step", leave=False)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.bar.update(state.global_step - self.bar.n)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.bar.close()


def evaluating(model: nn.Module) -> None:
    """Every module in evaluation mode, which Trainer switches off before each step.

    The teacher's predictions are made so; and what a mixture does in training (experts that are drawn, noise on its
    router) has many names. Blocks that are recomputed in backward have to be in training for that, they alone.
    """
    recomputes = torch.is_grad_enabled()
    model.eval()
    for module in model.modules():
        if recomputes and isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
            module.training = True


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """No dropout in blocks that are in training mode, to be recomputed: no layer is left out, no router's input noisy.

    Modules have it as an `nn.Dropout`, or as a number that they pass on, their own or one of their configuration.
    """
    configurations = {id(one.config): one.config for one in model.modules() if isinstance(one, PreTrainedModel)}
    with ExitStack() as undo:
        for holder in (*model.modules(), *configurations.values()):
            names = ["p"] if isinstance(holder, nn.Dropout) else list(filter(makes_random, vars(holder)))
            for name in names:
                if isinstance(value := getattr(holder, name), float):
                    undo.callback(setattr, holder, name, value)
                    setattr(holder, name, 0.0)
        yield


@contextmanager
def forward_kept(model: nn.Module) -> Iterator[None]:
    """The model computes afterwards as it did before: Accelerate leaves its autocast around the forward."""
    before = {name: value for name, value in vars(model).items() if name in _PREPARED}
    try:
        yield
    finally:
        for name in _PREPARED:
            vars(model).pop(name, None)
        vars(model).update(before)


@contextmanager
def accelerate_kept() -> Iterator[None]:
    """The caller's Accelerators go on as they were made: all of a process share states, and a Trainer makes its own.

    In the body of the `with` nothing is known of the precision that `accelerate launch` was asked for, which a Trainer
    would take where its arguments name none: a recovery has an option of its own.
    """
    states = [kind._shared_state for kind in (PartialState, AcceleratorState, GradientState)]
    before = [
        {name: copy(value) if isinstance(value, (dict, list)) else value for name, value in state.items()}
        for state in states
    ]
    launched = os.environ.pop(_PRECISION, None)
    try:
        yield
    finally:
        if launched is not None:
            os.environ[_PRECISION] = launched
        for state, values in zip(states, before, strict=True):
            state.clear()  # in place: every Accelerator has this dict
            state.update(values)


@contextmanager
def generators_kept() -> Iterator[None]:
    """The caller's random generators go on from where they were: Trainer seeds them all."""
    states = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
