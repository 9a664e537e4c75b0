"""Stages of a step, told apart by a clock: data loading, forward, backward, optimizer, and what is between them."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import extract_model_from_parallel
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from gradprobe_hf.profiling.observing.observation import Span
from gradprobe_hf.profiling.observing.places import Place, place_of

STAGES = ("data loading", "forward", "backward", "optimizer", "other")
_SPANS = 400  # that are kept for the picture


class StageClock:
    """Seconds per stage, each without those of the stages inside it. Only the thread that made it is measured."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._stack = ["other"]
        self._seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self._since = time.perf_counter()
        self._spans: deque[tuple[str, float, float]] = deque(maxlen=_SPANS)

    @property
    def is_mine(self) -> bool:
        """Whether the thread that asks is the one that is measured."""
        return threading.get_ident() == self._thread

    @property
    def stage(self) -> str:
        return self._stack[-1]

    @property
    def in_backward(self) -> bool:
        """Whichever thread asks: an accelerator's backward pass has one of its own."""
        return "backward" in self._stack

    def spans_since(self, begin: float) -> tuple[Span, ...]:
        """Stretches of stages from a reading of `time.perf_counter` on, the last ones if there are many."""
        return tuple(Span(stage, a - begin, b - begin) for stage, a, b in self._spans if a >= begin)

    def enter(self, stage: str) -> None:
        if self.is_mine:
            self._turn()
            self._stack.append(stage)

    def leave(self, stage: str) -> None:
        """An exception may have left the stages inside of it without a word."""
        if self.is_mine and stage in self._stack[1:]:
            self._turn()
            while self._stack.pop() != stage:
                pass

    def cut(self) -> dict[str, float]:
        """The seconds since the last cut."""
        self._turn()
        seconds, self._seconds = self._seconds, dict.fromkeys(STAGES, 0.0)
        return seconds

    def _turn(self) -> None:
        now = time.perf_counter()
        self._seconds[self._stack[-1]] += now - self._since
        self._spans.append((self._stack[-1], self._since, now))
        self._since = now


@dataclass(frozen=True)
class Wait:
    """For one batch."""

    place: Place | None
    dataset: str
    workers: int
    seconds: float
    processes: int = 1  # that it is dealt to


# With each wait for a data loader: the batch that came, and the iterator that it came from.
Waited = Callable[[Wait, Any, Any], None]


@contextmanager
def marked_stages(
    clock: StageClock,
    waited: Waited,
    stepped: Callable[[Optimizer], None],
) -> Iterator[None]:
    """Tell the clock where each stage begins and ends.

    Args:
        waited: called behind each wait for a data loader.
        stepped: called behind each optimizer step, outside of every stage.
    """

    def before(*_: Any) -> None:
        clock.enter("optimizer")

    def after(optimizer: Optimizer, *_: Any) -> None:
        clock.leave("optimizer")
        stepped(optimizer)

    with ExitStack() as stack:
        stack.callback(register_optimizer_step_pre_hook(before).remove)
        stack.callback(register_optimizer_step_post_hook(after).remove)
        stack.enter_context(_marked_backward(clock))
        stack.enter_context(_marked_loaders(clock, waited))
        yield


@contextmanager
def marked_forward(clock: StageClock, models: list[nn.Module]) -> Iterator[None]:
    """The same for the forward pass of models."""
    handles = []
    for model in models:
        # Hooks of a module that is compiled in place would be compiled with it.
        if model._compiled_call_impl is None:
            handles.append(model.register_forward_pre_hook(lambda *_: clock.enter("forward")))
            handles.append(model.register_forward_hook(lambda *_: clock.leave("forward"), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def watched_passes(models: list[nn.Module], begins: Callable[[], None], ended: Callable[[], None]) -> Iterator[None]:
    """Call these around each forward pass of models, and of what DDP has around one, which evaluates without it."""
    handles = []
    for model in {id(one): one for outer in models for one in (outer, extract_model_from_parallel(outer))}.values():
        if model._compiled_call_impl is None:
            handles.append(model.register_forward_pre_hook(lambda *_: begins()))
            handles.append(model.register_forward_hook(lambda *_: ended(), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def models_of(optimizer: Optimizer) -> list[nn.Module]:
    """The outermost modules that hold parameters of an optimizer. Takes a walk over all that Python keeps."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    holders = [
        found
        for found in gc.get_objects()
        # type(), not isinstance: lazy proxies answer that by importing what they stand for
        if issubclass(type(found), nn.Module) and any(id(one) in trained for one in found.parameters())
    ]
    inner = {id(child) for holder in holders for child in holder.modules() if child is not holder}
    return [holder for holder in holders if id(holder) not in inner]


@contextmanager
def _marked_backward(clock: StageClock) -> Iterator[None]:
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> None:
        clock.enter("backward")
        try:
            original(*args, **kwargs)
        finally:
            clock.leave("backward")

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = original


@contextmanager
def _marked_loaders(clock: StageClock, waited: Waited) -> Iterator[None]:
    original = _BaseDataLoaderIter.__next__

    @functools.wraps(original)
    def following(self: Any) -> Any:
        clock.leave("optimizer")  # of a step that has failed: no hook is told, and no step fetches a batch
        clock.enter("data loading")
        start = time.perf_counter()
        try:
            batch = original(self)
            seconds = time.perf_counter() - start
            caller = sys._getframe(1)
            place, processes = place_of(caller), _dealt_to(caller.f_locals.get("self"))
            waited(Wait(place, type(self._dataset).__name__, self._num_workers, seconds, processes), batch, self)
            return batch
        finally:
            clock.leave("data loading")

    _BaseDataLoaderIter.__next__ = following  # type: ignore[method-assign]
    try:
        yield
    finally:
        _BaseDataLoaderIter.__next__ = original  # type: ignore[method-assign]


def _dealt_to(caller: Any) -> int:
    """Processes that share what one of them loads, as Accelerate does with an IterableDataset: 1 for all others."""
    return int(caller.state.num_processes) if isinstance(caller, DataLoaderDispatcher) else 1
