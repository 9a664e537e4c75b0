"""More thresholds between the last that keeps a limit and the first behind it that does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradprobe_hf.config.values import GradientThreshold
from gradprobe_hf.decisions.search import Limit
from gradprobe_hf.threshold_sweep.rows import ThresholdRow, metric_of

BISECTIONS = 6


def refined(
    rows: Sequence[ThresholdRow], limit: Limit, tried: Callable[[GradientThreshold], ThresholdRow]
) -> list[ThresholdRow]:
    """More rows: bisection between the last number that keeps the limit and the first behind it that does not."""
    numbers = sorted((row for row in rows if isinstance(row.gradient_threshold, (int, float))), key=_threshold)
    kept = [_threshold(row) for row in numbers if limit.keeps(metric_of(row))]
    others = [_threshold(row) for row in numbers if not limit.keeps(metric_of(row))]
    beyond = [threshold for threshold in others if kept and threshold > kept[-1]]
    found: list[ThresholdRow] = []
    if beyond:
        low, high = kept[-1], beyond[0]
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            found.append(tried(middle))
            low, high = (middle, high) if limit.keeps(metric_of(found[-1])) else (low, middle)
    return found


def _threshold(row: ThresholdRow) -> float:
    assert isinstance(row.gradient_threshold, (int, float)), "chosen so"
    return float(row.gradient_threshold)
