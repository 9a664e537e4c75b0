"""Products by a device's units for bfloat16, which are several times as fast as those for float32.

`mm` of two bfloat16 matrices adds in float32 and rounds the result to bfloat16. Where the operands are of bfloat16 and
their sums are wanted in float32, they are widened, and `widened_from` lets the units multiply them nonetheless. Where
three digits are enough, `RoundedMatrix` rounds operands of float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def widened_from(inputs: Tensor) -> Iterator[None]:
    """In the body of the `with`, float32 products on the CPU are of operands that were widened from `inputs.dtype`.

    oneDNN may then round operands to bfloat16, which changes no number that was widened from it; it adds, and hands
    back, in float32. Where the CPU has no such units, or torch no such setting (before 2.9), nothing changes.
    """
    settings = getattr(torch.backends.mkldnn, "matmul", None)
    if settings is None or inputs.device.type != "cpu" or inputs.dtype != torch.bfloat16:
        yield
        return
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        # Read, a setting is what holds; written, it no longer follows the general one. "none" hands that on again.
        settings.fp32_precision = "none"
        if settings.fp32_precision != before:
            settings.fp32_precision = before


class RoundedMatrix:
    """A matrix to multiply others with, to the digits of bfloat16 where the device has units for it; exactly elsewhere.

    For products of what an iteration still corrects: their errors are a fraction of the correction. Only float32 is
    rounded: who works in float64 wants its digits.
    """

    def __init__(self, matrix: Tensor) -> None:
        self._factor = matrix.bfloat16() if matrix.dtype == torch.float32 and has_units(matrix.device) else matrix

    def after(self, left: Tensor) -> Tensor:
        """`left @ matrix`, of the dtype of `left`."""
        return (left.to(self._factor.dtype) @ self._factor).to(left.dtype)


def has_units(device: torch.device) -> bool:
    """Whether a device multiplies bfloat16 by units of its own, rather than by widening it."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
