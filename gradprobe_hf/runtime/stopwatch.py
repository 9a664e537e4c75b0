"""Seconds per stage, and who else wants to know of stages and batches."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

logger = logging.getLogger(__name__)

_MALLOC_TRIM: Any = None  # glibc's; other C libraries have none
with suppress(OSError, AttributeError, TypeError):
    _MALLOC_TRIM = ctypes.CDLL(None).malloc_trim


def return_free_memory() -> None:
    """Return freed heap memory to the system.

    glibc serves blocks below its mmap threshold, which grows to 32 MB, from a heap that it does not shrink: after a
    probe it holds hundreds of MB that nobody uses.
    """
    if _MALLOC_TRIM is not None:
        _MALLOC_TRIM(0)


def rough_time(seconds: float) -> str:
    """
    >>> rough_time(40), rough_time(100), rough_time(5000)
    ('40 seconds', '2 minutes', '1.4 hours')
    """
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 3600 else f"{seconds / 3600:.1f} hours"


class Listener(Protocol):
    """Told of a run as it goes. An exception that it raises ends the run."""

    def begin(self, stage: str) -> None: ...

    def end(self, stage: str, seconds: float) -> None:
        """Args: seconds: from its beginning to its end, stages inside it included."""

    def batch(self, model: Any, batch: Any) -> None:
        """A batch of a pass over the model is done."""


_listeners: list[Listener] = []


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell a listener of everything that is run in here."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def batch_done(model: Any, batch: Any) -> None:
    """Tell the listeners of a batch."""
    for one in _listeners:
        one.batch(model, batch)


@dataclass
class _Running:
    """A stage that has not ended. `within`: seconds of the stages inside it that have."""

    stage: str
    start: float
    within: float = 0.0


class Stopwatch:
    """`with stopwatch("probe 0"): ...` logs the stage and adds its time to `seconds["probe 0"]`.

    A stage inside another is none of the other's time: together they come to the seconds that have passed.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.failed: str | None = None  # the innermost stage that an exception has left
        self._running: list[_Running] = []  # the innermost last

    def so_far(self) -> dict[str, float]:
        """The seconds of every stage, of those that have not ended, too."""
        found, now, within = dict(self.seconds), time.perf_counter(), 0.0
        for one in reversed(self._running):
            whole = now - one.start
            found[one.stage] = found.get(one.stage, 0.0) + whole - one.within - within
            within = whole
        return found

    def add(self, seconds: Mapping[str, float]) -> None:
        """Those of an earlier process, whose work goes on here."""
        for stage, spent in seconds.items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + spent

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        logger.info("%s ...", stage)
        for one in _listeners:
            one.begin(stage)
        running = _Running(stage, time.perf_counter())
        self._running.append(running)
        try:
            yield
        except BaseException:
            self.failed = self.failed or stage  # the innermost stage sees the exception first
            raise
        finally:
            return_free_memory()
            seconds = time.perf_counter() - running.start
            self._running.remove(running)
            if self._running:
                self._running[-1].within += seconds
            self.add({stage: seconds - running.within})
            for one in _listeners:
                one.end(stage, seconds)
