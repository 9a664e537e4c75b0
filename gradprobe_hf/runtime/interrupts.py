"""Interrupts: a KeyboardInterrupt waits until weights are restored, and SIGTERM raises one too."""

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


@contextmanager
def ended_as_interrupted() -> Iterator[None]:
    """SIGTERM, as a scheduler or `kill` sends it, is a Ctrl-C in the body: what was half done is taken back.

    Where the program has a handler of its own, that stays; and where SIGINT is ignored, as in the background of a
    shell, SIGTERM ends the process as ever.
    """
    usual = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or any(signal.getsignal(number) is not handler for number, handler in usual.items()):
        yield
        return
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
