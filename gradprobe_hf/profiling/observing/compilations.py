"""What torch.compile did so far. Nothing here imports its compiler: a loop that does not compile has not, either."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from gradprobe_hf.profiling.observing.observation import Compilation, GraphBreak
from gradprobe_hf.profiling.observing.places import Place, place_in_user_code, shown_path

_BREAKS = 20  # that are kept, the most frequent ones


class CompilationWatch:
    """What torch.compile does while steps are observed.

    Attributes:
        compiled: in the steps that are timed.
        breaks: graphs that ended early, in all of them.
    """

    def __init__(self) -> None:
        self.compiled: tuple[Compilation, ...] = ()
        self.breaks: tuple[GraphBreak, ...] = ()
        self._frames_before: list[Any] = []
        self._ends_before: list[Any] = []

    def start(self) -> None:
        self._ends_before = graph_ends()

    def begin_timed(self) -> None:
        self._frames_before = compiled_frames()

    def end_timed(self) -> None:
        self.compiled = since(self._frames_before)

    def end_phase(self) -> None:
        self.breaks = breaks_since(self._ends_before)


def compiled_frames() -> list[Any]:
    """torch.compile's record of each compilation in this process; it keeps the last 64."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.get_compilation_metrics() if dynamo is not None else []


def graph_ends() -> list[Any]:
    """Its record of each graph that had to end before the function did."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return list(dynamo.graph_break_reasons) if dynamo is not None else []


def since(before: list[Any]) -> tuple[Compilation, ...]:
    """Compilations that are not in an earlier list, by function. The backward pass is compiled when it first runs."""
    known = {id(one) for one in before}
    later = [one for one in compiled_frames() if id(one) not in known]
    backward = Counter[str]()
    for one in later:
        backward[one.compile_id] += one.backward_cumulative_compile_time_us or 0
    new = [one for one in later if one.co_filename]
    places = [Place(shown_path(one.co_filename), one.co_firstlineno or 0, one.co_name or "") for one in new]
    seconds: dict[Place, float] = dict.fromkeys(places, 0.0)
    reasons: dict[Place, str] = {}
    for one, place in zip(new, places, strict=True):
        seconds[place] += (one.entire_frame_compile_time_s or 0.0) + backward[one.compile_id] / 1e6
        reasons[place] = " ".join((one.recompile_reason or "").split()) or reasons.get(place, "")
    return tuple(Compilation(place, count, seconds[place], reasons[place]) for place, count in Counter(places).items())


def breaks_since(before: list[Any]) -> tuple[GraphBreak, ...]:
    """Graphs that ended since an earlier list was taken, by line."""
    known = {id(one) for one in before}
    found: Counter[tuple[Place, str]] = Counter()
    for one in graph_ends():
        place = place_in_user_code(one.user_stack)
        if id(one) not in known and place is not None:
            found[place, one.reason.strip().splitlines()[0]] += 1
    return tuple(GraphBreak(place, count, reason) for (place, reason), count in found.most_common(_BREAKS))
