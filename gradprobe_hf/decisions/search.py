"""The search for the largest budget that keeps a metric within `max_metric_drop`: which budgets it tries."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

FINEST = 0.005  # of the weights: bisection stops here
# 0.8 less 0.1 is not 0.7 in the last bits, and an accuracy of so many rows often falls by exactly so much.
ROUNDED = 1e-6  # of a metric
FORGIVEN = 1e-3  # of a drop, at most


@dataclass(frozen=True)
class Limit:
    """The worst value of a metric (lower is better) that a drop allows.

    Attributes:
        dense: the metric of the model as it is.
    """

    dense: float
    value: float

    @classmethod
    def of(cls, dense: float, drop: float | str | None) -> Limit:
        """Of a drop, absolute or relative like `"5%"`.

        >>> Limit.of(20.0, 1.5).value, Limit.of(20.0, "5%").value
        (21.5, 21.0)
        """
        assert drop is not None, "nothing is searched for without it"
        if isinstance(drop, str):
            return cls(dense, dense + abs(dense) * float(drop.removesuffix("%")) / 100)
        return cls(dense, dense + drop)

    def part(self, share: float) -> Limit:
        """That of a share of the drop."""
        return Limit(self.dense, self.dense + (self.value - self.dense) * share)

    def keeps(self, value: float) -> bool:
        """Whether a value is within, but for rounding; NaN is not.

        >>> Limit.of(-0.8, 0.1).keeps(-0.7), Limit.of(-0.8, 0.1).keeps(-0.69)
        (True, False)
        """
        slack = min(ROUNDED * abs(self.value), FORGIVEN * (self.value - self.dense))
        return value <= self.value or value - self.value <= slack


def levels(first: float, step: float, last: float) -> Iterator[float]:
    """The budgets on the way up, before bisection.

    >>> list(levels(0.2, 0.2, 0.5))
    [0.2, 0.4, 0.5]
    """
    for number in range(math.ceil(round((last - first) / step, 6))):
        yield round(first + number * step, 6)
    yield last
