"""Seconds per stage."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


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
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start
