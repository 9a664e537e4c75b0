"""Keys: scores as integers of the same order, a few rows of a matrix at a time.

    key = 0                      for a weight that is zero already: it counts towards the budget, and goes first
    key = bits(score) + 1        otherwise, `int32 [rows, in]`

The bits of a non-negative float32, read as an integer, are ordered like its value: the exponent is in the high bits,
the mantissa below it. Integers fall into the bins of a radix select (`cut.py`) by a shift. An infinite score is `LAST`
and pruned only if nothing else is left; the bits of NaN lie above it, and those of a negative score below 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from gradprobe_hf.model.parameters import execution_device
from gradprobe_hf.model.targets import Region, Target
from gradprobe_hf.runtime.row_chunks import row_chunks

Keys = Callable[[Target], Iterable[Tensor]]  # a matrix's keys, as consecutive chunks of rows

INFINITY_BITS = 0x7F80_0000  # exponent all ones, mantissa zero
LAST = INFINITY_BITS + 1  # the key of an infinite score


def keys_of(model: nn.Module, score: Callable[[Target, Tensor, Region], Tensor]) -> Keys:
    """A stream of keys, made anew at each call: keys of a whole model would take 4 bytes a weight.

    Args:
        score: called with a target, a part of its weight in float32 (float64 for a float64 model), and which part.
    """

    def keys(target: Target) -> Iterator[Tensor]:
        matrix, region = target.matrix(model), target.region(model)
        if not matrix.numel():  # a shard may be empty
            yield torch.empty(matrix.shape, dtype=torch.int32, device=matrix.device)
            return
        device = execution_device(model, target.parameter)  # where its statistics are, and an offloaded weight is not
        for rows in row_chunks(matrix.shape):
            weight = matrix[rows].to(device, torch.promote_types(matrix.dtype, torch.float32))
            part = Region(slice(region.rows.start + rows.start, region.rows.start + rows.stop), region.columns)
            yield score_keys(score(target, weight, part), weight, target.name)

    return keys


def score_keys(score: Tensor, weight: Tensor, name: str) -> Tensor:
    """Sortable keys, `int32 [out, in]`.

    Raises:
        ValueError: a NaN or negative score; the message names the matrix.

    >>> score_keys(torch.tensor([[0.0, 1.0, 7.0]]), torch.tensor([[0.5, 0.5, 0.0]]), "w")
    tensor([[         1, 1065353217,          0]], dtype=torch.int32)
    """
    bits = (score.float() + 0.0).contiguous().view(torch.int32)  # + 0.0 turns -0.0, whose sign bit is set, into 0.0
    lowest, highest = torch.aminmax(bits)
    if lowest < 0 or highest > INFINITY_BITS:
        raise ValueError(
            f"{name} has scores that are NaN or negative, so its weights cannot be ordered. Look for NaN in its "
            "weights or in the calibration loss (float16 overflows: try dtype=bfloat16), or exclude this matrix."
        )
    return (bits + 1).masked_fill_(weight == 0, 0)


def key_range(keys: Tensor) -> tuple[float, float]:
    """The lowest and highest score behind sortable keys; a weight that was zero already counts as a score of 0."""
    bits = torch.stack(torch.aminmax(keys)).sub(1).clamp_(min=0)  # key 0 has no bits: its score is 0.0
    lowest, highest = bits.view(torch.float32).tolist()
    return lowest, highest
