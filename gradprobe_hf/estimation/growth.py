"""Growth: memory that was measured at a few sizes, into that of others, and into the largest that fits."""

from __future__ import annotations

from collections.abc import Mapping


def most_that_fit(measured: Mapping[int, int], room: float, most: int) -> int:
    """The largest size up to `most` whose memory is within some room, on the line through the measured ones.

    Args:
        measured: size -> bytes; at least two of them.
        room: bytes.

    Returns:
        0 if not even a size of 1 fits; `most` where memory does not grow.

    Example:
        >>> most_that_fit({1: 300, 2: 400, 4: 600}, room=1000, most=64)
        8
    """
    begin, slope = line_through(measured)
    if slope <= 0:
        return most if measured[max(measured)] <= room else 0
    return max(0, min(most, int((room - begin) / slope)))


def line_through(measured: Mapping[int, int]) -> tuple[float, float]:
    """What the smallest and the largest size say that nothing would take, and what each further one takes."""
    smallest, largest = min(measured), max(measured)
    slope = (measured[largest] - measured[smallest]) / (largest - smallest)
    return measured[smallest] - slope * smallest, slope
