"""What torch.compile did so far. Nothing here imports its compiler: a loop that does not compile has not, either."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from gradprobe_hf.profiling.observation import Compilation
from gradprobe_hf.profiling.places import Place, shown_path


def compiled_frames() -> list[Any]:
    """torch.compile's record of each compilation in this process; it keeps the last 64."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.get_compilation_metrics() if dynamo is not None else []


def since(before: list[Any]) -> tuple[Compilation, ...]:
    """Compilations that are not in an earlier list, by function."""
    known = {id(one) for one in before}
    new = [one for one in compiled_frames() if id(one) not in known and one.co_filename]
    places = [Place(shown_path(one.co_filename), one.co_firstlineno or 0, one.co_name or "") for one in new]
    seconds: dict[Place, float] = dict.fromkeys(places, 0.0)
    reasons: dict[Place, str] = {}
    for one, place in zip(new, places, strict=True):
        seconds[place] += one.entire_frame_compile_time_s or 0.0
        reasons[place] = " ".join((one.recompile_reason or "").split()) or reasons.get(place, "")
    return tuple(Compilation(place, count, seconds[place], reasons[place]) for place, count in Counter(places).items())
