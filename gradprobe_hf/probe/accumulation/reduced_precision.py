"""Reduced precision: non-negative float32 values as bfloat16 or block-scaled int8, rounded stochastically.

All of it is integer arithmetic on the bits of a float32, sign (0 here), 8 bits of exponent, 23 bits of mantissa: read
as an integer they grow with the value, and within an octave linearly with it. Dropping the lowest bits therefore
rounds down to a level of a coarser grid, the same grid for all values; adding noise uniform in [0, 2^dropped) before
rounds up with a probability equal to the distance from the level below, so the expected value is exact. A carry out of
the mantissa arrives at the next exponent, which is the right level.

`int8` keeps 4 mantissa bits: 16 levels an octave, each 3 to 6% above the one below. A level is then an integer of 12
bits; a code is its distance from the base of its block, in 8 bits: 16 octaves below the block's largest value, 0 for
whatever lies further below. A block is `ROWS_IN_A_BLOCK` consecutive outputs of one input, because inputs differ from
each other in scale by far more than outputs do. As levels lie on one grid for all blocks, a block whose base grows is
shifted, not rounded again.

Sources: block-scaled minifloats as in OCP Microscaling Formats (MX) 1.0, section 5; stochastic rounding for sums as in
Gupta et al. 2015 (arXiv:1502.02551), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from gradprobe_hf.runtime.row_chunks import ROWS_IN_A_BLOCK

_BFLOAT16_DROPPED = 16  # of the 23 mantissa bits of a float32; bfloat16 is its upper half
_INT8_DROPPED = 19
_LARGEST_CODE = 255
_WITHOUT_SIGN = 0x7FFF_FFFF
_NOISE = 2**18  # consecutive values of the noise table that one place serves
_ODD = 2654435769  # 2^32 / golden ratio, as in Knuth's multiplicative hash (TAOCP 3, section 6.4)
_OTHER_ODD = 2246822507


def round_bfloat16(values: Tensor, salt: int = 0) -> Tensor:
    """Non-negative float32 -> bfloat16, rounded stochastically. Overwrites `values`."""
    bits = _add_noise(values.view(torch.int32), salt, _BFLOAT16_DROPPED)
    return bits.bitwise_right_shift_(_BFLOAT16_DROPPED).to(torch.int16).view(torch.bfloat16)


def encode_int8(values: Tensor, salt: int = 0) -> tuple[Tensor, Tensor]:
    """Non-negative float32 `[rows, columns]` -> codes uint8 `[rows, columns]` and bases int16 `[blocks, columns]`.

    Overwrites `values`. What was decoded is encoded to the same values again, whatever the salt: its dropped bits are
    zero, and noise alone never carries. NaN stays NaN.
    """
    # What x86 makes of inf - inf is a NaN whose sign bit is set: a level below all others, which would become 0.
    bits = values.view(torch.int32).bitwise_and_(_WITHOUT_SIGN)
    levels = _add_noise(bits, salt, _INT8_DROPPED).bitwise_right_shift_(_INT8_DROPPED)
    bases = levels.new_empty(-(-len(levels) // ROWS_IN_A_BLOCK), levels.shape[1])
    for block, base in _in_blocks(levels, bases):
        # The block's largest level gets the largest code, unless all of its levels fit into a code as they are.
        base.copy_(block.amax(1)).sub_(_LARGEST_CODE).clamp_min_(0)
        block.sub_(base[:, None])
    return levels.clamp_min_(0).to(torch.uint8), bases.to(torch.int16)


def decode_int8(codes: Tensor, bases: Tensor, out: Tensor | None = None) -> Tensor:
    """The float32 values `[rows, columns]` of codes `[rows, columns]` and bases `[blocks, columns]`."""
    out = torch.empty(codes.shape, dtype=torch.float32, device=codes.device) if out is None else out
    levels = out.view(torch.int32).copy_(codes)  # in the memory of the result: no second tensor of this size
    # Code 0 is the value 0, not the base. The sign bit of -code, shifted through, is all ones for a code above 0 and
    # all zeros for 0: an AND with it is faster than masked_fill, which branches at every element.
    positive = levels.neg().bitwise_right_shift_(31)
    for block, base in _in_blocks(levels, bases):
        block.add_(base[:, None])
    levels.bitwise_and_(positive).bitwise_left_shift_(_INT8_DROPPED)
    return out


def _in_blocks(rows: Tensor, bases: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views `[blocks, block size, columns]` of rows, with their bases `[blocks, columns]`; a smaller last block."""
    whole = len(rows) // ROWS_IN_A_BLOCK
    if whole:
        yield rows[: whole * ROWS_IN_A_BLOCK].view(whole, ROWS_IN_A_BLOCK, rows.shape[1]), bases[:whole]
    if len(rows) % ROWS_IN_A_BLOCK:
        yield rows[whole * ROWS_IN_A_BLOCK :][None], bases[whole:]


def _add_noise(bits: Tensor, salt: int, width: int) -> Tensor:
    """Add int32 values uniform in [0, 2^width), in place.

    They are read from a table, which costs less than drawing them, from a place that is a hash of the salt. There is no
    generator whose state a resumed run would have to restore: the same salt gives the same bits.
    """
    table, flat = _noise_table(width, bits.device), bits.view(-1)
    for number, start in enumerate(range(0, len(flat), _NOISE)):
        piece = flat[start : start + _NOISE]
        place = (salt + number * _ODD) * _OTHER_ODD % _NOISE
        piece.add_(table[place : place + len(piece)])
    return bits


@cache
def _noise_table(width: int, device: torch.device) -> Tensor:
    # Twice as long as a piece, so that a piece can start anywhere in the first half and needs no wrapping round.
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1 << width, (2 * _NOISE,), generator=generator, dtype=torch.int32).to(device)
