"""Marginals: sums of squared output gradients and inputs of one matrix, and the factored Fisher made of them.

For each probe p and each site u (a module that uses the matrix), with d_t the output gradient and x_t the input:

    rows     r[p, u] = sum_t d_t^2        [out]
    columns  c[p, u] = sum_t x_t^2        [in]

    K = sum_{p, u} r[p, u] c[p, u]^T      [out, in], the factored Fisher

They are kept apart for each probe and site, since a sum of outer products is not the outer product of sums. An
embedding's x_t is one-hot, so its row side counts tokens and its column side sums d_t^2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradprobe_hf.model.targets import Region, Target
from gradprobe_hf.runtime.processes import Processes


@dataclass
class SiteMarginals:
    """The two sides of one site in one probe; 0.0 where nothing was added, or a side is not measured."""

    rows: Tensor | float = 0.0
    columns: Tensor | float = 0.0


class Marginals:
    """The marginals of one matrix, whole even where the matrix is sharded: they are vectors.

    Args:
        target: the matrix.
        dtype: of the sums, float32 or float64.
        device: where the matrix is computed with.
    """

    def __init__(self, target: Target, dtype: torch.dtype, device: torch.device) -> None:
        self._target, self._dtype, self._device = target, dtype, device
        self.of: dict[tuple[int, int], SiteMarginals] = {}  # (probe, site) -> sums

    def add(self, probe: int, site: int, rows: Tensor | float, columns: Tensor | float) -> None:
        sums = self.of.setdefault((probe, site), SiteMarginals())
        sums.rows = sums.rows + rows
        sums.columns = sums.columns + columns

    def reduce(self, processes: Processes, probe: int) -> None:
        """Sum one probe's marginals over all processes. A collective for each site."""
        # Every process has to join every collective, also for a site that only others have seen (an expert).
        for index in range(len(self._target.sites)):
            sums = self.of.setdefault((probe, index), SiteMarginals())
            sides = []
            for side, size in zip((sums.rows, sums.columns), self._target.shape, strict=True):
                empty = torch.zeros(size, dtype=self._dtype, device=self._device)
                sides.append(side if isinstance(side, Tensor) else empty)
            both = processes.sum_(torch.cat(sides))
            sums.rows, sums.columns = both.split(list(self._target.shape))

    def factored(self, region: Region) -> Tensor:
        """K of a region, `[rows, columns]`, as one product of two thin matrices."""
        # One rank for each probe and site: stacked, their sum of outer products is a single product.
        rows = [torch.as_tensor(sums.rows)[region.rows] for sums in self.of.values()]
        columns = [torch.as_tensor(sums.columns)[region.columns] for sums in self.of.values()]
        return torch.stack(rows, dim=1) @ torch.stack(columns, dim=0)

    def input_sq(self, region: Region) -> Tensor:
        """`sum_t x_t^2` in probe 0, broadcastable to the region: only probe 0 sees the model as it is."""
        return sum(  # type: ignore[return-value]  # never empty: asked for matrices that were reached
            torch.as_tensor(sums.rows)[region.rows, None]
            if self._target.sites[site].kind == "embedding"
            else torch.as_tensor(sums.columns)[None, region.columns]
            for (probe, site), sums in self.of.items()
            if probe == 0
        )

    def state(self) -> Iterator[tuple[str, Tensor]]:
        for (probe, site), sums in self.of.items():
            for side, value in (("rows", sums.rows), ("columns", sums.columns)):
                yield f"marginals.{probe}.{site}.{side}", torch.as_tensor(value, dtype=self._dtype)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace everything by the `marginals.*` of a saved state."""
        self.of.clear()
        for name, value in tensors.items():
            if name.startswith("marginals."):
                _, probe, site, side = name.split(".")
                sums = self.of.setdefault((int(probe), int(site)), SiteMarginals())
                # A side that was never measured was saved as a scalar 0.
                setattr(sums, side, value.to(self._device, copy=True) if value.ndim else float(value))
