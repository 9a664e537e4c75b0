"""Products of bfloat16 matrices whose sums are wanted in float32, by a CPU's units for bfloat16.

`mm` of two bfloat16 matrices adds in float32 and rounds the result to bfloat16. Widened to float32 first, they are
multiplied exactly, but without those units, which are two to three times as fast where there is AMX.
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
