"""A trace into an observation: stages, operators, waits and memory. What a trace does not hold is said, by kind."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from gradprobe_hf.profiling.observing.observation import (
    Call,
    LoaderWait,
    MemorySample,
    Observation,
    Operator,
    Setup,
)
from gradprobe_hf.profiling.observing.traced_events import covered, is_collective
from gradprobe_hf.profiling.trace.events import ChromeTrace, Event, own_seconds, read_events

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_OPERATORS = 20  # that are kept
_CUDA = 1  # c10::DeviceType of a memory sample
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
_HALF = {"c10::BFloat16": "bfloat16", "c10::Half": "float16"}
_PYTHON = "a trace holds operators, not the calls and values of Python: profile the script itself"
_ONE_PROCESS = "a trace is of one process"
# Kinds that no trace can tell.
_UNTOLD = {
    "print": _PYTHON,
    "constant tensor": _PYTHON,
    "norms one by one": _PYTHON,
    "cast of a weight": "a trace does not say which tensor is a weight",
    "padding": "a trace does not hold batches",
    "recompilation": "torch.compile's counters are not in a trace",
    "graph break": "torch.compile's counters are not in a trace",
    "parameter without gradient": "a trace does not hold parameters",
    "gradient without optimizer": "a trace does not hold parameters",
    "gradient spikes": "a trace does not hold gradients",
    "float32 precision": "a trace does not hold torch's settings",
    "checkpointing": "a trace does not say which operators are computed again",
    "eager attention": "a trace does not name the modules that operators belong to",
    "flash attention": "a trace does not name the modules that operators belong to",
    "imbalance between ranks": _ONE_PROCESS,
    "slowdown": "all steps of a trace are under the profiler",
}


def read_trace(path: str | Path) -> Observation:
    """What a Chrome trace of torch.profiler shows of its steps, on whatever machine it was recorded.

    Steps are those of `profiler.step()`, or what is between two steps of an optimizer.

    Raises:
        ValueError: it is no trace, or has no step.
        OSError: there is no such file.
    """
    trace = read_events(path)
    steps = _steps(trace.events)
    if not steps:
        raise ValueError(
            f"{path} has no step: call profiler.step() at the end of each, or record at least two steps of a "
            "torch.optim optimizer."
        )
    return _observation(trace, steps)


def _observation(trace: ChromeTrace, steps: list[Event]) -> Observation:
    spans = _Spans(steps)
    events = [one for one in trace.events if spans(one)]
    seconds = tuple(one.seconds for one in steps)
    on_device = [one for one in events if one.kind in _ON_DEVICE]
    device = _device(trace.header) if on_device else "cpu"
    collectives = [one for one in trace.events if is_collective(one.name)]
    processes = int(trace.header.get("distributedInfo", {}).get("world_size", 1))
    return Observation(
        warmup=0,
        timed=seconds,
        traced=seconds,
        located=len(steps),
        stages=_stages(events, sum(seconds)),
        loaders=_loaders(events),
        calls=_calls(events, len(steps)),
        operators=_operators(on_device or [one for one in events if one.kind == "cpu_op"]),
        compilations=(),
        contents=None,
        device=device,
        versions={},
        missing=_UNTOLD | _missing(trace, events),
        complete=True,
        setup=_setup(events),
        memory=_memory(trace),
        collectives=spans.share(collectives) if collectives or processes > 1 else None,
        busy=spans.share(one for one in trace.events if one.kind in _ON_DEVICE) if on_device else None,
        processes=processes,
    )


def _steps(events: list[Event]) -> list[Event]:
    annotations = [one for one in events if one.kind == "user_annotation"]
    ends = [one for one in annotations if one.name.startswith("Optimizer.step#")]
    if marked := [one for one in annotations if one.name.startswith("ProfilerStep")]:
        *others, last = marked
        # The last one may begin where the loop ends. Any other without an optimizer is of a batch that accumulates.
        is_whole = any(end.is_in(last) for end in ends) or not any(end.is_in(one) for end in ends for one in others)
        return marked if is_whole else others
    own = [one for one in ends if one.name == ends[0].name]  # each of several optimizers takes a step
    return [Event("step", "", after.thread, before.end, after.end, {}) for before, after in pairwise(own)]


class _Spans:
    """The spans of the steps: whether an event begins in one, and the share of them that some events take.

    On a device, what begins in one step may end in the next.
    """

    def __init__(self, steps: list[Event]) -> None:
        self._steps, self._begins = steps, [one.begin for one in steps]

    def __call__(self, event: Event) -> bool:
        if event.name.startswith("ProfilerStep"):
            return False
        at = bisect_right(self._begins, event.begin) - 1
        return at >= 0 and event.begin < self._steps[at].end

    def share(self, events: Iterable[Event]) -> float:
        """Of the time of the steps, that in which at least one of the events was under way."""
        return covered(span for one in events for span in self._parts(one)) / sum(step.seconds for step in self._steps)

    def _parts(self, event: Event) -> Iterator[tuple[float, float]]:
        for at in range(max(0, bisect_right(self._begins, event.begin) - 1), len(self._steps)):
            step = self._steps[at]
            if step.begin >= event.end:
                return
            if step.end > event.begin:
                yield max(step.begin, event.begin), min(step.end, event.end)


def _named(events: Iterable[Event], begin: str) -> list[Event]:
    return [one for one in events if one.name.startswith(begin)]


def _stages(events: list[Event], total: float) -> dict[str, float]:
    marks = {"data loading": "enumerate(DataLoader)#", "backward": "autograd::engine::", "optimizer": "Optimizer.step#"}
    found = {stage: _covered(_host(_named(events, begin))) for stage, begin in marks.items()}
    return found | {"forward and other": max(0.0, total - sum(found.values()))}


def _loaders(events: list[Event]) -> tuple[LoaderWait, ...]:
    waits = _host(_named(events, "enumerate(DataLoader)#"))
    if not waits:
        return ()
    workers = None if any("MultiProcessing" in one.name for one in waits) else 0
    return (LoaderWait(None, "a data set", workers, len(waits), sum(one.seconds for one in waits)),)


def _calls(events: list[Event], steps: int) -> tuple[Call, ...]:
    optimizer = _host(_named(events, "Optimizer.step#"))
    outside = _outside(events, optimizer)
    reads = [one for one in outside if one.name == "aten::_local_scalar_dense"]
    spans = _host(_named(events, "Optimizer.zero_grad#"))
    within = [one for span in spans for one in outside if one.is_in(span)]
    at_once = [one for one in within if one.name == "aten::_foreach_zero_"]  # which calls the other for each tensor
    zeroing = [*at_once, *_outside([one for one in within if one.name == "aten::zero_"], at_once)]
    types = {id(one): _type(one) for one in events if one.name in _PRODUCTS}
    groups: dict[tuple[Any, str], list[Event]] = {
        # Those of an optimizer are its step counts, which are on the CPU.
        ("synchronization", ".item() and the like"): reads,
        # Copies to pinned memory need not be waited for; those of `.item()` are in its own seconds.
        ("synchronization", "a copy to the CPU"): [
            one for one in _outside(_named(outside, "Memcpy DtoH"), reads) if "Pinned" not in one.name
        ],
        ("zeroing", "zero_grad(set_to_none=False)"): zeroing,
        ("matmul", "products"): [one for one in events if types.get(id(one)) == "float"],
    }
    return tuple(
        Call(kind, what, None, len(rows), sum(one.seconds for one in rows) / steps, steps)
        for (kind, what), rows in groups.items()
        if rows
    )


def _operators(events: list[Event]) -> tuple[Operator, ...]:
    seconds, counts = Counter[str](), Counter[str]()
    for one, own in own_seconds(events):
        seconds[one.name] += own  # type: ignore[assignment]
        counts[one.name] += 1
    dearest = sorted(seconds, key=lambda name: (-seconds[name], name))[:_OPERATORS]
    return tuple(Operator(name, counts[name], seconds[name]) for name in dearest)


def _setup(events: list[Event]) -> Setup | None:
    spans = _host(_named(events, "Optimizer.step#"))
    inner = {one.name for one in events if one.name.startswith("aten::_f") and any(one.is_in(span) for span in spans)}
    optimizer = spans[0].name.partition("#")[2].partition(".")[0] if spans else None
    # An optimizer of another library may be fused in a kernel of its own: nothing is known of it.
    steps_by = "one by one" if optimizer and hasattr(torch.optim, optimizer) else None
    for how in ("fused", "foreach"):
        if any(name.startswith(f"aten::_{how}_") for name in inner):
            steps_by = how
            break
    types = Counter(_type(one) for one in events if one.name in _PRODUCTS)
    asked = next((_HALF[name] for name, _ in types.most_common() if name in _HALF), None)
    return Setup(
        optimizer=optimizer,
        steps_by=steps_by,
        has_fused=optimizer in ("Adam", "AdamW", "SGD", "Adagrad"),
        stepped_at=None,
        tensors=None,
        asked=asked,
        attention={},
        checkpointed=0,
    )


def _memory(trace: ChromeTrace) -> tuple[MemorySample, ...]:
    """The peak of the first device: samples are taken at each allocation, with profile_memory=True."""
    samples = [one for one in trace.samples if one.get("Device Type") == _CUDA and one.get("Device Id") == 0]
    devices = trace.header.get("deviceProperties") or []
    if not samples or not isinstance(devices, list):
        return ()
    total = int(devices[0].get("totalGlobalMem", 0))
    allocated = [int(one["Total Allocated"]) for one in samples]
    reserved = max(int(one["Total Reserved"]) for one in samples)
    return (MemorySample(0, max(0, total - reserved), allocated[-1], reserved, max(allocated)),)


def _missing(trace: ChromeTrace, events: list[Event]) -> dict[str, str]:
    missing = {}
    if not trace.samples:
        missing["batch headroom"] = "the trace was recorded without profile_memory=True"
    if "distributedInfo" not in trace.header and not any(is_collective(one.name) for one in events):
        missing["collectives"] = "the trace has no collective, and does not say how many processes there were"
    if not any(_type(one) for one in events if one.name in _PRODUCTS):
        missing["float32 product"] = "the trace was recorded without record_shapes=True: products have no dtype"
    if not any(one.kind == "cpu_op" for one in events):
        missing |= dict.fromkeys(("synchronization", "zeroed gradients"), "no operator of the CPU was recorded")
        missing["operators"] = "no operator was recorded"
    return missing


def _type(event: Event) -> str | None:
    """Of the last matrix of a product."""
    types = [one for one in event.arguments.get("Input type", ()) if one not in ("Scalar", "")]
    return str(types[-1]) if types else None


def _device(header: Mapping[str, Any]) -> str:
    devices = header.get("deviceProperties") or []
    named = devices[0].get("name") if isinstance(devices, list) and devices else None
    return f"cuda ({named})" if named else "cuda"


def _host(events: Iterable[Event]) -> list[Event]:
    """Without the copies that a device's time line has of the program's marks."""
    return [one for one in events if not one.kind.startswith("gpu_")]


def _outside(events: list[Event], spans: list[Event]) -> list[Event]:
    return [one for one in events if not any(one.is_in(span) for span in spans)]


def _covered(events: Iterable[Event]) -> float:
    return covered((one.begin, one.end) for one in events)
