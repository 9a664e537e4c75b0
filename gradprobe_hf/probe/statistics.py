"""Statistics: what a probe keeps of each matrix.

With x_t the input and d_t the gradient of the summed loss at the output of the matrix, for token t of sequence s:

    sequence   S = sum_s (sum_{t in s} d_t x_t^T)^2            [out, in]
    token      T = sum_t (d_t^2)(x_t^2)^T                      [out, in]
    peak       G = max_s |sum_{t in s} d_t x_t^T|              [out, in]
    marginals  sum_t d_t^2 and sum_t x_t^2, whose outer product is the factored Fisher K    [out], [in]

For an embedding, `[tokens, features]`, x_t is one-hot: its rows' marginal counts tokens. Probes add to S and T;
marginals are kept per probe and per site, since a sum of outer products is not the outer product of sums. Everything
is float32, or float64 for a float64 model: bfloat16 would stop adding after 256 sequences.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradprobe_hf.targets import Kind, Target

Term = Literal["sequence", "token", "peak", "marginals"]


@dataclass
class Marginals:
    """Sums of squares along the rows and the columns of one matrix, at one site in one probe."""

    rows: Tensor | float
    columns: Tensor | float
    kind: Kind


class MatrixStatistics:
    """What is known of one matrix. Shapes: `sequence`, `token`, `peak` `[out, in]`, None when not asked for."""

    def __init__(self, target: Target, terms: frozenset[Term], weight: Tensor) -> None:
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self.sequence, self.token, self.peak = (
            torch.zeros(target.shape, dtype=dtype, device=weight.device) if term in terms else None
            for term in ("sequence", "token", "peak")
        )
        self.dtype = dtype
        self.terms = terms
        self.reached = False
        self._marginals: dict[tuple[int, int], Marginals] = {}

    @property
    def peaks(self) -> Tensor:
        """The largest magnitude of each gradient, `[out, in]`, of a probe that was asked for it."""
        assert self.peak is not None, "the probe did not fold 'peak'"
        return self.peak

    def add_gradient(self, gradient: Tensor) -> None:
        """Fold the gradient of one whole sequence, `[out, in]`."""
        gradient = gradient.to(self.dtype)
        if self.sequence is not None:
            self.sequence.addcmul_(gradient, gradient)
        if self.peak is not None:
            torch.maximum(self.peak, gradient.abs(), out=self.peak)

    def add_marginals(self, probe: int, site: int, kind: Kind, rows: Tensor | float, columns: Tensor | float) -> None:
        kept = self._marginals.setdefault((probe, site), Marginals(0.0, 0.0, kind))
        kept.rows = kept.rows + rows
        kept.columns = kept.columns + columns

    def factored(self) -> Tensor:
        """The factored Fisher K, `[out, in]`, summed over probes and sites: one product of thin matrices."""
        rows = torch.stack([torch.as_tensor(kept.rows) for kept in self._marginals.values()], dim=1)
        columns = torch.stack([torch.as_tensor(kept.columns) for kept in self._marginals.values()], dim=0)
        return rows @ columns

    def input_sq(self) -> Tensor:
        """Sum of each input squared in the first probe, broadcastable to `[out, in]`."""
        first = [kept for (probe, _), kept in self._marginals.items() if probe == 0]
        return sum(  # type: ignore[return-value]  # never empty: asked for reached matrices only
            torch.as_tensor(kept.rows)[:, None] if kept.kind == "embedding" else torch.as_tensor(kept.columns)[None, :]
            for kept in first
        )


class Statistics:
    """The statistics of every target, over one probe or several."""

    def __init__(self, targets: Iterable[Target], terms: frozenset[Term], model: torch.nn.Module) -> None:
        self.terms = terms
        self.probe = 0
        self._of = {target.name: MatrixStatistics(target, terms, target.matrix(model)) for target in targets}

    def __getitem__(self, name: str) -> MatrixStatistics:
        return self._of[name]

    @property
    def unreached(self) -> list[str]:
        """Matrices the loss does not depend on: no evidence about them."""
        return [name for name, statistics in self._of.items() if not statistics.reached]

    @property
    def nbytes(self) -> int:
        """Bytes of the accumulators of size `[out, in]`."""
        kept = [term for one in self._of.values() for term in (one.sequence, one.token, one.peak) if term is not None]
        return sum(term.nbytes for term in kept)
