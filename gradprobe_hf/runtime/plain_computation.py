"""Plain computation: what a verb computes is the same wherever it is called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def plain_computation() -> Iterator[None]:
    """Outside of the caller's inference mode, in which there are no gradients, and of its autocast, which rounds.

    >>> with torch.inference_mode(), plain_computation():
    ...     torch.is_inference_mode_enabled()
    False
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        for device in {"cpu", "cpu" if accelerator is None else accelerator.type}:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def exact_products() -> Iterator[None]:
    """Products of float32 in float32, whatever the caller has allowed for its own.

    In TF32 H has three digits, and what is solved with it fewer. The setting is one of the whole process, with two
    interfaces, of which torch refuses the older one where the newer one was used.
    """
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:
        products = torch.backends.cuda.matmul
        by_backend, products.fp32_precision = products.fp32_precision, "ieee"
        try:
            yield
        finally:
            products.fp32_precision = by_backend
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
