"""Masks: which weights of each matrix go, one bit per weight.

A mask is bool `[out, in]`, True = pruned. It is kept as packed bits `[out, ceil(in / 8)]`, lowest bit first: 0.125
bytes per weight, where bool takes 1; a 7B model's masks are 0.9 GB instead of 7.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

import numpy as np
import torch
from torch import Tensor


class PackedMasks(Mapping[str, Tensor]):
    """Matrix name -> bool `[out, in]`, unpacked when it is asked for."""

    def __init__(self, masks: Mapping[str, Tensor] | None = None) -> None:
        self._packed: dict[str, Tensor] = {}
        self._columns: dict[str, int] = {}
        for name, mask in (masks or {}).items():
            self.add(name, [mask])

    def add(self, name: str, rows: list[Tensor]) -> None:
        """Keep a mask, given as one tensor `[out, in]` or as consecutive chunks of its rows."""
        self.add_packed(name, torch.cat([pack(part) for part in rows]), rows[0].shape[1])

    def add_packed(self, name: str, packed: Tensor, columns: int) -> None:
        self._packed[name], self._columns[name] = packed, columns

    def __getitem__(self, name: str) -> Tensor:
        return self.rows(name, slice(None))

    def rows(self, name: str, rows: slice) -> Tensor:
        """Some rows of a mask, bool."""
        return unpack(self._packed[name][rows], self._columns[name])

    @classmethod
    def from_packed(cls, packed: Mapping[str, Tensor], columns: Mapping[str, int]) -> PackedMasks:
        """What `all_packed` and `all_columns` were taken of, in the order of `columns`."""
        masks = cls()
        for name, width in columns.items():
            masks.add_packed(name, packed[name], width)
        return masks

    @property
    def all_packed(self) -> dict[str, Tensor]:
        return dict(self._packed)

    @property
    def all_columns(self) -> dict[str, int]:
        return dict(self._columns)

    def packed(self, name: str) -> Tensor:
        return self._packed[name]

    def columns(self, name: str) -> int:
        return self._columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self._packed  # a Mapping's own would unpack the mask

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)


# The bits of every byte `[256, 8]`, and each eight bytes as one number: looking these up is five times as fast as
# `np.unpackbits`.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_EIGHT_BITS = torch.from_numpy(_BITS.view(np.int64).ravel())


class SavedValues:
    """The values under the masks of some matrices, in one tensor for each device and dtype.

    Many small tensors, each made among the large temporaries of `masked_select`, would leave the heap full of holes:
    with SmolLM2 up to a gigabyte.

    Args:
        matrices: name -> the matrix `[out, in]` as it is now.
        masks: of these matrices.
    """

    def __init__(self, matrices: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> None:
        self.matrices, self.masks = matrices, masks
        counts = {name: int(masks[name].sum()) for name in matrices}
        totals: dict[tuple[torch.device, torch.dtype], int] = {}
        for name, matrix in matrices.items():
            kind = (matrix.device, matrix.dtype)
            totals[kind] = totals.get(kind, 0) + counts[name]
        free = {(device, dtype): torch.empty(n, device=device, dtype=dtype) for (device, dtype), n in totals.items()}
        self._values: dict[str, Tensor] = {}
        for name, matrix in matrices.items():
            kind = (matrix.device, matrix.dtype)
            own, free[kind] = free[kind][: counts[name]], free[kind][counts[name] :]
            self._values[name] = own.copy_(matrix.masked_select(masks[name].to(matrix.device)))

    def give_back(self) -> None:
        for name, values in self._values.items():
            matrix = self.matrices[name]
            matrix.masked_scatter_(self.masks[name].to(matrix.device), values)


_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def zero_masked_(matrix: Tensor, mask: Tensor) -> Tensor:
    """Set what is under the mask to 0.0, whatever it is, NaN too; in place.

    On a CPU as an AND of bits: three times as fast as `masked_fill_`, which branches at every element.

    >>> zero_masked_(torch.tensor([[-1.0, 2.0, torch.nan]]), torch.tensor([[True, False, True]]))
    tensor([[0., 2., 0.]])
    """
    if matrix.device.type != "cpu":
        return matrix.masked_fill_(mask, 0)
    integers = _SAME_SIZE[matrix.element_size()]
    kept = mask.view(torch.uint8).to(integers).sub_(1)  # 1 becomes 0, and 0 becomes -1: all bits
    matrix.view(integers).bitwise_and_(kept)
    return matrix


def rows_of(masks: Mapping[str, Tensor], name: str, rows: slice) -> Tensor:
    """Some rows of a mask, whether it is packed or not."""
    return masks.rows(name, rows) if isinstance(masks, PackedMasks) else masks[name][rows]


def multipliers_of(
    masks: Mapping[str, Tensor], name: str, rows: slice, factor: float, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """What shrinks some rows: `factor` where the mask is, 1 elsewhere, `[rows, in]`.

    Of packed bits on a CPU, eight are looked up at a time, in half the time of unpacking and casting them.
    """
    if isinstance(masks, PackedMasks) and device.type == masks.packed(name).device.type == "cpu":
        packed = masks.packed(name)[rows]
        looked_up = _eight_multipliers(factor, dtype).index_select(0, packed.flatten().int())
        return looked_up.view(len(packed), 8 * packed.shape[1])[:, : masks.columns(name)]
    one = torch.ones((), dtype=dtype, device=device)
    return torch.where(rows_of(masks, name, rows).to(device), factor * one, one)


@cache
def _eight_multipliers(factor: float, dtype: torch.dtype) -> Tensor:
    """Those of every byte, `[256, 8]`."""
    bits = torch.from_numpy(_BITS)
    return torch.where(bits.bool(), factor, torch.ones(256, 8, dtype=torch.float64)).to(dtype)


def pack(mask: Tensor) -> Tensor:
    """bool `[rows, columns]` -> uint8 `[rows, ceil(columns / 8)]`.

    >>> pack(torch.tensor([[True, False, True]]))
    tensor([[5]], dtype=torch.uint8)
    """
    if mask.device.type == "cpu":
        return torch.from_numpy(np.packbits(mask.contiguous().numpy(), axis=1, bitorder="little"))
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.shape[1] % 8))
    bits = padded.view(mask.shape[0], padded.shape[1] // 8, 8) << _shifts(mask.device)
    return bits.sum(-1, dtype=torch.uint8)


def unpack(packed: Tensor, columns: int) -> Tensor:
    """uint8 `[rows, ceil(columns / 8)]` -> bool `[rows, columns]`.

    >>> unpack(torch.tensor([[5]], dtype=torch.uint8), 3)
    tensor([[ True, False,  True]])
    """
    if packed.device.type == "cpu":
        looked_up = _EIGHT_BITS.index_select(0, packed.flatten().int()).view(torch.bool)
        return looked_up.view(len(packed), 8 * packed.shape[1])[:, :columns]
    bits = (packed[..., None] >> _shifts(packed.device)) & 1
    return bits.flatten(1)[:, :columns].bool()


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
