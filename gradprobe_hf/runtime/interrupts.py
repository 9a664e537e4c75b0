"""Interrupts: code that restores weights runs to its end before a KeyboardInterrupt is raised."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer SIGINT until the block exits."""
    # Python delivers signals to the main thread alone, and only there can handlers be set. getsignal() returns None for
    # a handler that was not set from Python: it could not be restored.
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    received: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received:
            signal.raise_signal(signal.SIGINT)  # once, however often the key was pressed
