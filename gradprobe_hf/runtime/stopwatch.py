"""Seconds per stage."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

logger = logging.getLogger(__name__)

_MALLOC_TRIM: Any = None  # of another C library
with suppress(OSError, AttributeError, TypeError):
    _MALLOC_TRIM = ctypes.CDLL(None).malloc_trim


def return_free_memory() -> None:
    """Give freed memory back to the system: glibc keeps blocks below 32 MB, hundreds of MB after a probe."""
    if _MALLOC_TRIM is not None:
        _MALLOC_TRIM(0)


class Stopwatch:
    """`with stopwatch("probe 0"): ...` adds to `seconds["probe 0"]`, and announces the stage when it begins."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.failed: str | None = None  # the innermost stage that an exception ended

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        logger.info("%s ...", stage)
        start = time.perf_counter()
        try:
            yield
        except BaseException:
            self.failed = self.failed or stage
            raise
        finally:
            return_free_memory()
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start
