"""A finding, a check that makes some, and the words that all of them use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from gradprobe_hf.profiling.observing.observation import Observation
from gradprobe_hf.profiling.observing.places import Place

Severity = Literal["high", "medium", "low", "not measured"]
HIGH, MEDIUM = 0.1, 0.01  # shares of the step from which on a finding is called so


@dataclass(frozen=True)
class Finding:
    """Attributes:
    file, line: of the user's own frame; None where no line of it was seen.
    share: of a step, in [0, 1]; None where what it costs has no seconds of its own.
    evidence: what was measured.
    remedy: what to write instead.
    """

    kind: str
    file: str | None
    line: int | None
    share: float | None
    evidence: str
    remedy: str

    @property
    def severity(self) -> Severity:
        if self.share is None:
            return "not measured"
        return "high" if self.share >= HIGH else "medium" if self.share >= MEDIUM else "low"


@dataclass(frozen=True)
class Check:
    """A kind of finding.

    Attributes:
        looks_for: a sentence for the page and the report.
        unknown: why an observation cannot tell; None if it can.
        find: the findings, in any order.
    """

    looks_for: str
    unknown: Callable[[Observation], str | None]
    find: Callable[[Observation], list[Finding]]


def finding(kind: str, place: Place | None, share: float | None, evidence: str, remedy: str) -> Finding:
    file, line = (place.file, place.line) if place else (None, None)
    return Finding(kind, file, line, None if share is None else min(share, 1.0), evidence, remedy)


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def gigabytes(count: float) -> str:
    return f"{count / 2**30:.3g} GiB"


def timed(seen: Observation) -> str | None:
    return None if seen.timed else "no step after the warm-up was seen"


def located(seen: Observation) -> str | None:
    if reason := timed(seen):
        return reason
    return None if seen.located else seen.missing.get("calls", "the run ended before lines were looked for")


def traced(seen: Observation) -> str | None:
    if reason := timed(seen):
        return reason
    return None if seen.operators else seen.missing.get("operators", "the run ended before steps were traced")
