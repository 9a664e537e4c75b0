"""Option checks: what is wrong with one value, in a message that shows it and says what would be right."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def one_of(name: str, value: object, choices: tuple[Any, ...]) -> None:
    # By type too: True and 1.0 equal 1, and are no number of probes.
    if not any(type(value) is type(choice) and value == choice for choice in choices):
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
                raise ValueError(f"{name} pattern {pattern!r} is not a regular expression: {error}.") from error
    return given


def check_folder(name: str, value: object) -> None:
    """Raise unless it can be the path of a folder, whether that exists or not.

    Raises:
        ValueError: it is no path.
        NotADirectoryError: it is a file, or below one.
    """
    if not isinstance(value, (str, Path)) or not str(value):
        raise ValueError(f"{name} must be the path of a folder, got {value!r}.")
    path = Path(value).absolute()
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    if not there.is_dir():
        raise NotADirectoryError(f"{name}={str(value)!r}: {there} is a file; choose another folder.")


def check_outside(name: str, folder: object, output_dir: object) -> None:
    """Raise as `check_folder`, and ValueError where files of the run would be in the way of the checkpoint, which is
    renamed into its place when it is whole; not where there is no such folder, None."""
    if folder is None:
        return
    check_folder(name, folder)
    if is_within(folder, output_dir):
        raise ValueError(
            f"{name}={str(folder)!r} is, or is in, the folder that the checkpoint is to be in ({str(output_dir)!r}): "
            f"choose another one (--{name.replace('_', '-')})."
        )


def is_within(folder: Any, other: Any) -> bool:
    """Whether a folder is another one, or anywhere in it; not where one of them is None."""
    if folder is None or other is None:
        return False
    inner, outer = Path(folder).resolve(), Path(other).resolve()
    return outer in (inner, *inner.parents)


def check_callable(name: str, value: object, called_with: tuple[str, ...]) -> None:
    """Raise ValueError unless it is None, or a function of so many arguments."""
    if value is None:
        return
    form = f"{name}({', '.join(called_with)})"
    if not callable(value):
        raise ValueError(f"{name} must be a function, called as {form}, got {value!r}.")
    try:
        inspect.signature(value).bind(*called_with)
    except TypeError as error:
        raise ValueError(f"{name} is called as {form}: {error}.") from error
    except ValueError:  # a builtin that does not say what it takes
        return


def function_name(function: Callable[..., Any] | None) -> str | None:
    """What a function of the user's own is called; of a `partial`, what it is of."""
    named = getattr(function, "func", function)
    return None if function is None else str(getattr(named, "__qualname__", type(named).__qualname__))
