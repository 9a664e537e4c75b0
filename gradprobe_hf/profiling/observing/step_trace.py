"""The trace of whole steps: torch.profiler over some of them, and what it says once the last has come to its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradprobe_hf.estimation.machine import process_bytes
from gradprobe_hf.profiling.observing.observation import Operator
from gradprobe_hf.profiling.observing.traced_events import busy_seconds, collective_seconds, is_mark
from gradprobe_hf.profiling.observing.tracer import Tracer

_OPERATORS = 20  # that are kept
_LARGEST = 2**30  # bytes that the process grows by under torch.profiler; then the trace ends with its step
_MARKS = ("Optimizer.", "enumerate(", "ProfilerStep")


@dataclass(frozen=True)
class Traced:
    """Of the steps under torch.profiler, in seconds; None: they were not traced to their end."""

    operators: tuple[Operator, ...] = ()
    collectives: float | None = None
    busy: float | None = None


class StepTrace:
    """One trace, which may have to begin again: an evaluation that comes between its steps would be in it.

    Attributes:
        found: what it says, once it was stopped and is whole.
        is_whole: whether it ends where a step does: a part of one would count as one.
        waits: whether it begins with the next step of the training.
    """

    def __init__(self) -> None:
        self.found, self.is_whole, self.waits = Traced(), False, False
        self._tracer: Tracer | None = None
        self._bytes_before = 0

    def start(self) -> None:
        """Raises: RuntimeError: another profiler is running."""
        self.is_whole, self.waits, self._bytes_before = False, False, process_bytes()
        tracer = Tracer()
        tracer.start()
        self._tracer = tracer

    @property
    def is_full(self) -> bool:
        return process_bytes() - self._bytes_before > _LARGEST

    def stop(self, on_gpu: bool) -> None:
        """Harmless where it was not started."""
        tracer, self._tracer = self._tracer, None
        if tracer is None:
            return
        tracer.stop()
        if self.is_whole:
            self.found = _read(tracer, on_gpu)


def _read(tracer: Tracer, on_gpu: bool) -> Traced:
    trace = tracer.profiler

    def seconds(row: Any) -> float:
        return float(row.self_device_time_total if on_gpu else row.self_cpu_time_total) / 1e6

    rows = sorted(trace.key_averages(), key=lambda row: (-seconds(row), row.key))
    named = [row for row in rows if not (is_mark(row) or row.key.startswith(_MARKS))]
    operators = tuple(Operator(row.key, row.count, seconds(row)) for row in named[:_OPERATORS])
    events = trace.events() or []
    return Traced(operators, collective_seconds(events), busy_seconds(events))
