"""Hessians: what reconstruction collects of the inputs of one block's matrices.

`H = sum_t x_t x_t^T`, `[in, in]`, over the tokens that are no padding; and, where the dense model runs beside,
`D = sum_t (x'_t - x_t) x_t^T` with x' its inputs for the same tokens. float32 (float64 for a float64 model).

What is summed in place of D is `C = sum_t x'_t x_t^T`: its factors are as they came, in bfloat16 maybe, and `D = C - H`
has the rounding of H, which D is added to wherever it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gradprobe_hf.model.families import is_compared_by_token
from gradprobe_hf.model.loss import Batch
from gradprobe_hf.model.parameters import execution_device
from gradprobe_hf.model.sites import Site
from gradprobe_hf.model.targets import Target
from gradprobe_hf.probe.padding import BatchLayout
from gradprobe_hf.runtime.half_products import widened_from
from gradprobe_hf.runtime.processes import Processes

WIDE = 512  # inputs, from which on H is symmetric to the benefit of its product


class BlockHessians:
    """H and D of each matrix of a block.

    Args:
        has_drift: whether the dense model runs beside: each batch first there (`as_dense`), then here.
    """

    def __init__(self, model: PreTrainedModel, processes: Processes, has_drift: bool) -> None:
        self.counts = True  # whether the batch does
        self.held_rows: Tensor | None = None  # the rows of the batch that the damping is chosen by, bool
        self._held: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})  # of these H and C, once more
        self._layout = BatchLayout(sequences=0, tokens=0)
        self._model, self._processes, self._has_drift = model, processes, has_drift
        self._hessians: dict[str, Tensor] = {}
        self._crosses: dict[str, Tensor] = {}  # C
        self._dense: dict[str, list[Tensor]] = {}  # of one batch, in the order in which they are used
        self._is_dense = False
        # Queries, keys and values are given one and the same tensor: what was made of the last one is kept.
        self._last_dense: tuple[Tensor, Tensor] | None = None
        self._last: tuple[Tensor, list[_Sums]] | None = None

    def start_batch(self, batch: Batch) -> None:
        self._layout = BatchLayout.of(batch, self._model)

    @contextmanager
    def as_dense(self) -> Iterator[None]:
        """What is added in the body are the dense model's inputs, of the batch that is added after it."""
        self._dense.clear()
        self._is_dense = True
        try:
            yield
        finally:
            self._is_dense, self._last_dense, self._last = False, None, None

    def add(self, target: Target, site: Site, inputs: Tensor) -> None:
        if not self.counts:
            return
        if self._is_dense:
            self._add_dense(target, site, inputs)
            return
        others = self._dense.get(target.name)
        other = others.pop(0) if others else None
        known = self._last
        if known is None or known[0] is not inputs or (known[1][0][1] is None) != (other is None):
            self._last = known = inputs, self._products(target, site, inputs, other)
        for (hessians, crosses), (hessian, cross) in zip(
            ((self._hessians, self._crosses), self._held), known[1], strict=False
        ):
            _add(hessians, target.name, hessian)
            if cross is not None:
                _add(crosses, target.name, cross)

    def _products(self, target: Target, site: Site, inputs: Tensor, other: Tensor | None) -> list[_Sums]:
        """What a batch adds to H and C; and, if some of its rows are held out, what these add."""
        x = self._layout.unpadded_inputs(target, site, inputs)
        found = [_products(x, other)]
        if self.held_rows is not None:
            held = self._layout.tokens_of(self.held_rows, target, site, inputs)
            found.append(_products(x[held], None if other is None else other[held]))
        return found

    def _add_dense(self, target: Target, site: Site, inputs: Tensor) -> None:
        if not self._is_compared(target):
            return
        if self._last_dense is None or self._last_dense[0] is not inputs:
            self._last_dense = inputs, self._layout.unpadded_inputs(target, site, inputs)
        self._dense.setdefault(target.name, []).append(self._last_dense[1])

    def of(self, target: Target) -> tuple[Tensor, Tensor | None]:
        """H and D over the tokens of all processes. Collectives."""
        self._last = None
        self._dense.clear()
        hessian = mirrored_(self._sum(self._hessians, target))
        if not torch.isfinite(hessian).all():
            raise ValueError(
                f"the inputs of {target.name} are not finite: look for NaN in the weights before it, or a dtype that "
                "overflows (float16: try bfloat16). Nothing was changed."
            )
        return hessian, self._drift(self._crosses, target, hessian)

    def held_out(self, target: Target) -> tuple[Tensor, Tensor | None]:
        """What of these is of the rows that are held out. Collectives."""
        hessians, crosses = self._held
        hessian = mirrored_(self._sum(hessians, target))
        return hessian, self._drift(crosses, target, hessian)

    def _drift(self, crosses: dict[str, Tensor], target: Target, hessian: Tensor) -> Tensor | None:
        """D. Collectives."""
        return self._sum(crosses, target).sub_(hessian) if self._is_compared(target) else None

    def _is_compared(self, target: Target) -> bool:
        return self._has_drift and is_compared_by_token(target.name)

    def _sum(self, sums: dict[str, Tensor], target: Target) -> Tensor:
        found = sums.pop(target.name, None)
        if found is None:  # an expert that was sent nothing here, or a process without such a row
            dtype = torch.promote_types(self._model.dtype, torch.float32)
            device = execution_device(self._model, target.parameter)
            found = torch.zeros(target.shape[1], target.shape[1], dtype=dtype, device=device)
        return self._processes.sum_(found)


_Sums = tuple[Tensor, Tensor | None]  # H and C; no C where the dense model does not run beside


def _products(x: Tensor, other: Tensor | None) -> _Sums:
    """Of some tokens. Args: `x`, `other`: inputs of the model and of the dense one, `[tokens, in]`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    with widened_from(x):
        x = x.to(wide)
        return lower_gram(x), None if other is None else other.to(wide).t() @ x


def lower_gram(x: Tensor) -> Tensor:
    """`x^T x`, `[in, in]`, of `[tokens, in]`; of wide inputs only the panels on and below the diagonal."""
    width = _panel(x.shape[1])
    if width == x.shape[1]:
        return x.t() @ x
    found = x.new_empty(x.shape[1], x.shape[1])
    for start in range(0, x.shape[1], width):
        stop = start + width
        torch.mm(x[:, start:stop].t(), x[:, :stop], out=found[start:stop, :stop])
        found[start:stop, stop:] = 0
    return found


def mirrored_(gram: Tensor) -> Tensor:
    """The whole of a sum of `lower_gram`, in place."""
    width = _panel(len(gram))
    for stop in range(width, len(gram), width):
        gram[stop - width : stop, stop:] = gram[stop:, stop - width : stop].t()
    return gram


def _panel(width: int) -> int:
    """Of how many inputs: four panels leave out three eighths of the products. A narrow H is one."""
    return width if width < WIDE else -(-width // 4)


def _add(sums: dict[str, Tensor], name: str, more: Tensor) -> None:
    if name in sums:
        sums[name] += more
    else:
        sums[name] = more.clone()  # `more` is that of several matrices, and the processes sum in place
