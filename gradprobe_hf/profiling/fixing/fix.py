"""What came of one change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import Any, Self


@dataclass(frozen=True)
class Fix:
    """A change that was tried, or why it was not.

    Attributes:
        done: what it changed.
        gains: of each round: samples a second with the change / without; steps a second, where batches do not tell.
        memory: bytes with it / without, at the fullest.
        loss: how losses compare, in words.
        untried: why it was not; None if it was.
        remedy: how to make it in the script.
    """

    change: str
    done: str
    gains: tuple[float, ...]
    memory: float | None
    loss: str
    untried: str | None
    remedy: str

    @property
    def gain(self) -> float | None:
        return median(self.gains) if self.gains else None

    @property
    def pays(self) -> bool:
        """In each of several rounds."""
        return len(self.gains) > 1 and min(self.gains) > 1

    @property
    def verdict(self) -> str:
        """It paid, or it cost, only if all of several rounds say so."""
        if self.untried is not None:
            return "not tried"
        if len(self.gains) == 1:
            return "one round alone does not tell"
        if self.pays:
            return "pays"
        return "costs" if max(self.gains) < 1 else "no difference that all rounds agree on"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"gain": self.gain, "verdict": self.verdict}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What `to_dict` made, also after JSON."""
        known = {field.name: values[field.name] for field in fields(cls)}
        return cls(**known | {"gains": tuple(known["gains"])})
