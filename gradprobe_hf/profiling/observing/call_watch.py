"""A watch over calls of PyTorch that often waste time, each with the line that makes it.

torch.profiler's stacks name the line where a function was when tracing began, not where a loop makes the call. A
TorchFunctionMode sees the call as it was written, while its frame is still there.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from gradprobe_hf.profiling.observing.observation import Call, CallKind
from gradprobe_hf.profiling.observing.places import Place, place_of

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
}
_PRINTS = {Tensor.__repr__: "a tensor as text", Tensor.__format__: "a tensor in an f-string"}
# Not zeros, ones, full and empty: these are made to be written to.
_CONSTANTS = {
    torch.triu: "triu",
    Tensor.triu: "triu",
    torch.tril: "tril",
    Tensor.tril: "tril",
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
_CASTS = {
    Tensor.to: ".to(dtype)",
    Tensor.float: ".float()",
    Tensor.half: ".half()",
    Tensor.bfloat16: ".bfloat16()",
    Tensor.type: ".type(dtype)",
    Tensor.double: ".double()",
}
_PRODUCTS = {
    Tensor.matmul: "matmul",
    Tensor.__matmul__: "matmul",
    torch.matmul: "torch.matmul",
    torch.bmm: "torch.bmm",
    Tensor.bmm: ".bmm()",
    torch.einsum: "torch.einsum",
    torch.addmm: "torch.addmm",
    torch.baddbmm: "torch.baddbmm",
    functional.linear: "linear",
    functional.scaled_dot_product_attention: "scaled_dot_product_attention",
}
_ZEROING = {Tensor.zero_: "zero_grad(set_to_none=False)", torch._foreach_zero_: "zero_grad(set_to_none=False)"}
_SOFTMAX = (functional.softmax, torch.softmax, Tensor.softmax)
_EAGER = "eager_attention_forward"  # what transformers calls its attention in plain PyTorch, in every model
_WATCHED: dict[Any, tuple[CallKind, str]] = {
    **{function: ("cast", what) for function, what in _CASTS.items()},
    **{function: ("matmul", what) for function, what in _PRODUCTS.items()},
    **dict.fromkeys(_SOFTMAX, ("attention", "softmax")),
    **{function: ("zeroing", what) for function, what in _ZEROING.items()},
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


@dataclass(frozen=True)
class Trained:
    """What a watch asks of the run: its parameters that an optimizer steps, and all parameters and buffers."""

    parameters: Callable[[], list[Tensor]]
    weights: Callable[[], list[Tensor]]


class CallWatch(TorchFunctionMode):
    """Notes calls from `start` to `stop`; `cut` ends a step.

    Args:
        trained: what the run trains.
        loading: whether data is being loaded: what a dataset does with its tensors is the loader's time.

    Attributes:
        autocast: the dtype of an autocast that was on in any product of matrices; None: none was.
    """

    def __init__(self, trained: Trained, loading: Callable[[], bool]) -> None:
        super().__init__()
        self._trained, self._loading = trained, loading
        self.autocast: str | None = None
        self._active = False
        self._seen: list[Seen] = []
        self._made: dict[tuple[str, Place, int], Tensor | None] = {}
        self._occurrences: Counter[tuple[str, Place]] = Counter()
        self._addresses: dict[str, set[int | None]] = {}

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
        self._addresses.clear()  # gradients are new tensors in each step
        return seen

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        watched = _WATCHED.get(function) if self._active else None
        if watched is None or self._loading():
            return function(*args, **(kwargs or {}))
        start = time.perf_counter()
        result = function(*args, **(kwargs or {}))
        is_waited_for = not (kwargs or {}).get("non_blocking", False)
        self._note(*watched, args, result, time.perf_counter() - start, is_waited_for)
        return result

    def _note(self, kind: CallKind, what: str, args: Any, result: Any, seconds: float, is_waited_for: bool) -> None:
        called = _Called(kind, what, args, result, is_waited_for=is_waited_for)
        judged = _JUDGES[kind](self, called) if kind in _JUDGES else called
        if judged is None:
            return
        kind, what, detail = judged.kind, judged.what, judged.detail
        place = place_of(sys._getframe(2), any_call=kind == "zeroing")
        if place is None or (kind == "matmul" and place.through and not self._is_weight(args)):
            return  # what a library computes in float32 is so by design, unless a weight takes part
        if kind == "attention":
            place = replace(place, through=None)  # of all its lines one
        if kind != "constant":
            self._seen.append(Seen(kind, what, place, seconds, detail))
        elif place.through is None:  # what a library makes again, the user cannot keep
            same = self._same(what, place, result)
            self._seen.append(Seen(kind, what, place, seconds, str(tuple(result.shape)), same))

    def is_trained(self, tensor: Any) -> bool:
        """A parameter that is stepped, or its gradient."""

        def stepped() -> list[Tensor]:
            parameters = self._trained.parameters()
            return [*parameters, *(one.grad for one in parameters if one.grad is not None)]

        if self._is_in("trained", stepped, tensor):
            return True
        self._addresses.pop("trained", None)  # asked for in front of backward, where there are no gradients yet
        return self._is_in("trained", stepped, tensor)

    @property
    def is_on_accelerator(self) -> bool:
        """Whether the run computes on one: what it reads of a CPU's tensors waits for nothing then."""
        return any(not one.is_cpu for one in self._trained.weights()[:1])

    def is_weight(self, tensor: Any) -> bool:
        """A parameter or buffer of the model."""
        return self._is_in("weights", self._trained.weights, tensor)

    def _is_weight(self, arguments: Any) -> bool:
        return any(self.is_weight(one) for one in arguments)

    def _is_in(self, name: str, tensors: Callable[[], list[Tensor]], tensor: Any) -> bool:
        if not isinstance(tensor, Tensor):
            return False
        if name not in self._addresses:
            self._addresses[name] = {_address(one) for one in tensors()} - {None}
        return _address(tensor) in self._addresses[name]

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


@dataclass(frozen=True)
class _Called:
    """A call, and what it turns out to be."""

    kind: CallKind
    what: str
    args: Any
    result: Any
    detail: str = ""
    is_waited_for: bool = True  # not of a copy that goes on beside


def _waits(watch: CallWatch, call: _Called) -> _Called | None:
    read = call.args[0] if call.args else None
    is_there = isinstance(read, Tensor) and read.is_cpu and watch.is_on_accelerator
    return None if is_there or not call.is_waited_for else call


def _norm(watch: CallWatch, call: _Called) -> _Called | None:
    return call if call.args and watch.is_trained(call.args[0]) else None


def _zeroing(watch: CallWatch, call: _Called) -> _Called | None:
    first = call.args[0] if call.args else None
    first = first[0] if isinstance(first, list | tuple) and first else first
    return call if watch.is_trained(first) and _is_called_from("zero_grad") else None


def _cast(watch: CallWatch, call: _Called) -> _Called | None:
    source, result = call.args[0] if call.args else None, call.result
    if not isinstance(source, Tensor) or not isinstance(result, Tensor):
        return None
    if result.is_cpu and not source.is_cpu:
        return None if not call.is_waited_for else replace(call, kind="synchronization", what='.to("cpu")')
    if source.dtype == result.dtype or not watch.is_weight(source):
        return None
    return replace(call, detail=f"{_short(source.dtype)} to {_short(result.dtype)}, {tuple(source.shape)}")


def _product(watch: CallWatch, call: _Called) -> _Called | None:
    if _is_called_from(_EAGER):
        return replace(call, kind="attention", what=_EAGER)
    if not isinstance(call.result, Tensor):
        return None
    device = call.result.device.type
    if torch.is_autocast_enabled(device):
        watch.autocast = _short(torch.get_autocast_dtype(device))
    return call if call.result.dtype == torch.float32 else None


def _softmax(_: CallWatch, call: _Called) -> _Called | None:
    return replace(call, what=_EAGER) if _is_called_from(_EAGER) else None


_JUDGES: dict[CallKind, Callable[[CallWatch, _Called], _Called | None]] = {
    "synchronization": _waits,
    "norm": _norm,
    "zeroing": _zeroing,
    "cast": _cast,
    "matmul": _product,
    "attention": _softmax,
}


def _is_called_from(function: str, depth: int = 12) -> bool:
    """Whether one of the innermost frames is of a function of this name."""
    frame = sys._getframe(1)
    for _ in range(depth):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_code.co_name == function:
            return True
    return False


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
