"""A watch over calls of PyTorch that often waste time, each with the line that makes it.

torch.profiler's stacks name the line where a function was when tracing began, not where a loop makes the call. A
TorchFunctionMode sees the call as it was written, while its frame is still there.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from gradprobe_hf.profiling.observation import Call, CallKind
from gradprobe_hf.profiling.places import Place, place_of

_SYNCHRONIZATIONS = {
    Tensor.item: ".item()",
    Tensor.tolist: ".tolist()",
    Tensor.cpu: ".cpu()",
    Tensor.numpy: ".numpy()",
    Tensor.__array__: "numpy.asarray(tensor)",
    Tensor.__bool__: "bool(tensor)",
    Tensor.__float__: "float(tensor)",
    Tensor.__int__: "int(tensor)",
    Tensor.__index__: "an index that is a tensor",
    Tensor.to: '.to("cpu")',
}
_PRINTS = {Tensor.__repr__: "a tensor as text", Tensor.__format__: "a tensor in an f-string"}
# Not zeros, ones and empty: these are made to be written to.
_CONSTANTS = {
    torch.triu: "triu",
    Tensor.triu: "triu",
    torch.tril: "tril",
    Tensor.tril: "tril",
    torch.full: "full",
    torch.arange: "arange",
    torch.eye: "eye",
    torch.linspace: "linspace",
}
_NORMS = {
    Tensor.norm: ".norm()",
    torch.norm: "torch.norm",
    torch.linalg.norm: "torch.linalg.norm",
    torch.linalg.vector_norm: "torch.linalg.vector_norm",
}
_WATCHED: dict[Any, tuple[CallKind, str]] = {
    **{function: ("synchronization", what) for function, what in _SYNCHRONIZATIONS.items()},
    **{function: ("print", what) for function, what in _PRINTS.items()},
    **{function: ("constant", what) for function, what in _CONSTANTS.items()},
    **{function: ("norm", what) for function, what in _NORMS.items()},
}
_KEPT = 1 << 24  # elements of a tensor that is compared with that of the next step


@dataclass(frozen=True)
class Seen:
    """One call. Same: whether a tensor has the values it had in the step before; None where there was none."""

    kind: CallKind
    what: str
    place: Place
    seconds: float
    detail: str = ""
    same: bool | None = None


class CallWatch(TorchFunctionMode):
    """Notes calls from `start` to `stop`; `cut` ends a step.

    Args:
        parameters: the trained ones, when asked.
        loading: whether data is being loaded: what a dataset does with its tensors is the loader's time.
    """

    def __init__(self, parameters: Callable[[], list[Tensor]], loading: Callable[[], bool]) -> None:
        super().__init__()
        self._parameters, self._loading = parameters, loading
        self._active = False
        self._seen: list[Seen] = []
        self._made: dict[tuple[str, Place, int], Tensor | None] = {}
        self._occurrences: Counter[tuple[str, Place]] = Counter()
        self._trained: set[int | None] | None = None

    def start(self) -> None:
        self._active = True
        self.__enter__()

    def stop(self) -> None:
        if self._active:
            self._active = False
            self._made.clear()
            # One that the loop has put on top since, such as `with torch.device(...)`, comes off first: then this one
            # stays, and notes nothing.
            if _get_current_function_mode() is self:
                self.__exit__(None, None, None)

    def cut(self) -> list[Seen]:
        """The calls since the last cut."""
        seen, self._seen = self._seen, []
        self._occurrences.clear()
        self._trained = None  # gradients are new tensors in each step
        return seen

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        watched = _WATCHED.get(function) if self._active else None
        if watched is None or self._loading():
            return function(*args, **(kwargs or {}))
        start = time.perf_counter()
        result = function(*args, **(kwargs or {}))
        self._note(*watched, args, result, time.perf_counter() - start)
        return result

    def _note(self, kind: CallKind, what: str, args: Any, result: Any, seconds: float) -> None:
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if what == '.to("cpu")' and (first is None or first.is_cpu or not result.is_cpu):
            return
        if kind == "norm" and (first is None or _address(first) not in self._trained_storage()):
            return
        place = place_of(sys._getframe(2))
        if place is None:
            return
        if kind != "constant":
            self._seen.append(Seen(kind, what, place, seconds))
        elif place.through is None:  # what a library makes again, the user cannot keep
            same = self._same(what, place, result)
            self._seen.append(Seen(kind, what, place, seconds, str(tuple(result.shape)), same))

    def _trained_storage(self) -> set[int | None]:
        if self._trained is None:
            parameters = self._parameters()
            gradients = (one.grad for one in parameters if one.grad is not None)
            self._trained = {_address(one) for one in (*parameters, *gradients)} - {None}
        return self._trained

    def _same(self, what: str, place: Place, result: Tensor) -> bool | None:
        key = (what, place, self._occurrences[what, place])
        self._occurrences[what, place] += 1
        if key not in self._made:
            plain = type(result) is Tensor and result.numel() <= _KEPT
            self._made[key] = result.detach().clone() if plain else None
            return None
        before = self._made[key]
        if before is None or (before.dtype, before.device) != (result.dtype, result.device):
            return False
        try:
            return torch.equal(before, result)
        except RuntimeError:  # under vmap there is no one answer
            return False


def _address(tensor: Tensor) -> int | None:
    try:
        return tensor.data_ptr() or None
    except RuntimeError:  # what has no storage, such as a fake tensor
        return None


def summed(steps: list[list[Seen]]) -> tuple[Call, ...]:
    """The calls of each step, by line. A tensor counts as made anew only if it had the same values each time."""
    groups: dict[tuple[CallKind, str, Place], list[tuple[int, Seen]]] = {}
    for number, step in enumerate(steps):
        for seen in step:
            groups.setdefault((seen.kind, seen.what, seen.place), []).append((number, seen))
    return tuple(
        Call(kind, what, place, len(rows), *_seconds_of_a_step(rows, len(steps)), rows[-1][1].detail)
        for (kind, what, place), rows in groups.items()
        if kind != "constant" or _constant([seen for _, seen in rows])
    )


def _seconds_of_a_step(rows: list[tuple[int, Seen]], steps: int) -> tuple[float, int]:
    """And how many steps had any. The median: on a busy machine one call can wait for a core longer than a step."""
    per_step: defaultdict[int, float] = defaultdict(float)
    for number, seen in rows:
        per_step[number] += seen.seconds
    return median(per_step.values()) * len(per_step) / steps, len(per_step)


def _constant(rows: list[Seen]) -> bool:
    return any(row.same for row in rows) and all(row.same is not False for row in rows)
