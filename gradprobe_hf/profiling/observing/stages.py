"""Stages of a step, told apart by a clock: data loading, forward, backward, optimizer, and what is between them."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import time
from collections import defaultdict, deque
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
from torch.utils.data.dataloader import DataLoader, _BaseDataLoaderIter

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

    def begin_in(self, seconds: float) -> None:
        """Forget what was before these seconds, which belong to the stage that it is in."""
        self.cut()
        self._seconds[self.stage] = seconds

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
    starting: float = 0.0  # of the seconds: the first batch of workers that started, and the end of those before


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
        if not torch.compiler.is_compiling():
            clock.enter("optimizer")

    def after(optimizer: Optimizer, *_: Any) -> None:
        if not torch.compiler.is_compiling():
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
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(_around_calls(model, lambda: clock.enter("forward"), lambda: clock.leave("forward")))
        yield


@contextmanager
def watched_passes(models: list[nn.Module], begins: Callable[[], None], ended: Callable[[], None]) -> Iterator[None]:
    """Call these around each forward pass of models, and of what DDP has around one, which evaluates without it."""
    watched = {id(one): one for outer in models for one in (outer, extract_model_from_parallel(outer))}
    with ExitStack() as stack:
        for model in watched.values():
            stack.enter_context(_around_calls(model, begins, ended))
        yield


@contextmanager
def _around_calls(module: nn.Module, before: Callable[[], None], after: Callable[[], None]) -> Iterator[None]:
    """Call these around each call of a module, one that raises too."""
    compiled = module._compiled_call_impl
    if compiled is None:
        first = module.register_forward_pre_hook(_unless_compiling(before))
        last = module.register_forward_hook(_unless_compiling(after), always_call=True)
        try:
            yield
        finally:
            first.remove()
            last.remove()
        return

    # Hooks of a module that is compiled in place would be compiled with it.
    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        before()
        try:
            return compiled(*args, **kwargs)
        finally:
            after()

    module._compiled_call_impl = call
    try:
        yield
    finally:
        if module._compiled_call_impl is call:
            module._compiled_call_impl = compiled


def _unless_compiling(call: Callable[[], None]) -> Callable[..., None]:
    """A hook that a function which calls the model, and is compiled, does not take into its graph."""

    def hook(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            call()

    return hook


def models_of(optimizer: Optimizer) -> list[nn.Module]:
    """The outermost modules that hold parameters of an optimizer. Takes a walk over all that Python keeps."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    holders = [
        found
        for found in gc.get_objects()
        # type(), not isinstance: lazy proxies answer that by importing what they stand for
        if issubclass(type(found), nn.Module)
        # One that is half made, or was not initialised, has no parameters to ask for.
        and "_parameters" in vars(found)
        and any(id(one) in trained for one in found.parameters())
    ]
    inner = {id(child) for holder in holders for child in holder.modules() if child is not holder}
    return [holder for holder in holders if id(holder) not in inner]


def called_instead(model: nn.Module) -> list[nn.Module]:
    """What a loop may call that never calls the model around it: each of a chain of wrappers, and what the last holds.

    So it is with the base model of an adapter, and with a module whose `training_step` calls the model.
    """
    found: list[nn.Module] = []
    inside = [model]
    while len(inside) == 1:
        around = inside[0]
        # What is inside of one that is compiled is compiled with it, hooks too.
        is_compiled = around._compiled_call_impl is not None or hasattr(around, "_orig_mod")
        inside = [] if is_compiled else list(around.children())
        while any(isinstance(one, (nn.ModuleList, nn.ModuleDict)) for one in inside):  # these cannot be called
            inside = [
                part
                for one in inside
                for part in (one.children() if isinstance(one, (nn.ModuleList, nn.ModuleDict)) else (one,))
            ]
        inside = [one for one in inside if next(one.parameters(), None) is not None]
        found += inside
    return found


@contextmanager
def _marked_backward(clock: StageClock) -> Iterator[None]:
    """Both ways into it: what `Tensor.backward` calls, and the one that returns gradients."""
    originals = {name: getattr(torch.autograd, name) for name in ("backward", "grad")}

    def marked(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            clock.enter("backward")
            try:
                return original(*args, **kwargs)
            finally:
                clock.leave("backward")

        return backward

    for name, original in originals.items():
        setattr(torch.autograd, name, marked(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch.autograd, name, original)


@contextmanager
def _marked_loaders(clock: StageClock, waited: Waited) -> Iterator[None]:
    original, begin = _BaseDataLoaderIter.__next__, DataLoader.__iter__
    # The id of a data set -> seconds of beginning and ending it, in which no batch came.
    starting: defaultdict[int, float] = defaultdict(float)

    @functools.wraps(begin)
    def beginning(self: Any) -> Any:
        if not clock.is_mine or clock.stage == "data loading":
            return begin(self)
        clock.enter("data loading")
        start = time.perf_counter()
        try:
            return begin(self)
        finally:
            clock.leave("data loading")
            starting[id(self.dataset)] += time.perf_counter() - start

    @functools.wraps(original)
    def following(self: Any) -> Any:
        if clock.is_mine and clock.stage == "data loading":  # a data set that reads another loader
            return original(self)
        clock.leave("optimizer")  # of a step that has failed: no hook is told, and no step fetches a batch
        clock.enter("data loading")
        start = time.perf_counter()
        try:
            batch = original(self)
            around = starting.pop(id(self._dataset), None) if clock.is_mine else None
            seconds = (around or 0.0) + time.perf_counter() - start
            # Workers that have just been started are waited for with the first batch.
            anew = seconds if around is not None and self._num_workers and not self._persistent_workers else 0.0
            caller = sys._getframe(1)
            place, processes = place_of(caller), _dealt_to(caller.f_locals.get("self"))
            name = type(self._dataset).__name__
            waited(Wait(place, name, self._num_workers, seconds, processes, anew), batch, self)
            return batch
        except StopIteration:
            if clock.is_mine:
                starting[id(self._dataset)] += time.perf_counter() - start
            raise
        finally:
            clock.leave("data loading")

    _BaseDataLoaderIter.__next__ = following  # type: ignore[method-assign]
    DataLoader.__iter__ = beginning  # type: ignore[method-assign]
    try:
        yield
    finally:
        _BaseDataLoaderIter.__next__ = original  # type: ignore[method-assign]
        DataLoader.__iter__ = begin  # type: ignore[method-assign]


def _dealt_to(caller: Any) -> int:
    """Processes that share what one of them loads, as Accelerate does with an IterableDataset: 1 for all others."""
    return int(caller.state.num_processes) if isinstance(caller, DataLoaderDispatcher) else 1
