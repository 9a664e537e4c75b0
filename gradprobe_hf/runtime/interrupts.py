"""Interrupts: a KeyboardInterrupt waits until weights are restored, and SIGTERM and SIGHUP raise one too."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


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
    """SIGTERM, as a scheduler or `kill` sends it, and SIGHUP, as a terminal that is closed does, are a Ctrl-C in the
    body: what was half done is taken back.

    Where the program has a handler of its own, or nohup ignores SIGHUP, that stays; and where SIGINT is ignored, as in
    the background of a shell, either ends the process as ever.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    named = (getattr(signal, name, None) for name in ("SIGTERM", "SIGHUP"))  # Windows has no SIGHUP
    taken = [one for one in named if one is not None and signal.getsignal(one) is signal.SIG_DFL]

    def interrupt(number: int, _: FrameType | None) -> None:
        # A shell sends SIGHUP and so does the kernel: the second must not interrupt what takes back.
        signal.signal(number, signal.SIG_IGN)
        signal.raise_signal(signal.SIGINT)

    for one in taken:
        signal.signal(one, interrupt)
    try:
        yield
    finally:
        for one in taken:
            signal.signal(one, signal.SIG_DFL)
