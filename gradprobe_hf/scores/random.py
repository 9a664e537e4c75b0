"""Random: the baseline every other score has to beat."""

import zlib

import torch
from torch import Tensor

ROWS = 64  # that are drawn at once


def random_score(rows: slice, columns: int, name: str, seed: int) -> Tensor:
    """Uniform in [0, 1), `[rows, in]`: a function of the matrix, the row and the seed, so it can be drawn again.

    Args:
        rows: which of the matrix, with both ends.
        columns: how many inputs it has.
        name: the matrix's.
    """
    first = rows.start // ROWS
    drawn = [
        # Of a dtype that is named: a caller may have made bfloat16 torch's default, of which 256 values are drawn.
        torch.rand(ROWS, columns, generator=_generator(seed, name, n), dtype=torch.float32)
        for n in range(first, -(-rows.stop // ROWS))
    ]
    return torch.cat(drawn)[rows.start - first * ROWS : rows.stop - first * ROWS]


def _generator(seed: int, name: str, number: int) -> torch.Generator:
    # One 32-bit hash of all: a generator looks at no more than 32 bits of its seed.
    return torch.Generator().manual_seed(zlib.crc32(f"{seed} {name} {number}".encode()))
