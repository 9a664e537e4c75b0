"""Values: the text of an argument -> what its type hint asks for, or an error that names what it should be."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from gradprobe_hf.runtime.option_checks import number


class Kind(NamedTuple):
    """How a type is written on the command line. Attributes: `wanted`, for errors; `metavar`, for the help."""

    read: Callable[[str], Any]
    wanted: tuple[str, ...]
    metavar: str


def json_object(text: str) -> dict[Any, Any]:
    """Numerals become numbers, as `max_memory` has them for devices."""
    try:
        values = json.loads(text)
        return {int(name) if name.isdigit() else name: value for name, value in values.items()}
    except (ValueError, AttributeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object: {error}") from error


def device_map(text: str) -> str | dict[Any, Any]:
    return json_object(text) if text.startswith("{") else text


def at_least(least: int) -> Callable[[str], int]:
    """Reads a whole number that is not below `least`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= {least}")
        return value

    return read


def names(text: str) -> tuple[str, ...]:
    """A list like a,b; spaces around a name are dropped."""
    found = tuple(name.strip() for name in text.split(","))
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of names, like a,b")
    return found


def text_or_none(text: str) -> str | bool:
    """False for 'none', as `prune_pretrained` has it."""
    return text != "none" and text


class Mixture(argparse.Action):
    """Collects `SPEC[=WEIGHT] ...`: one without a weight as it is, otherwise a dict of names and weights."""

    def __call__(self, _parser: Any, options: argparse.Namespace, values: Any, _option: str | None = None) -> None:
        try:
            setattr(options, self.dest, mixture(values))
        except ValueError as error:
            raise argparse.ArgumentError(self, str(error)) from error


def mixture(specs: Sequence[str]) -> str | dict[str, float]:
    """
    >>> mixture(["pydoc"]), mixture(["a.jsonl=2", "pydoc"])
    ('pydoc', {'a.jsonl': 2.0, 'pydoc': 1.0})
    """
    if len(specs) == 1:  # a share of all
        return _weighted(specs[0])[0]
    found: dict[str, float] = {}
    for spec in specs:
        name, weight = _weighted(spec)
        if name in found:
            raise ValueError(f"{name!r} is named twice")
        found[name] = weight
    return found


def _weighted(spec: str) -> tuple[str, float]:
    found = None if Path(spec).exists() else re.fullmatch(r"(.+)=([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)", spec)
    if not found:
        return spec, 1.0
    number(f"the weight of {found[1]!r}", float(found[2]), "a number > 0", lambda x: x > 0)
    return found[1], float(found[2])


def with_line_breaks(text: str) -> str:
    """A shell passes a backslash and an n on as they are, where a line break is meant."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))


def _amounts(text: str) -> dict[str, int | float]:
    found = [part.split("=") for part in text.split(",")]
    is_whole = re.compile(r"\s*[+-]?\d+\s*").fullmatch
    amounts = {name.strip(): int(value) if is_whole(value) else float(value) for name, value in found}
    if len(amounts) < len(found):
        raise ValueError("a name stands there twice")
    return amounts


KINDS: dict[Any, Kind] = {
    int: Kind(int, ("a whole number",), "N"),
    float: Kind(float, ("a number",), "X"),
    str: Kind(str, ("text",), "TEXT"),
    bool: Kind({"on": True, "off": False}.__getitem__, ("'on'", "'off'"), "on|off"),
    Sequence[float]: Kind(_numbers, ("a list of numbers, like 0.2,0.35",), "X,X,..."),
    Mapping[str, int | float]: Kind(_amounts, ("names and amounts, each once, like ffn=0.3,blocks=4",), "NAME=X,..."),
    Mapping[str, float]: Kind(json_object, ("a JSON object",), "JSON"),
}


def kind(hint: Any) -> Kind:
    """That of a type, a `Literal`, or a union, which is read as the first of its types that the text can be."""
    if get_origin(hint) is Literal:
        words = {str(value): value for value in get_args(hint)}
        return Kind(words.__getitem__, tuple(map(repr, words)), "|".join(words))
    if get_origin(hint) not in (Union, UnionType):
        return KINDS[hint]
    kinds = [kind(part) for part in get_args(hint) if part is not NoneType]

    def read(text: str) -> Any:
        for one in kinds:
            try:
                return one.read(text)
            except (ValueError, KeyError, argparse.ArgumentTypeError):
                continue
        raise ValueError(text)

    wanted = tuple(word for one in kinds for word in one.wanted)
    return Kind(read, wanted, "|".join(one.metavar for one in kinds))


def reader(hint: Any) -> Callable[[str], Any]:
    """For `add_argument(type=...)`, which would name the function that failed."""
    read, wanted, _ = kind(hint)

    def checked(text: str) -> Any:
        try:
            return read(text)
        except (ValueError, KeyError) as error:
            *others, last = wanted
            expected = f"{', '.join(others)} or {last}" if others else last
            if hint in (float, float | None) and re.fullmatch(r"\d+(\.\d+)?%", text):
                expected += f": write {float(text[:-1]) / 100:g}"
            raise argparse.ArgumentTypeError(f"{text!r} is not {expected}") from error

    return checked
