"""Hessians: what reconstruction collects of the inputs of one block's matrices.

`H = sum_t x_t x_t^T`, `[in, in]`, over the tokens that are no padding; and, where the dense model runs beside,
`D = sum_t (x'_t - x_t) x_t^T` with x' its inputs for the same tokens. float32 (float64 for a float64 model).

What is summed in place of D is `C = sum_t x'_t x_t^T`: its factors are as they came, in bfloat16 maybe, and `D = C - H`
has the rounding of H, which D is added to wherever it is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from transformers import PreTrainedModel

from gradprobe_hf.model.families import is_compared_by_token
from gradprobe_hf.model.parameters import execution_device, input_device
from gradprobe_hf.model.passes.loss import Batch
from gradprobe_hf.model.sites import Site
from gradprobe_hf.model.targets import Target
from gradprobe_hf.probe.padding import BatchLayout
from gradprobe_hf.runtime.half_products import widened_from
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.updates.problem import InputSums

WIDE = 512  # inputs, from which on H is symmetric to the benefit of its product


class BlockHessians:
    """H and D of each matrix of a block.

    Batch by batch: `with batch(...)`, and inside of that a pass of the model which calls `add` with every input. Where
    the dense model runs beside, its pass is first, `with dense_pass()`.

    Args:
        has_drift: whether the dense model runs beside.
    """

    def __init__(self, model: PreTrainedModel, processes: Processes, has_drift: bool) -> None:
        self._model, self._processes, self._has_drift = model, processes, has_drift
        self._all, self._held_out = _Sums(), _Sums()
        self._batch: _OpenBatch | None = None

    @contextmanager
    def batch(self, batch: Batch, *, counts: bool = True, held_rows: Tensor | None = None) -> Iterator[None]:
        """What is added in the body are inputs of this batch.

        Args:
            counts: False for a batch that only keeps other processes company: nothing of it is added.
            held_rows: those that the damping is chosen by, bool `[rows]`; None: none of them.
        """
        batch = send_to_device(batch, input_device(self._model))
        self._batch = _OpenBatch(BatchLayout.of(batch, self._model), counts, held_rows)
        try:
            yield
        finally:
            self._batch = None

    @contextmanager
    def dense_pass(self) -> Iterator[None]:
        """What is added in the body are the dense model's inputs, of the batch that is open."""
        batch = self._open_batch()
        batch.dense.clear()
        batch.is_dense = True
        try:
            yield
        finally:
            batch.is_dense, batch.latest_dense = False, None

    def add(self, target: Target, site: Site, inputs: Tensor) -> None:
        batch = self._open_batch()
        if not batch.counts:
            return
        if batch.is_dense:
            if self._is_compared(target):
                batch.keep_dense(target, site, inputs)
            return
        whole, held = batch.products(target, site, inputs)
        self._all.add(target.name, whole)
        if held is not None:
            self._held_out.add(target.name, held)

    def of(self, target: Target) -> InputSums:
        """H and D over the tokens of all processes; they are given away, so ask once. Collectives.

        Raises:
            ValueError: inputs that are not finite, or whose squares do not add up to a number.
        """
        sums = self._taken(self._all, target)
        # The mean as well: damping adds a part of it, and would be raised for ever where it overflows.
        if not (torch.isfinite(sums.hessian).all() and torch.isfinite(sums.hessian.diagonal().mean())):
            raise ValueError(
                f"the inputs of {target.name} are not finite: look for NaN in the weights before it, or a dtype that "
                "overflows (float16: try bfloat16). Nothing was changed."
            )
        return sums

    def held_out(self, target: Target) -> InputSums:
        """What of these is of the rows that are held out. Collectives."""
        return self._taken(self._held_out, target)

    def _open_batch(self) -> _OpenBatch:
        assert self._batch is not None, "inputs are those of a batch"
        return self._batch

    def _taken(self, sums: _Sums, target: Target) -> InputSums:
        """H and D of these sums, over all processes. Collectives."""
        hessian = mirrored_(self._reduced(sums.hessians, target))
        tokens = sum(self._processes.gather(sums.tokens[target.name]))
        if not self._is_compared(target):
            return InputSums(hessian, None, tokens)
        return InputSums(hessian, self._reduced(sums.crosses, target).sub_(hessian), tokens)

    def _is_compared(self, target: Target) -> bool:
        return self._has_drift and is_compared_by_token(target.name)

    def _reduced(self, sums: dict[str, Tensor], target: Target) -> Tensor:
        """A sum of one matrix over all processes, no longer kept here. A collective."""
        found = sums.pop(target.name, None)
        if found is None:  # an expert that was sent nothing here, or a process without such a row
            dtype = torch.promote_types(self._model.dtype, torch.float32)
            device = execution_device(self._model, target.parameter)
            found = torch.zeros(target.shape[1], target.shape[1], dtype=dtype, device=device)
        return self._processes.sum_(found)


@dataclass(frozen=True)
class _Products:
    """What so many tokens add: `hessian` to H, its panels of `lower_gram` alone; `cross` to C, None without a dense
    model beside."""

    tokens: int
    hessian: Tensor
    cross: Tensor | None

    @classmethod
    def of(cls, x: Tensor, dense: Tensor | None) -> _Products:
        """Args: `x`, `dense`: inputs of the model and of the dense one, `[tokens, in]`."""
        wide = torch.promote_types(x.dtype, torch.float32)
        with widened_from(x):
            x = x.to(wide)
            return cls(len(x), lower_gram(x), None if dense is None else dense.to(wide).t() @ x)


class _Sums:
    """H and C of each matrix and its tokens' number, by name, as far as they have come."""

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()
        self.hessians: dict[str, Tensor] = {}
        self.crosses: dict[str, Tensor] = {}

    def add(self, name: str, more: _Products) -> None:
        self.tokens[name] += more.tokens
        _add(self.hessians, name, more.hessian)
        if more.cross is not None:
            _add(self.crosses, name, more.cross)


class _OpenBatch:
    """One batch while passes run on it.

    Queries, keys and values are given one and the same tensor, one after the other: what was made of the latest is kept
    for the next.

    Attributes:
        dense: the dense model's inputs of each matrix without padding, in the order in which they are used.
        is_dense: whether it is the dense model's pass that runs.
    """

    def __init__(self, layout: BatchLayout, counts: bool, held_rows: Tensor | None) -> None:
        self.counts, self.is_dense = counts, False
        self.dense: dict[str, list[Tensor]] = {}
        self.latest_dense: tuple[Tensor, Tensor] | None = None  # inputs, and these without padding
        self._layout, self._held_rows = layout, held_rows
        self._latest: _Made | None = None

    def keep_dense(self, target: Target, site: Site, inputs: Tensor) -> None:
        if self.latest_dense is None or self.latest_dense[0] is not inputs:
            self.latest_dense = inputs, self._layout.unpadded_inputs(target, site, inputs)
        self.dense.setdefault(target.name, []).append(self.latest_dense[1])

    def products(self, target: Target, site: Site, inputs: Tensor) -> tuple[_Products, _Products | None]:
        """Of all of its tokens; and, if some rows are held out, of theirs."""
        kept = self.dense.get(target.name)
        dense = kept.pop(0) if kept else None
        latest = self._latest
        # An expert has no dense inputs, and may be given the tensor of a matrix that has.
        if latest is None or latest.inputs is not inputs or (latest.whole.cross is None) != (dense is None):
            self._latest = latest = self._made(target, site, inputs, dense)
        return latest.whole, latest.held

    def _made(self, target: Target, site: Site, inputs: Tensor, dense: Tensor | None) -> _Made:
        x, held = self._layout.unpadded_inputs(target, site, inputs), None
        if self._held_rows is not None:
            tokens = self._layout.tokens_of(self._held_rows, target, site, inputs)
            held = _Products.of(x[tokens], None if dense is None else dense[tokens])
        return _Made(inputs, _Products.of(x, dense), held)


@dataclass(frozen=True)
class _Made:
    """Products of `inputs`: of all tokens, and of those that are held out."""

    inputs: Tensor
    whole: _Products
    held: _Products | None


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
