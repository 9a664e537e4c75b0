"""A script, run in this process as Python runs it."""

from __future__ import annotations

import logging
import os
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
    """What a script finds when it is run by itself: its arguments, its folder first among those of modules, no logs.

    Relative paths mean afterwards what they meant before, whatever folder the script has gone to.
    """
    before, folder = (sys.argv, sys.path[:]), os.getcwd()
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        with _logging_unset():
            yield
    finally:
        sys.argv, sys.path[:] = before[0], before[1]
        os.chdir(folder)


@contextmanager
def _logging_unset() -> Iterator[None]:
    """In the body of the `with` logging is as Python begins: `basicConfig` does nothing where there are handlers."""
    root, own = logging.getLogger(), logging.getLogger("gradprobe_hf")
    before = root.handlers[:], root.level, own.level
    root.handlers[:] = []
    root.setLevel(logging.WARNING)
    own.setLevel(logging.NOTSET)
    try:
        yield
    finally:
        root.handlers[:] = before[0]
        root.setLevel(before[1])
        own.setLevel(before[2])
