"""Latency: seconds of a text on this machine, of the dense model and of shapes of it, whose weights are random.

How long a model takes does not depend on its weights. So blocks of each width are timed before anything is pruned, in
models of one block; and the shape that is chosen is timed whole, beside the dense model. All take turns in every round,
so that whatever else the machine does meets all of them, and medians of the rounds count.
"""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import nn
from transformers import PreTrainedModel

from gradprobe_hf.estimation.machine import available_bytes, fits
from gradprobe_hf.model.families import cache_name, longest_text, random_batch, stack_of, without_cache
from gradprobe_hf.model.parameters import input_device, is_offloaded, parameter_bytes
from gradprobe_hf.model.passes.patches import eval_mode
from gradprobe_hf.model.passes.upcast import native_products
from gradprobe_hf.model.targets import Target
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.runtime.device_time import now
from gradprobe_hf.structures.latency_table import LatencyTable
from gradprobe_hf.structures.plan import Plan
from gradprobe_hf.structures.removal import Removal
from gradprobe_hf.structures.shapes import random_smaller
from gradprobe_hf.structures.table import STRUCTURES

PROMPT, NEW = 512, 32  # tokens that are read, and that are written behind them, one text at a time
STEPS = 8  # of those that are written, timed in a round
ROUNDS, WARMUP = 10, 2  # that count, and that do not: caches fill, kernels are chosen
WIDTHS = 4  # amounts of a structure that are timed; what lies between is interpolated


@dataclass(frozen=True)
class Timed:
    """Seconds of one text. Attributes: in all, and `inside` of the blocks."""

    whole: float
    inside: float


def check_timeable(model: PreTrainedModel, plan: Plan) -> None:
    """Raise ValueError for a model whose latency would say nothing about the checkpoint's.

    Args:
        plan: of the model, whatever goes.
    """
    inside = {kind.inside for kind in plan.kinds}
    if len(inside) > 1:
        everywhere = frozenset.intersection(*inside)
        own = sorted(sorted(one - everywhere) for one in inside)
        apart = " or ".join(", ".join(names) or "none of these" for names in own)
        raise ValueError(
            f"latency takes one block for all, and those of {type(model).__name__} have {apart} in them. Give another "
            "budget: params=0.75, say, or memory='200MB'."
        )
    if is_offloaded(model):
        raise ValueError(
            "latency is measured of a model in memory, and parts of this one are offloaded. Give another "
            "budget: params=0.75, say, or memory='200MB'."
        )
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"latency is that of blocks of one stack, and {type(model).__name__} has an encoder and a decoder. Give "
            "another budget: params=0.75, say, or memory='200MB'."
        )
    if _written(model) and cache_name(model) is None:
        raise ValueError(
            f"latency is that of a text written token by token, and {type(model).__name__} cannot be given what it "
            "keeps of the tokens before. Give another budget: params=0.75, say, or memory='200MB'."
        )


def latency_table(context: RunContext, axes: Mapping[str, Sequence[int]]) -> LatencyTable:
    """Blocks of the widths along these axes, timed by the main process.

    Args:
        axes: structure -> how many of it may go, rising from 0.
    """
    return context.processes.on_main(lambda: _timed_table(context.model, context.targets, axes), patiently=True)


def measured_latency(context: RunContext, going: Mapping[str, int]) -> dict[str, float]:
    """Seconds of the dense model and of this shape, and the median of the ratios of the rounds."""
    return context.processes.on_main(lambda: _measured(context, going), patiently=True)


def _measured(context: RunContext, going: Mapping[str, int]) -> dict[str, float]:
    model = context.model
    made = _random(model, Removal.example(Plan.of(model, context.targets, going)))
    dense, smaller = _rounds([_Subject(_own_memory(context), length_of(model)), _Subject(made, length_of(model))])
    ratios = [own.whole / its.whole for own, its in zip(smaller, dense, strict=True)]
    return {
        "dense": statistics.median(one.whole for one in dense),
        "smaller": statistics.median(one.whole for one in smaller),
        "ratio": statistics.median(ratios),
    }


def _own_memory(context: RunContext) -> PreTrainedModel:
    """The dense model in memory of its own, as the smaller one is, if there is room.

    Weights that are mapped from a file take more or less time: see `bench/subject.py`.
    """
    model = context.model
    if input_device(model).type != "cpu" or available_bytes(torch.device("cpu")) < 2 * parameter_bytes(model):
        return model
    return _random(model, Removal(Plan.of(model, context.targets, {})))


def length_of(model: PreTrainedModel) -> int:
    """Tokens that are read: as many as leave room for those that are written."""
    positions = longest_text(model)
    return PROMPT if positions is None else max(1, min(PROMPT, positions - _written(model)))


def _written(model: PreTrainedModel) -> int:
    return NEW if model.can_generate() and model.main_input_name == "input_ids" else 0


def _timed_table(model: PreTrainedModel, targets: Sequence[Target], axes: Mapping[str, Sequence[int]]) -> LatencyTable:
    widths = {
        name: _stops(amounts)
        for name, amounts in axes.items()
        if STRUCTURES[name].takes != "blocks" and len(amounts) > 1
    }
    asked: list[dict[str, int]] = [{}, *({name: count} for name, counts in widths.items() for count in counts)]
    plan, length = Plan.of(model, targets, {}), length_of(model)
    middle = plan.blocks[len(plan.blocks) // 2]
    others = frozenset(plan.blocks) - {middle}
    removals = [Removal(Plan.of(model, targets, going), others) for going in asked]
    if not fits(needed := sum(one.bytes(model) for one in removals), input_device(model)):
        raise ValueError(
            f"latency is told by {len(removals)} models of one block each, with the embeddings {needed / 1e9:,.1f} GB "
            "beside the model, and there is no room for them. Give another budget: params=0.75, say, or "
            "memory='200MB'."
        )
    subjects = []
    for removal in removals:
        made = _random(model, removal)
        subjects.append(_Subject(made, length, made.get_submodule(f"{stack_of(middle)}.0")))
    rounds = _rounds(subjects)
    dense = rounds[0]
    block = statistics.median(one.inside for one in dense)
    around = statistics.median(one.whole - one.inside for one in dense)
    # By the ratios of the rounds, as wherever models are compared: what slows a round slows both.
    seconds = iter(block * _share(own, dense) for own in rounds[1:])
    narrower = {name: ([0, *counts], [block, *(next(seconds) for _ in counts)]) for name, counts in widths.items()}
    return LatencyTable(len(plan.blocks), around, block, narrower, _terms(model))


def _share(own: Sequence[Timed], dense: Sequence[Timed]) -> float:
    """What a block takes of a dense one's seconds."""
    return statistics.median(one.inside / its.inside for one, its in zip(own, dense, strict=True))


def _terms(model: PreTrainedModel) -> dict[str, Any]:
    device = input_device(model)
    return {
        "prompt_length": length_of(model) if model.main_input_name == "input_ids" else None,
        "new_tokens": _written(model),
        "rounds": ROUNDS,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "threads": torch.get_num_threads(),
    }


def _stops(amounts: Sequence[int]) -> list[int]:
    """The amounts that are timed: evenly, the most among them."""
    going = [amount for amount in amounts if amount]
    if len(going) <= WIDTHS:
        return going
    return [going[round((number + 1) * len(going) / WIDTHS) - 1] for number in range(WIDTHS)]


def _random(model: PreTrainedModel, removal: Removal) -> PreTrainedModel:
    """What is left of a model, with weights that are drawn, where the model is."""
    return random_smaller(model, removal, model.dtype).to(input_device(model))


def _rounds(subjects: Sequence[_Subject]) -> list[list[Timed]]:
    """Of each of these the times of every round that counts."""
    found: list[list[Timed]] = [[] for _ in subjects]
    for number in range(-WARMUP, ROUNDS):
        # Who begins is another each time: what the machine does at the same moment of every round meets all.
        for place in range(len(subjects)):
            one = (number + place) % len(subjects)
            timed = subjects[one].time()
            if number >= 0:
                found[one].append(timed)
    return found


class _Subject:
    """A model that is timed.

    Args:
        length: tokens that it reads.
        block: of it, to be timed apart.
    """

    def __init__(self, model: PreTrainedModel, length: int, block: nn.Module | None = None) -> None:
        self._model, self._block, self._device = model, block, input_device(model)
        self._batch = send_to_device(random_batch(model, 1, length), self._device)
        takes = inspect.signature(model.forward).parameters
        self._last: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self._inside = 0.0

    @torch.inference_mode()
    def time(self) -> Timed:
        """Seconds of one text: reading it, and writing as many tokens as is said of a few."""
        with self._watched(), eval_mode(self._model), native_products():
            if not _written(self._model):
                return self._timed(partial(self._model, **self._batch, **without_cache(self._model)))[1]
            cache = cache_name(self._model)
            assert cache is not None, "check_timeable has refused others"
            output, read = self._timed(partial(self._model, **self._batch, **self._last, use_cache=True))
            written = Timed(0.0, 0.0)
            for _ in range(STEPS):
                chosen = output.logits[:, -1:].argmax(-1)
                kept = {cache: output[cache]}
                output, one = self._timed(partial(self._model, input_ids=chosen, **kept, use_cache=True))
                written = Timed(written.whole + one.whole, written.inside + one.inside)
        times = NEW / STEPS
        return Timed(read.whole + times * written.whole, read.inside + times * written.inside)

    def _timed(self, run: partial[Any]) -> tuple[Any, Timed]:
        self._inside, begun = 0.0, now(self._device)
        output = run()
        return output, Timed(now(self._device) - begun, self._inside)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """The seconds of the block are counted."""
        if self._block is None:
            yield
            return

        def begin(*_: Any) -> None:
            self._inside -= now(self._device)

        def end(*_: Any) -> None:
            self._inside += now(self._device)

        hooks = [self._block.register_forward_pre_hook(begin), self._block.register_forward_hook(end)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
