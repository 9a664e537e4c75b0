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

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from gradprobe_hf.config import AccumulatorDtype
from gradprobe_hf.weights import CACHED_ELEMENTS, ROWS_IN_A_BLOCK, row_chunks

BLOCK = ROWS_IN_A_BLOCK
_BFLOAT16_BITS = 16  # of a float32 that bfloat16 does not keep
_INT8_BITS = 19  # that 4 mantissa bits do not keep
_CODES = 255
_ODD = 2654435769  # 2^32 / golden ratio, as in Knuth's multiplicative hash (TAOCP 3, section 6.4)
_OTHER_ODD = 2246822507
NOISE = 2**18  # values of the table that one place reads

Layout = dict[str, tuple[tuple[int, int], torch.dtype]]  # of each part, its shape and what it is kept in
BYTES_PER_WEIGHT: dict[AccumulatorDtype, float] = {"float32": 4, "bfloat16": 2, "int8": 1 + 2 / BLOCK}


class Accumulator:
    """One non-negative matrix `[out, in]` that starts at zero.

    Args:
        shape: (out, in).
        kind: the precision it is kept in.
        dtype: what it is read and added to in, float32 or float64.
        device: where it is kept, when not in files.
        files: a path; the parts of the matrix are kept in files of this name, read and written row by row. (Adding to
            them through a mapping took longer: the first touch of each page is an interruption.)
    """

    def __init__(
        self,
        shape: tuple[int, int],
        kind: AccumulatorDtype,
        dtype: torch.dtype,
        device: torch.device,
        files: Path | None = None,
    ) -> None:
        self.shape, self.kind, self.dtype, self.device = shape, kind, dtype, device
        self._files = files
        self._layout = _layout(shape, kind, dtype)
        self._parts: dict[str, Tensor] | None = None
        self._begun = 0  # rows from here on are zero still, and need not be read
        self.updates = 0
        if files is None:
            self._parts = {
                name: torch.zeros(size, dtype=kept, device=device) for name, (size, kept) in self._layout.items()
            }
        else:
            for name, (size, kept) in self._layout.items():
                _reserve(self._file(name), torch.Size(size).numel() * kept.itemsize)

    @property
    def nbytes(self) -> int:
        return sum(torch.Size(size).numel() * kept.itemsize for size, kept in self._layout.values())

    def parts(self) -> dict[str, Tensor]:
        """The stored tensors themselves; of files, a mapping into memory that ends when it is let go."""
        if self._parts is not None:
            return self._parts
        return {
            name: torch.from_file(str(self._file(name)), shared=True, size=torch.Size(size).numel(), dtype=kept).view(
                size
            )
            for name, (size, kept) in self._layout.items()
        }

    def restore(self, parts: Mapping[str, Tensor]) -> None:
        self._begun = self.shape[0]
        for name, own in self.parts().items():
            own.copy_(parts[name])

    def clear(self) -> None:
        for part in self.parts().values():
            part.zero_()

    def read(self, rows: slice = slice(None)) -> Tensor:
        """Rows of the sum, in `dtype`; not to be written to."""
        return self._decode({name: part[_own_rows(name, rows)] for name, part in self.parts().items()})

    @contextmanager
    def updating(self, rows: slice, device: torch.device) -> Iterator[Tensor]:
        """Rows of the sum on `device`, to be changed in place by the body; rounded and kept after it."""
        first, last, _ = rows.indices(self.shape[0])
        untouched, self._begun = first >= self._begun, max(self._begun, last)
        if self.kind == "float32" and self._parts is not None and self._parts["values"].device == device:
            yield self._parts["values"][rows]
            return
        values = torch.empty(last - first, self.shape[1], dtype=self.dtype, device=device)
        # Of few rows: the temporaries of rounding then stay in the cache.
        portions = [
            (some, slice(first + some.start, first + some.stop)) for some in row_chunks(values.shape, CACHED_ELEMENTS)
        ]
        with self._opened() as stored:
            for some, place in portions:
                if untouched:
                    values[some].zero_()
                else:
                    self._decode({n: part.to(device) for n, part in stored.load(place).items()}, out=values[some])
            yield values
            self.updates += 1
            for some, place in portions:
                stored.keep(place, self._encode(values[some], self.updates * 7919 + place.start * self.shape[1]))

    @contextmanager
    def _opened(self) -> Iterator[_InMemory | _InFiles]:
        if self._parts is not None:
            yield _InMemory(self._parts)
            return
        with ExitStack() as stack:
            files = {name: stack.enter_context(open(self._file(name), "r+b")) for name in self._layout}
            yield _InFiles(files, self._layout)

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

    def _file(self, part: str) -> Path:
        assert self._files is not None
        return self._files.with_name(f"{self._files.name}.{part}")


@dataclass(frozen=True)
class _InMemory:
    """The parts of a matrix, by rows."""

    parts: Mapping[str, Tensor]

    def load(self, rows: slice) -> dict[str, Tensor]:
        return {name: part[_own_rows(name, rows)] for name, part in self.parts.items()}

    def keep(self, rows: slice, parts: Mapping[str, Tensor]) -> None:
        for name, part in parts.items():
            self.parts[name][_own_rows(name, rows)].copy_(part)


@dataclass(frozen=True)
class _InFiles:
    """The parts of a matrix in open files, by rows."""

    files: Mapping[str, BinaryIO]
    layout: Layout

    def load(self, rows: slice) -> dict[str, Tensor]:
        found = {}
        for name, file in self.files.items():
            (_, width), kept = self.layout[name]
            own = _own_rows(name, rows)
            found[name] = torch.empty(own.stop - own.start, width, dtype=kept)
            file.seek(own.start * width * kept.itemsize)
            file.readinto(_bytes_of(found[name]))  # type: ignore[attr-defined]  # typeshed's BinaryIO lacks it
        return found

    def keep(self, rows: slice, parts: Mapping[str, Tensor]) -> None:
        for name, part in parts.items():
            (_, width), kept = self.layout[name]
            self.files[name].seek(_own_rows(name, rows).start * width * kept.itemsize)
            self.files[name].write(_bytes_of(part.to("cpu", kept)))


def _bytes_of(part: Tensor) -> memoryview:
    """Of a contiguous tensor, without a copy."""
    return part.view(torch.uint8).numpy().data


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


def _own_rows(name: str, rows: slice) -> slice:
    """Rows of a matrix as those of one of its parts: bases have one row a block, so that rows begin with a block."""
    if name != "bases" or rows == slice(None):
        return rows
    assert rows.start % BLOCK == 0, "rows are worked on in whole blocks"
    return slice(rows.start // BLOCK, -(-rows.stop // BLOCK))


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


def _layout(shape: tuple[int, int], kind: AccumulatorDtype, dtype: torch.dtype) -> Layout:
    if kind == "int8":
        return {"codes": (shape, torch.uint8), "bases": ((-(-shape[0] // BLOCK), shape[1]), torch.int16)}
    return {"values": (shape, torch.bfloat16 if kind == "bfloat16" else dtype)}


def _reserve(path: Path, nbytes: int) -> None:
    """A file of zeros whose blocks are on the disk: what does not fit is said before the first batch."""
    try:
        with open(path, "wb") as file:
            if hasattr(os, "posix_fallocate") and nbytes:
                os.posix_fallocate(file.fileno(), 0, nbytes)
            else:
                for _ in range(0, nbytes, 2**20):
                    file.write(bytes(2**20))
                file.truncate(nbytes)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise OSError(
            errno.ENOSPC,
            "no room for the accumulators; choose another offload_folder (--offload-folder), accumulator_dtype='int8', "
            "or fisher='factored', which needs none",
            str(path.parent),
        ) from error
