"""What was seen of a loop: everything that a report is made of, and nothing else.

Seconds are of one process. It is bounded: sums and counts, no event is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from gradprobe_hf.profiling.places import Place

CallKind = Literal["synchronization", "print", "constant", "norm"]


@dataclass(frozen=True)
class Call:
    """Calls of one kind from one line, over all located steps.

    Attributes:
        what: as it is written, such as ".item()".
        count: of calls.
        seconds: that the line waits for them in a step: the median of the steps with one, times their share of all.
        steps: located steps with at least one.
        detail: of a tensor made anew: its shape.
    """

    kind: CallKind
    what: str
    place: Place
    count: int
    seconds: float
    steps: int
    detail: str = ""


@dataclass(frozen=True)
class LoaderWait:
    """Waiting for one data loader, over all timed steps.

    Attributes:
        place: the line that asks for the next batch.
        dataset: its class.
        workers: processes that load; 0: this one does.
        batches: that were waited for.
    """

    place: Place | None
    dataset: str
    workers: int
    batches: int
    seconds: float


@dataclass(frozen=True)
class Operator:
    """An operator in the traced steps; seconds without those of the operators that it calls."""

    name: str
    count: int
    seconds: float


@dataclass(frozen=True)
class Compilation:
    """torch.compile at work on one function during the timed steps. Reason: the guard that failed, if it says so."""

    place: Place
    count: int
    seconds: float
    reason: str


@dataclass(frozen=True)
class Contents:
    """Of the batches in some steps. Tokens and padding: None where a batch does not tell."""

    steps: int
    samples: int
    tokens: int | None
    padding: int | None


@dataclass(frozen=True)
class Observation:
    """Attributes:
    warmup: steps that were left out.
    timed: seconds of each step that was only timed.
    traced: of each step under torch.profiler.
    located: number of steps under the watch for lines.
    stages: seconds of each stage in the timed steps; "other" is what no stage claims.
    missing: what could not be seen -> why.
    complete: whether all steps of the schedule were seen.
    """

    warmup: int
    timed: tuple[float, ...]
    traced: tuple[float, ...]
    located: int
    stages: Mapping[str, float]
    loaders: tuple[LoaderWait, ...]
    calls: tuple[Call, ...]
    operators: tuple[Operator, ...]
    compilations: tuple[Compilation, ...]
    contents: Contents | None
    device: str
    versions: Mapping[str, str]
    missing: Mapping[str, str]
    complete: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What `to_dict` made, also after JSON."""
        return cls(
            **{
                **values,
                "timed": tuple(values["timed"]),
                "traced": tuple(values["traced"]),
                "loaders": tuple(LoaderWait(**_placed(row)) for row in values["loaders"]),
                "calls": tuple(Call(**_placed(row)) for row in values["calls"]),
                "operators": tuple(Operator(**row) for row in values["operators"]),
                "compilations": tuple(Compilation(**_placed(row)) for row in values["compilations"]),
                "contents": Contents(**values["contents"]) if values["contents"] else None,
            }
        )


def _placed(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "place": Place(**row["place"]) if row["place"] else None}
