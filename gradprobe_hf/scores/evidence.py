"""Evidence: what a score may read of one weight matrix, some rows at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from gradprobe_hf.scores.terms import Term


class MatrixEvidence(Protocol):
    """The statistics of one matrix; `rows` are rows of the whole matrix."""

    @property
    def reached(self) -> bool:
        """Whether the loss depends on the matrix (or a forward pass used it)."""

    def read(self, term: Term, rows: slice) -> Tensor:
        """A matrix term, `[rows, in]`."""

    def factored(self, rows: slice) -> Tensor:
        """The factored Fisher, `[rows, in]`."""

    def input_sq(self, rows: slice) -> Tensor:
        """The sum over tokens of each input squared, broadcastable to `[rows, in]`."""


@dataclass(frozen=True)
class Evidence:
    """Some rows of a matrix, and what was measured of them.

    Attributes:
        weight: `[rows, in]`, in float32 or float64.
        statistics: of the matrix; holds the terms that the score's row asks for, and none for a score that needs none.
        rows, columns: which part of the matrix `weight` is, both ends given.
        name, inputs: of the whole matrix: its name, and how many inputs it has.
        fisher: the Fisher estimate that the configuration names, a key of `FISHER_ESTIMATES`.
        seed: of the configuration.
    """

    weight: Tensor
    statistics: MatrixEvidence
    rows: slice
    columns: slice
    name: str
    inputs: int
    fisher: str
    seed: int
