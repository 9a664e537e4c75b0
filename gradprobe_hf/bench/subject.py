"""Subjects: one loaded model, and the passes of it that are timed.

Seconds are of this process's clock; on CUDA of events on the device, which have no part of what the host does
meanwhile.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from gradprobe_hf.estimation.peak import begin_peak, peak_bytes
from gradprobe_hf.memory.memory_errors import is_out_of_memory
from gradprobe_hf.model.config_names import text_attribute
from gradprobe_hf.model.families import longest_text, random_batch, without_cache
from gradprobe_hf.model.loading.load import load_model
from gradprobe_hf.model.parameters import input_device, parameter_bytes
from gradprobe_hf.model.passes.decoding import plain_generation
from gradprobe_hf.tasks.table import auto_classes


@dataclass(frozen=True)
class Workload:
    """What every model is given.

    Attributes:
        prompt_length: tokens that are read.
        new_tokens: tokens that are written behind them, one text at a time.
    """

    prompt_length: int
    new_tokens: int


@dataclass(frozen=True)
class Facts:
    """What is known of a model before it runs.

    Attributes:
        reads_text: whether it takes token ids; otherwise one image, or one sound.
        writes: whether it is asked to generate: it reads text, and has a `generate`.
        positions: the longest text it takes, in tokens; None: any, or none at all.
        device: that computes.
    """

    cls: str
    parameters: int
    dtype: str
    reads_text: bool
    writes: bool
    positions: int | None
    device: str
    threads: int


@dataclass(frozen=True)
class Generated:
    """Times of one text that was written. Attributes: seconds to the first token, and of each behind it, the mean."""

    first_token: float
    per_token: float


class Subject:
    """A model in eval mode.

    Args:
        before: bytes of memory that this process had before it was loaded.
    """

    def __init__(self, model: PreTrainedModel, before: int = 0) -> None:
        self.model = model.eval()
        self._before = before

    @classmethod
    def load(cls, name: str | Path, task: str | None = None, **from_pretrained_kwargs: Any) -> Subject:
        before = psutil.Process().memory_info().rss
        model = load_model(name, auto_classes=auto_classes(task), **from_pretrained_kwargs)
        _leave_files(model)
        begin_peak(torch.device("cpu"))  # for a moment weights were there twice
        return cls(model, before)

    @classmethod
    def of_config(cls, model_class: type[PreTrainedModel], config: Any, dtype: torch.dtype, device: str) -> Subject:
        """A model with random weights."""
        before = psutil.Process().memory_info().rss
        return cls(model_class._from_config(config, dtype=dtype).to(device), before)

    @property
    def facts(self) -> Facts:
        model = self.model
        reads_text = model.main_input_name == "input_ids"
        return Facts(
            cls=type(model).__name__,
            parameters=model.num_parameters(),
            dtype=str(model.dtype).removeprefix("torch."),
            reads_text=reads_text,
            writes=model.can_generate() and reads_text,
            positions=longest_text(model),
            device=_named(input_device(model)),
            threads=torch.get_num_threads(),
        )

    @torch.inference_mode()
    def prefill(self, work: Workload) -> float:
        """Seconds of a forward pass: of the prompt, with the logits of its last token, as a text begins."""
        batch, clock = self._batch(work), Clock(self._device)
        last = {"logits_to_keep": 1} if "logits_to_keep" in self._takes else {}
        begun = clock.mark()
        with self._failures_told(f"run on a batch of {', '.join(batch)} that is made up"):
            self.model(**batch, **without_cache(self.model), **last)
        return clock.seconds(begun, clock.mark())

    @torch.inference_mode()
    def generate(self, work: Workload) -> Generated:
        """Seconds of greedy decoding behind the prompt."""
        batch, clock = self._batch(work), Clock(self._device)
        batch.pop("decoder_input_ids", None)  # it makes its own
        batch.setdefault("attention_mask", torch.ones_like(batch["input_ids"]))  # of code of its own it is there
        ticks = _Ticks(clock)
        with self._failures_told("write behind a prompt that is made up"), plain_generation(self.model):
            begun = clock.mark()
            self.model.generate(
                **batch,
                do_sample=False,
                num_beams=1,
                min_new_tokens=work.new_tokens,
                max_new_tokens=work.new_tokens,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([ticks]),
                use_cache=True,
            )
        first, last = ticks.marks[0], ticks.marks[-1]
        return Generated(clock.seconds(begun, first), clock.seconds(first, last) / (len(ticks.marks) - 1))

    @property
    def peak_bytes(self) -> int:
        """The most memory there was, weights included: of the device, or what this process has grown by."""
        found = peak_bytes(self._device)
        # What was freed since then may be more than a small model takes.
        return found if self._device.type == "cuda" else max(found - self._before, parameter_bytes(self.model))

    @property
    def _device(self) -> torch.device:
        return input_device(self.model)

    @cached_property
    def _takes(self) -> frozenset[str]:
        return frozenset(inspect.signature(self.model.forward).parameters)

    @contextmanager
    def _failures_told(self, doing: str) -> Iterator[None]:
        """What a model wants of an input that is made up is not known of every class: its errors name the model."""
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise ValueError(
                f"{self.model.name_or_path or 'the model'}: a {type(self.model).__name__} cannot be timed: it does not "
                f"{doing} ({type(error).__name__}: {error})."
            ) from error

    def _batch(self, work: Workload) -> dict[str, Tensor]:
        batch = random_batch(self.model, 1, work.prompt_length)
        if self.model.config.is_encoder_decoder:
            start = text_attribute(self.model.config, "decoder_start_token_id", 0)
            batch["decoder_input_ids"] = torch.full((1, 1), start)
        return {name: tensor.to(self._device) for name, tensor in batch.items()}


class Clock:
    """Marks in time, on the device that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, first: Any, last: Any) -> float:
        if self._device.type != "cuda":
            return float(last - first)
        last.synchronize()
        return float(first.elapsed_time(last)) / 1000  # of milliseconds


class _Ticks(StoppingCriteria):
    """A mark behind every token; nothing stops."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.marks: list[Any] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:  # noqa: ARG002
        self.marks.append(self.clock.mark())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _named(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _leave_files(model: PreTrainedModel) -> None:
    """Copy weights out of the files that they are mapped to, into memory that is the process's own.

    How a file came into the page cache matters: of two checkpoints of the same shapes one took 0.85 to 1.15 times as
    long as the other, differently from run to run.
    """
    for parameter in model.parameters():
        if parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()
