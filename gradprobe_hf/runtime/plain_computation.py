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
