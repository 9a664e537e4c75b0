"""Shares as a reader has them, in per cent."""

from __future__ import annotations


def percent(share: float, least: int = 0) -> str:
    """A share that came about, in whole per cents, but never none or all where it is not. Args: least: decimals.

    >>> percent(0.5), percent(1 / 3), percent(0.999), percent(0.0001), percent(1.0), percent(0.5, 1)
    ('50%', '33%', '99.9%', '0.01%', '100%', '50.0%')
    """
    for decimals in range(least, 6):
        said = f"{share:.{decimals}%}"
        if float(said[:-1]) not in (0, 100):
            return said
    return f"{share:.{least}%}"


def asked_percent(share: float) -> str:
    """A share that was asked for, as it was.

    >>> asked_percent(0.125), asked_percent(0.9995)
    ('12.5%', '99.95%')
    """
    return f"{100 * share:.6g}%"
