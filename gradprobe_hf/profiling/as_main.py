"""A script, run in this process as Python runs it."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class Observed(BaseException):
    """All steps were seen. No Exception: scripts catch these."""


def run_as_main(path: str, arguments: Sequence[str]) -> None:
    """Run a script until it ends, or until something raises `Observed` in it."""
    with as_main(path, arguments):
        try:
            runpy.run_path(path, run_name="__main__")
        except Observed:
            pass
        except SystemExit as end:
            if end.code:
                raise


@contextmanager
def as_main(path: str, arguments: Sequence[str]) -> Iterator[None]:
    """What a script finds when it is run by itself: its arguments, and its folder first among those of modules."""
    before = sys.argv, sys.path[:]
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before[0], before[1]
