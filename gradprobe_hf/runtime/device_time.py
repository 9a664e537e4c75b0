"""Time on a device that computes beside the program."""

from __future__ import annotations

import time

import torch


def now(device: torch.device | str) -> float:
    """`time.perf_counter()` once the device has come to the end of what it was given: kernels of CUDA are only put in
    a queue by the line that calls them."""
    here = torch.device(device)
    if here.type == "cuda":
        torch.cuda.synchronize(here)
    return time.perf_counter()
