"""Budgets: how large a smaller model may be: parameters, or bytes of the file that is written; or how fast it is."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
_BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
WANTED = {
    "params": "a share of the model's in (0, 1), like 0.75, or a number of parameters, like '100M'",
    "memory": "a number of bytes, like '200MB'",
    "latency": "a share of the model's in (0, 1), like 0.7",
}
_EXAMPLES = "params=0.75, params='100M', memory='200MB' or latency=0.7"  # as a command line translates them
BUDGETS = tuple(WANTED)
_UNITS = {"params": "parameters", "memory": "bytes", "latency": "seconds"}


@dataclass(frozen=True)
class ShapeBudget:
    """The most that may be left.

    Attributes:
        option: that gives it: `params`, `memory` or `latency`.
        given: its value, as the user wrote it.
        share: of what the model has; None: `limit` says how much.
        limit: parameters, or bytes; never seconds.

    >>> ShapeBudget.of(params="1.5M").limit
    1500000
    >>> ShapeBudget.of(memory="2MiB").limit
    2097152
    """

    option: str
    given: float | str
    share: float | None = None
    limit: int | None = None

    @classmethod
    def of(cls, **given: Any) -> ShapeBudget:
        """The one that is given, of `params`, `memory` and `latency`.

        Raises:
            ValueError: none, several, or a value that is no budget.
        """
        values = {option: value for option, value in given.items() if value is not None}
        if len(values) != 1:
            given_ones = " and ".join(f"{option}={value!r}" for option, value in values.items()) or "none"
            raise ValueError(f"structure='auto' needs one budget, {_EXAMPLES} say, got {given_ones}.")
        ((option, value),) = values.items()
        found = _read(option, value)
        if found is None:
            raise ValueError(f"{option} must be {WANTED[option]}, got {value!r}.")
        return cls(option, value, share=found) if isinstance(found, float) else cls(option, value, limit=found)

    def most(self, dense: float) -> float:
        """The most that may be left of a model of this size.

        Raises:
            ValueError: a budget that the model meets as it is.
        """
        if self.limit is None:
            limit = (self.share or 0) * dense
            return limit if self.is_measured else math.floor(limit)
        if self.limit >= dense:
            raise ValueError(
                f"{self} is no budget: the model has {self.shown(dense)} as it is. Give less, or a share (params=0.75)."
            )
        return self.limit

    @property
    def is_measured(self) -> bool:
        """Whether it is about seconds, which a machine has to tell."""
        return self.option == "latency"

    @property
    def unit(self) -> str:
        """What it counts, as attributes of a shape are called."""
        return _UNITS[self.option]

    def shown(self, value: float) -> str:
        """An amount of what it counts."""
        return f"{value:.3g} {self.unit}" if self.is_measured else f"{value:,} {self.unit}"

    def as_given(self, value: float, dense: float) -> str:
        """An amount of what it counts, and the share that allows it where the budget is one."""
        if self.share is None:
            return self.shown(value)
        return f"{self.shown(value)} ({self.option}={math.ceil(1000 * value / dense) / 1000:g})"

    def __str__(self) -> str:
        return f"{self.option}={self.given!r}"


def _read(option: str, value: Any) -> float | int | None:
    """A share in (0, 1), or how many; None: it is neither."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if isinstance(value, str):
        suffixes = _BYTES if option == "memory" else _COUNTS
        found = re.fullmatch(r"(\d+(?:\.\d+)?) *([a-z]*)", value.strip(), re.IGNORECASE)
        if found is None or found[2].upper() not in suffixes:
            return None
        # Exactly: 0.267 times 10**9 is no whole number as a float. Of 1.7 MiB there is a part of a byte, and no more.
        factor = suffixes[found[2].upper()]
        value = float(found[1]) if factor == 1 else math.floor(Fraction(found[1]) * factor)
    if not math.isfinite(value):
        return None
    if 0 < value < 1:
        return float(value) if option != "memory" else None
    if option == "latency":
        return None
    # Between a share and a count there is nothing: 1.5 is a slip, and so is 1.
    return int(value) if value >= 2 and float(value).is_integer() else None
