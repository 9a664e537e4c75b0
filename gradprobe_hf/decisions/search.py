"""The search for the largest budget that keeps a metric within `max_metric_drop`: which budgets it tries."""

from __future__ import annotations

import math
from collections.abc import Iterator

FINEST = 0.005  # of the weights: bisection stops here
# Of a metric: 0.8 less 0.1 is not 0.7 in the last bits, and an accuracy of so many rows falls by exactly so much often.
ROUNDED = 1e-6


def allowed(dense: float, drop: float | str | None) -> float:
    """The worst value of a metric (lower is better) that a drop allows: absolute, or relative like `"5%"`.

    >>> allowed(20.0, 1.5), allowed(20.0, "5%")
    (21.5, 21.0)
    """
    assert drop is not None, "nothing is searched for without it"
    if isinstance(drop, str):
        return dense + abs(dense) * float(drop.removesuffix("%")) / 100
    return dense + drop


def within(value: float, limit: float) -> bool:
    """Whether a metric (lower is better) keeps a limit, but for rounding; NaN does not.

    >>> within(-0.7, allowed(-0.8, 0.1)), within(-0.69, allowed(-0.8, 0.1))
    (True, False)
    """
    return value <= limit or math.isclose(value, limit, rel_tol=ROUNDED, abs_tol=1e-12)


def levels(first: float, step: float, last: float) -> Iterator[float]:
    """The budgets on the way up, before bisection.

    >>> list(levels(0.2, 0.2, 0.5))
    [0.2, 0.4, 0.5]
    """
    for number in range(math.ceil(round((last - first) / step, 6))):
        yield round(first + number * step, 6)
    yield last
