"""Accumulators: non-negative sums `[out, in]`, added to a few rows at a time, in full or in reduced precision.

In bytes per weight:

    float32     4      (8 in float64, for a float64 model)
    bfloat16    2      the upper half of a float32
    int8        1.03   block-scaled minifloat, see `reduced_precision.py`

The reduced kinds round stochastically. Rounding to the nearest would stop adding as soon as one sequence's share falls
below half a level: in bfloat16 after 256 sequences of equal size, in int8 after 16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from gradprobe_hf.config.values import AccumulatorDtype
from gradprobe_hf.probe.accumulation.reduced_precision import decode_int8, encode_int8, round_bfloat16
from gradprobe_hf.probe.accumulation.storage import AccumulatorStorage, MemoryStore, PartSpecs
from gradprobe_hf.runtime.row_chunks import CACHED_ELEMENTS, ROWS_IN_A_BLOCK, row_chunks

BYTES_PER_WEIGHT: dict[AccumulatorDtype, float] = {"float32": 4, "bfloat16": 2, "int8": 1 + 2 / ROWS_IN_A_BLOCK}
_SALT_PER_UPDATE = 7919  # a prime, so that rows of successive updates rarely share a salt


class Accumulator:
    """One non-negative matrix `[out, in]` that starts at zero.

    Args:
        shape: (out, in).
        dtype: in which it is read and added to, float32 or float64.
        device: of the matrix it belongs to.
        storage: where it is stored, and in which precision.
        name: the beginning of its file names, if it is stored in files.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        storage: AccumulatorStorage,
        name: str = "",
    ) -> None:
        self.shape, self.kind, self.dtype = shape, storage.dtype, dtype
        self._specs = _part_specs(shape, storage.dtype, dtype)
        self._store = storage.open(self._specs, device, name)
        self._first_untouched = 0  # rows from here on are still zero and need not be read
        self.updates = 0  # part of the noise's salt: processes that agree on it round alike

    @property
    def nbytes(self) -> int:
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self._specs.values())

    def parts(self) -> dict[str, Tensor]:
        """The stored parts: the tensors themselves if they are in memory, copies if they are in files."""
        return self._store.load(slice(0, self.shape[0]))

    def restore(self, parts: Mapping[str, Tensor]) -> None:
        self._first_untouched = self.shape[0]
        self._store.save(slice(0, self.shape[0]), parts)

    def clear(self) -> None:
        self._first_untouched = 0
        self._store.clear()

    def read(self, rows: slice = slice(None)) -> Tensor:
        """Rows of the sum in `dtype`; read-only."""
        first, last, _ = rows.indices(self.shape[0])
        return self._decode(self._store.load(slice(first, last)))

    @contextmanager
    def updating(self, rows: slice, device: torch.device) -> Iterator[Tensor]:
        """Yield rows of the sum on `device`, to be changed in place; they are rounded and stored on exit."""
        first, last, _ = rows.indices(self.shape[0])
        is_zero, self._first_untouched = first >= self._first_untouched, max(self._first_untouched, last)
        if self.kind == "float32" and isinstance(self._store, MemoryStore):
            stored = self._store.parts["values"]
            if stored.device == device:
                yield stored[rows]  # a view: nothing to decode, round or write back
                return
        values = torch.empty(last - first, self.shape[1], dtype=self.dtype, device=device)
        # A few rows at a time, so that the temporaries of decoding and rounding stay in the cache.
        portions = [
            (part, slice(first + part.start, first + part.stop)) for part in row_chunks(values.shape, CACHED_ELEMENTS)
        ]
        for part, stored_rows in portions:
            if is_zero:
                values[part].zero_()
            else:
                loaded = {name: kept.to(device) for name, kept in self._store.load(stored_rows).items()}
                self._decode(loaded, out=values[part])
        yield values
        # Behind the yield: after an exception in the block the stored rows are as they were.
        self.updates += 1
        for part, stored_rows in portions:
            salt = self.updates * _SALT_PER_UPDATE + stored_rows.start * self.shape[1]
            self._store.save(stored_rows, self._encode(values[part], salt))

    def _decode(self, parts: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
        if self.kind != "int8":
            return parts["values"].to(self.dtype) if out is None else out.copy_(parts["values"])
        # Decoding works on the bits of a float32, so a float64 sum takes a detour.
        if out is None or out.dtype != torch.float32:
            values = decode_int8(parts["codes"], parts["bases"]).to(self.dtype)
            return values if out is None else out.copy_(values)
        return decode_int8(parts["codes"], parts["bases"], out)

    def _encode(self, values: Tensor, salt: int) -> dict[str, Tensor]:
        if self.kind == "float32":
            return {"values": values}
        if self.kind == "bfloat16":
            return {"values": round_bfloat16(values.float(), salt)}
        codes, bases = encode_int8(values.float(), salt)
        return {"codes": codes, "bases": bases}


def _part_specs(shape: tuple[int, int], kind: AccumulatorDtype, dtype: torch.dtype) -> PartSpecs:
    if kind == "int8":
        return {"codes": (shape, torch.uint8), "bases": ((-(-shape[0] // ROWS_IN_A_BLOCK), shape[1]), torch.int16)}
    return {"values": (shape, torch.bfloat16 if kind == "bfloat16" else dtype)}
