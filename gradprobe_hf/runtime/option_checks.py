"""Option checks: what is wrong with one value, in a message that shows it and says what would be right."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any


def one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def whole(name: str, value: object, at_least: int, other: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{name} must be {other}a whole number >= {at_least}, got {value!r}.")


def number(name: str, value: object, wanted: str, holds: Any) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or not holds(value):
        raise ValueError(f"{name} must be {wanted}, got {value!r}.")


def threshold(value: Any) -> float | dict[str, float] | str:
    """A growth of gradients that is tolerated: one number, one for each pattern, or `"adaptive"`."""
    if value == "adaptive":
        return "adaptive"
    if isinstance(value, Mapping) and value:
        named = patterns("gradient_threshold", tuple(value))
        for pattern in named:
            number(f"gradient_threshold[{pattern!r}]", value[pattern], "a finite number >= 0", lambda x: x >= 0)
        return {pattern: float(value[pattern]) for pattern in named}
    wanted = "a finite number >= 0, a dict from patterns to such numbers, or 'adaptive'"
    number("gradient_threshold", value, wanted, lambda x: x >= 0)
    return value


def rounds(value: Any) -> tuple[float, ...]:
    """Sparsities that rise."""
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"rounds must be a list of sparsities, like (0.2, 0.35, 0.5), got {value!r}.")
    for sparsity in value:
        number("rounds", sparsity, "fractions in (0, 1)", lambda x: 0 < x < 1)
    if list(value) != sorted(set(value)):
        raise ValueError(f"rounds must rise from each sparsity to the next, got {value!r}.")
    return tuple(map(float, value))


def check_drop(value: Any) -> None:
    """Raise ValueError unless it is a number, or one with a percent sign."""
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?%", value):
        return
    number("max_metric_drop", value, "a number >= 0, or a share like '5%'", lambda x: x >= 0)


def patterns(name: str, value: object) -> tuple[str, ...]:
    """A tuple of non-empty patterns, whose regular expressions compile; one string alone is one pattern."""
    if not isinstance(value, (str, list, tuple, set, frozenset, type(None))):
        raise ValueError(f"{name} must be a pattern or a list of patterns, got {value!r}.")
    given = (value,) if isinstance(value, str) else tuple(value or ())
    for pattern in given:
        if not isinstance(pattern, str) or not pattern:
            raise ValueError(f"{name} must hold names, globs or 're:...' patterns, got {pattern!r}.")
        if pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except re.error as error:
                raise ValueError(f"{name}: {pattern!r} is not a regular expression: {error}.") from error
    return given
