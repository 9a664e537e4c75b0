"""Grids: a test over many cases, or every combination of some factors, of which the fast suite takes a few."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import pytest


def some(name: str, cases: Iterable[str], fast: Collection[str]) -> pytest.MarkDecorator:
    """Every case by its name, in the fast suite only these.

    Raises:
        ValueError: one of these is none of the cases.
    """
    cases = list(cases)
    if unknown := set(fast) - set(cases):
        raise ValueError(f"no case is called {', '.join(sorted(unknown))}.")
    return pytest.mark.parametrize(
        name, [case if case in fast else pytest.param(case, marks=pytest.mark.slow) for case in cases]
    )


def grid(names: str, *factors: Mapping[str, Any] | Sequence[Any]) -> pytest.MarkDecorator:
    """Every combination; those that are not needed for every value of every factor to occur are slow.

    Args:
        names: of the arguments, one for each factor.
        factors: values, or values by their names.
    """
    named = [
        dict(factor) if isinstance(factor, Mapping) else {str(value): value for value in factor} for factor in factors
    ]
    fast = {tuple(number % len(factor) for factor in named) for number in range(max(map(len, named)))}
    cases = []
    for places in product(*(range(len(factor)) for factor in named)):
        chosen = [list(factor.items())[place] for factor, place in zip(named, places, strict=True)]
        marks = () if places in fast else pytest.mark.slow
        cases.append(
            pytest.param(*(value for _, value in chosen), id=", ".join(name for name, _ in chosen), marks=marks)
        )
    return pytest.mark.parametrize(names, cases)
