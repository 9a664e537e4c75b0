"""Seconds of each module, and of what checkpointing computes again. Only in located steps: hooks cost time."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gradprobe_hf.profiling.observing.observation import ModuleTime

_MODULES = 20  # that are kept


class ModuleWatch:
    """A clock on every module.

    Args:
        in_backward: whether the backward pass is under way: a module that runs then, runs again.
    """

    def __init__(self, in_backward: Callable[[], bool]) -> None:
        self._in_backward = in_backward
        self._handles: list[Any] = []
        self._own = threading.local()  # on an accelerator backward has a thread of its own
        self._seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._count: Counter[tuple[str, str]] = Counter()
        self.recomputed = 0.0
        self._of_step: list[tuple[tuple[str, str] | None, float]] = []  # None: computed again in backward
        self.rests = False  # whether what runs is no part of a step

    def start(self, models: list[nn.Module]) -> None:
        for model in models:
            for name, module in model.named_modules():
                # What is compiled would be compiled anew with a hook in it.
                if module._compiled_call_impl is None:
                    key = (re.sub(r"\b\d+\b", "*", name) or "(model)", type(module).__name__)
                    self._handles.append(module.register_forward_pre_hook(self._enter))
                    self._handles.append(module.register_forward_hook(self._leave(key), always_call=True))

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def keep(self) -> None:
        """The step has come to its end: what was seen in it counts."""
        for key, seconds in self._of_step:
            if key is None:
                self.recomputed += seconds
            else:
                self._seconds[key] += seconds
                self._count[key] += 1
        self._of_step.clear()

    def drop(self) -> None:
        """What was seen in the step does not count."""
        self._of_step.clear()

    def times(self) -> tuple[ModuleTime, ...]:
        """The dearest first; the last one stands for all others, so that the seconds are those of all."""
        rows = sorted(self._seconds, key=lambda key: (-self._seconds[key], key))
        found = [ModuleTime(*key, self._count[key], self._seconds[key]) for key in rows[:_MODULES]]
        if others := rows[_MODULES:]:
            count, seconds = sum(self._count[key] for key in others), sum(self._seconds[key] for key in others)
            found.append(ModuleTime("(others)", f"{len(others)} more", count, seconds))
        return tuple(found)

    def _enter(self, *_: Any) -> None:
        if torch.compiler.is_compiling():  # of a function that calls the model: hooks would be compiled with it
            return
        self._stack().append([time.perf_counter(), 0.0])

    def _leave(self, key: tuple[str, str]) -> Callable[..., None]:
        def leave(*_: Any) -> None:
            if torch.compiler.is_compiling():
                return
            stack = self._stack()
            if not stack:
                return
            began, inside = stack.pop()
            seconds = time.perf_counter() - began
            if stack:
                stack[-1][1] += seconds
            if self.rests:
                return
            self._of_step.append((None if self._in_backward() else key, seconds - inside))

        return leave

    def _stack(self) -> list[list[float]]:
        if not hasattr(self._own, "stack"):
            self._own.stack = []
        return self._own.stack
