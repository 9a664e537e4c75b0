"""Accumulators: non-negative sums `[out, in]` that are added to chunk by chunk, in full or in reduced precision.

In bytes per weight:

    float32     4      (8 in float64, for a float64 model)
    bfloat16    2      the upper half of a float32
    int8        1.03   block-scaled, logarithmic: see below

`int8` keeps a value as an unsigned float of 4 exponent and 4 mantissa bits: 16 levels an octave, so each is 3 to 6%
above the one below, over the 16 octaves below the largest of its block; what lies further below is zero. A block is 64
consecutive outputs of one input, for inputs differ from each other by far more than outputs do; its scale is one int16.
The levels of all blocks are on one grid (float32 cut to 4 mantissa bits), so a block whose scale grows is shifted, not
rounded again.

Both reduced kinds round stochastically: up with the probability that makes the expected value exact. Rounding to the
nearest would stop adding as soon as one sequence's share falls below half a level: with bfloat16 after 256 sequences of
equal size, with int8 after 16. The randomness is read from a table, at a place that depends on the matrix rows and the
number of the update, and is not a generator's state: the same run gives the same bits, resumed or not.

Sources: block-scaled minifloats as in OCP Microscaling Formats (MX) 1.0, section 5; stochastic rounding for sums as in
Gupta et al. 2015 (arXiv:1502.02551), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from gradprobe_hf.config import AccumulatorDtype
from gradprobe_hf.probe.accumulator_storage import BLOCK, FileStore, MemoryStore, PageCacheTrail, PartSpecs, RowStore
from gradprobe_hf.runtime.row_chunks import CACHED_ELEMENTS, row_chunks

_BFLOAT16_BITS = 16  # of a float32 that bfloat16 does not keep
_INT8_BITS = 19  # that 4 mantissa bits do not keep
_CODES = 255
_ODD = 2654435769  # 2^32 / golden ratio, as in Knuth's multiplicative hash (TAOCP 3, section 6.4)
_OTHER_ODD = 2246822507
NOISE = 2**18  # values of the table that one place reads

BYTES_PER_WEIGHT: dict[AccumulatorDtype, float] = {"float32": 4, "bfloat16": 2, "int8": 1 + 2 / BLOCK}


class Accumulator:
    """One non-negative matrix `[out, in]` that starts at zero.

    Args:
        shape: (out, in).
        kind: the precision it is kept in.
        dtype: what it is read and added to in, float32 or float64.
        device: where it is kept, when not in files.
        files: what the names of its files begin with, when it is kept in files.
        trail: of these, see `PageCacheTrail`.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        kind: AccumulatorDtype,
        dtype: torch.dtype,
        device: torch.device,
        files: Path | None = None,
        trail: PageCacheTrail | None = None,
    ) -> None:
        self.shape, self.kind, self.dtype = shape, kind, dtype
        self._layout = _layout(shape, kind, dtype)
        self._store: RowStore = (
            MemoryStore(self._layout, device) if files is None else FileStore(self._layout, files, trail)
        )
        self._begun = 0  # rows from here on are zero still, and need not be read
        self.updates = 0

    @property
    def nbytes(self) -> int:
        return sum(torch.Size(size).numel() * kept.itemsize for size, kept in self._layout.values())

    def parts(self) -> dict[str, Tensor]:
        """What the matrix is kept in: in memory the tensors themselves, of files a copy."""
        return self._store.load(slice(0, self.shape[0]))

    def restore(self, parts: Mapping[str, Tensor]) -> None:
        self._begun = self.shape[0]
        self._store.keep(slice(0, self.shape[0]), parts)

    def clear(self) -> None:
        self._begun = 0
        self._store.clear()

    def read(self, rows: slice = slice(None)) -> Tensor:
        """Rows of the sum, in `dtype`; not to be written to."""
        first, last, _ = rows.indices(self.shape[0])
        return self._decode(self._store.load(slice(first, last)))

    @contextmanager
    def updating(self, rows: slice, device: torch.device) -> Iterator[Tensor]:
        """Rows of the sum on `device`, to be changed in place by the body; rounded and kept after it."""
        first, last, _ = rows.indices(self.shape[0])
        untouched, self._begun = first >= self._begun, max(self._begun, last)
        if self.kind == "float32" and isinstance(self._store, MemoryStore):
            kept = self._store.parts["values"]
            if kept.device == device:
                yield kept[rows]
                return
        values = torch.empty(last - first, self.shape[1], dtype=self.dtype, device=device)
        # Of few rows: the temporaries of rounding then stay in the cache.
        portions = [
            (some, slice(first + some.start, first + some.stop)) for some in row_chunks(values.shape, CACHED_ELEMENTS)
        ]
        for some, place in portions:
            if untouched:
                values[some].zero_()
            else:
                self._decode({n: part.to(device) for n, part in self._store.load(place).items()}, out=values[some])
        yield values
        self.updates += 1
        for some, place in portions:
            self._store.keep(place, self._encode(values[some], self.updates * 7919 + place.start * self.shape[1]))

    def _decode(self, parts: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
        if self.kind != "int8":
            return parts["values"].to(self.dtype) if out is None else out.copy_(parts["values"])
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


def round_bfloat16(values: Tensor, salt: int = 0) -> Tensor:
    """Non-negative float32 to bfloat16, stochastically. `values` are overwritten."""
    bits = _add_noise(values.view(torch.int32), salt, _BFLOAT16_BITS)
    return bits.bitwise_right_shift_(_BFLOAT16_BITS).to(torch.int16).view(torch.bfloat16)


def encode_int8(values: Tensor, salt: int = 0) -> tuple[Tensor, Tensor]:
    """Non-negative float32 `[rows, columns]` to codes uint8 `[rows, columns]` and bases int16 `[blocks, columns]`.

    `values` are overwritten.
    """
    levels = _add_noise(values.view(torch.int32), salt, _INT8_BITS).bitwise_right_shift_(_INT8_BITS)
    bases = levels.new_empty(-(-len(levels) // BLOCK), levels.shape[1])
    for block, base in _in_blocks(levels, bases):
        base.copy_(block.amax(1)).sub_(_CODES).clamp_min_(0)
        block.sub_(base[:, None])
    return levels.clamp_min_(0).to(torch.uint8), bases.to(torch.int16)


def decode_int8(codes: Tensor, bases: Tensor, out: Tensor | None = None) -> Tensor:
    """The float32 values `[rows, columns]` of codes `[rows, columns]` and bases `[blocks, columns]`."""
    out = torch.empty(codes.shape, dtype=torch.float32, device=codes.device) if out is None else out
    levels = out.view(torch.int32).copy_(codes)
    positive = levels.neg().bitwise_right_shift_(31)  # all bits of a code above 0, none of 0: faster than masked_fill
    for block, base in _in_blocks(levels, bases):
        block.add_(base[:, None])
    levels.bitwise_and_(positive).bitwise_left_shift_(_INT8_BITS)
    return out


def _in_blocks(rows: Tensor, bases: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views `[blocks, BLOCK, columns]` of rows with their bases `[blocks, columns]`; the last block may be smaller."""
    whole = len(rows) // BLOCK
    if whole:
        yield rows[: whole * BLOCK].view(whole, BLOCK, rows.shape[1]), bases[:whole]
    if len(rows) % BLOCK:
        yield rows[whole * BLOCK :][None], bases[whole:]


def _add_noise(bits: Tensor, salt: int, width: int) -> Tensor:
    """Add int32 values uniform in [0, 2^width), in place: consecutive ones of the table, from a place of the salt's."""
    table, flat = _table(width, bits.device), bits.view(-1)
    for number, start in enumerate(range(0, len(flat), NOISE)):
        piece = flat[start : start + NOISE]
        place = (salt + number * _ODD) * _OTHER_ODD % NOISE
        piece.add_(table[place : place + len(piece)])
    return bits


@cache
def _table(width: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1 << width, (2 * NOISE,), generator=generator, dtype=torch.int32).to(device)


def _layout(shape: tuple[int, int], kind: AccumulatorDtype, dtype: torch.dtype) -> PartSpecs:
    if kind == "int8":
        return {"codes": (shape, torch.uint8), "bases": ((-(-shape[0] // BLOCK), shape[1]), torch.int16)}
    return {"values": (shape, torch.bfloat16 if kind == "bfloat16" else dtype)}
