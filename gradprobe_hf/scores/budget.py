"""The budget: how many weights go, and over what they are counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scope = Literal["global", "block", "tensor", "row"]


@dataclass(frozen=True)
class Budget:
    """An exact number of weights in each unit of a scope.

    Attributes:
        sparsity: fraction in [0, 1) of every unit's weights.
        scope: the unit: all matrices together, those of a block, a matrix, or a row of one.
        group: (n kept, m inputs) of an n:m pattern: then m - n go in every m consecutive inputs, and `sparsity` and
            `scope` are not looked at.
        bounds: the least and the most of each matrix that may go, as fractions of it; None: anything.
    """

    sparsity: float
    scope: Scope = "global"
    group: tuple[int, int] | None = None
    bounds: tuple[float, float] | None = None
