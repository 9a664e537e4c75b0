"""Random: the baseline every other score has to beat."""

import zlib

import torch
from torch import Tensor


def random_score(shape: tuple[int, int], name: str, seed: int) -> Tensor:
    """Uniform in [0, 1), `[out, in]`: a function of the matrix's name and the seed alone, so it can be drawn again."""
    # One 32-bit hash of both: the generator looks at no more than 32 bits of its seed.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.rand(shape, generator=generator)
