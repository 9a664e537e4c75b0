"""The page cache: accumulator files are dropped from it once a pass has moved on."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


class PageCacheTrail:
    """Drops the pages of files that a pass has left behind.

    The kernel evicts the least recently used pages. For files that are visited in the same order again and again, and
    that do not all fit, this is the worst choice: a page is evicted just before it is read again. On the way it
    displaces the model's own files, which are read just as often. Dropping pages ourselves keeps room for those.
    """

    LENGTH = 3  # matrices behind the current one whose pages may still be cached

    def __init__(self) -> None:
        self._behind: deque[tuple[Path, ...]] = deque()

    def leave(self, paths: tuple[Path, ...]) -> None:
        """Call when the files of one matrix have been read or written to their end."""
        # DONTNEED drops clean pages only; for dirty ones it starts writeback and returns. Hence two calls: the first
        # starts the writing, the second, some matrices later, finds the pages clean.
        drop_pages(paths)
        if paths in self._behind:
            return
        self._behind.append(paths)
        if len(self._behind) > self.LENGTH:
            drop_pages(self._behind.popleft())


def drop_pages(paths: Sequence[Path]) -> None:
    """Drop the clean pages of these files, see posix_fadvise(2). Does nothing on systems without that call."""
    for path in paths if hasattr(os, "posix_fadvise") else ():
        # A probe pair deletes its files when it is done; they may be gone while they are still on the trail.
        with suppress(FileNotFoundError), open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
