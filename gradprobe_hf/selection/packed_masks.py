"""Packed masks: which weights of each matrix are pruned, one bit per weight.

A mask is bool `[out, in]`, True = pruned. It is stored as bits `[out, ceil(in / 8)]`, uint8, lowest bit first: 0.125
bytes per weight where bool takes 1; the masks of a 7B model are 0.9 GB instead of 7.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

import numpy as np
import torch
from torch import Tensor


class PackedMasks(Mapping[str, Tensor]):
    """Target name -> bool `[out, in]`, unpacked at each access: read large matrices by `rows`."""

    def __init__(self, masks: Mapping[str, Tensor] | None = None) -> None:
        self._packed: dict[str, Tensor] = {}
        self._columns: dict[str, int] = {}
        for name, mask in (masks or {}).items():
            self.add(name, [mask])

    def add(self, name: str, rows: list[Tensor]) -> None:
        """Add a mask, given as consecutive chunks of its rows: it never has to be in memory unpacked."""
        self.add_packed(name, torch.cat([pack(part) for part in rows]), rows[0].shape[1])

    def add_packed(self, name: str, packed: Tensor, columns: int) -> None:
        """Add bits `[out, ceil(columns / 8)]` as they are."""
        self._packed[name], self._columns[name] = packed, columns

    def __getitem__(self, name: str) -> Tensor:
        return self.rows(name, slice(None))

    def rows(self, name: str, rows: slice) -> Tensor:
        """Some rows of a mask, bool."""
        return unpack(self._packed[name][rows], self._columns[name])

    @classmethod
    def from_packed(cls, packed: Mapping[str, Tensor], columns: Mapping[str, int]) -> PackedMasks:
        """The inverse of `all_packed` and `all_columns`, in the order of `columns`."""
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

    def replaced_by(self, others: PackedMasks) -> PackedMasks:
        """These and the others, which win where both have a mask."""
        return PackedMasks.from_packed(self._packed | others._packed, self._columns | others._columns)

    def any(self) -> bool:
        """Whether any weight is pruned."""
        return any(bool(packed.any()) for packed in self._packed.values())

    def packed(self, name: str) -> Tensor:
        return self._packed[name]

    def columns(self, name: str) -> int:
        return self._columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self._packed  # Mapping's own calls __getitem__, which would unpack the mask

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)


def rows_of(masks: Mapping[str, Tensor], name: str, rows: slice) -> Tensor:
    """Some rows of a mask, packed or not, bool."""
    return masks.rows(name, rows) if isinstance(masks, PackedMasks) else masks[name][rows]


def multipliers_of(
    masks: Mapping[str, Tensor], name: str, rows: slice, factor: float, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """What to multiply rows of a matrix by: `factor` under the mask, 1 elsewhere, `[rows, in]`."""
    # On a CPU each packed byte is looked up as eight multipliers: half the time of unpacking and casting the bits.
    if isinstance(masks, PackedMasks) and device.type == masks.packed(name).device.type == "cpu":
        packed = masks.packed(name)[rows]
        looked_up = _eight_multipliers(factor, dtype).index_select(0, packed.flatten().int())
        return looked_up.view(len(packed), 8 * packed.shape[1])[:, : masks.columns(name)]
    one = torch.ones((), dtype=dtype, device=device)
    return torch.where(rows_of(masks, name, rows).to(device), factor * one, one)


@cache
def _eight_multipliers(factor: float, dtype: torch.dtype) -> Tensor:
    """The multipliers of every byte, `[256, 8]`."""
    bits = torch.from_numpy(_BITS)
    return torch.where(bits.bool(), factor, torch.ones(256, 8, dtype=torch.float64)).to(dtype)


# The bits of every byte as 0 or 1, `[256, 8]`, and each row of eight as one int64.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_EIGHT_BITS = torch.from_numpy(_BITS.view(np.int64).ravel())


def pack(mask: Tensor) -> Tensor:
    """bool `[rows, columns]` -> uint8 `[rows, ceil(columns / 8)]`.

    >>> pack(torch.tensor([[True, False, True]]))
    tensor([[5]], dtype=torch.uint8)
    """
    if mask.device.type == "cpu":
        return torch.from_numpy(np.packbits(mask.contiguous().numpy(), axis=1, bitorder="little"))
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.shape[1] % 8))
    bits = padded.view(mask.shape[0], padded.shape[1] // 8, 8) << _shifts(mask.device)
    return bits.sum(-1, dtype=torch.uint8)  # the bits of a byte are distinct powers of two: their sum is their OR


def unpack(packed: Tensor, columns: int) -> Tensor:
    """uint8 `[rows, ceil(columns / 8)]` -> bool `[rows, columns]`.

    >>> unpack(torch.tensor([[5]], dtype=torch.uint8), 3)
    tensor([[ True, False,  True]])
    """
    if packed.device.type == "cpu":
        # One int64 gather per byte, whose eight bytes are then read as eight bools: five times as fast as unpackbits.
        looked_up = _EIGHT_BITS.index_select(0, packed.flatten().int()).view(torch.bool)
        return looked_up.view(len(packed), 8 * packed.shape[1])[:, :columns]
    bits = (packed[..., None] >> _shifts(packed.device)) & 1
    return bits.flatten(1)[:, :columns].bool()


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
