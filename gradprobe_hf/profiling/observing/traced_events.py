"""Events of torch.profiler: the share of time in which any of some was under way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch._C._autograd import DeviceType

_COLLECTIVES = ("gloo:", "nccl:", "ncclDevKernel", "ncclKernel", "mpi:", "ucc:", "xccl:")


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """How much is in at least one of some stretches.

    >>> covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def is_collective(name: str) -> bool:
    return name.startswith(_COLLECTIVES)


def collective_seconds(events: Iterable[Any]) -> float:
    """In which at least one collective was under way."""
    return covered(_span(one) for one in events if is_collective(one.name))


def busy_seconds(events: Iterable[Any]) -> float:
    """In which the device had anything to do."""
    on_device = [one for one in events if one.device_type == DeviceType.CUDA and not is_mark(one)]
    return covered(map(_span, on_device))


def is_mark(event: Any) -> bool:
    """Whether it is a region that a program has named, of which a device has a copy: it covers the idle time inside."""
    return bool(getattr(event, "is_user_annotation", False))


def _span(event: Any) -> tuple[float, float]:
    return event.time_range.start / 1e6, event.time_range.end / 1e6
