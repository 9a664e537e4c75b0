"""The table of terms: what a probe can sum of one weight matrix, for scores and decisions to read.

With x_t the input and d_t the gradient of the summed loss at the output of the matrix, for token t of sequence s, and
`g_s = sum_{t in s} d_t x_t^T`, the gradient of sequence s, there are

    matrix terms   `[out, in]`, with an accumulator each; all that is known of them is in the rows of `MATRIX_TERMS`
    vector terms   a few numbers for each row, column or unit; each has a class of its own in `probe/`

To add a matrix term: a row here. It is measured for whatever names it, a row of the table of scores say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Term = str  # a key of `MATRIX_TERMS`, or one of `VECTOR_TERMS`
MARGINALS, GATES = "marginals", "gates"  # `probe/marginals.py` and `probe/gates.py` have their formulas
VECTOR_TERMS = (MARGINALS, GATES)


@dataclass(frozen=True)
class MatrixTerm:
    """One non-negative statistic `[out, in]` that starts at zero and only grows.

    Attributes:
        fold: adds the gradient of one sequence to the term, in place; both `[rows, in]`, in the dtype of the sums.
            None: the term is of tokens; it sums the products `(d_t^2)(x_t^2)^T`, none of which is ever made.
        merging: how what several processes have of the term becomes one.
    """

    fold: Callable[[Tensor, Tensor], object] | None
    merging: Literal["sum", "max"] = "sum"

    @property
    def is_of_tokens(self) -> bool:
        return self.fold is None

    def merge_(self, values: Tensor, more: Tensor) -> None:
        """Add the same statistic of other sequences, in place."""
        if self.merging == "max":
            torch.maximum(values, more, out=values)
        else:
            values.add_(more)


MATRIX_TERMS: dict[Term, MatrixTerm] = {
    # S = sum_s g_s^2
    "sequence": MatrixTerm(lambda values, gradient: values.addcmul_(gradient, gradient)),
    # T = sum_t (d_t^2)(x_t^2)^T
    "token": MatrixTerm(None),
    # G = max_s |g_s|
    "peak": MatrixTerm(lambda values, gradient: torch.maximum(values, gradient.abs(), out=values), merging="max"),
}


def matrix_terms(terms: Iterable[Term]) -> dict[Term, MatrixTerm]:
    """Those of these terms that are matrices, in the order of the table.

    Raises:
        KeyError: a term that is in no table.
    """
    wanted = set(terms)
    if unknown := wanted - MATRIX_TERMS.keys() - set(VECTOR_TERMS):
        known = ", ".join([*MATRIX_TERMS, *VECTOR_TERMS])
        raise KeyError(f"no probe measures {', '.join(sorted(unknown))}: there are {known}.")
    return {name: row for name, row in MATRIX_TERMS.items() if name in wanted}
