"""Row stores: where the parts of an accumulator are, in memory or in files, loaded and kept some rows at a time.

A matrix is kept in one part or in several: most have a row for each of its rows, `bases` one for every `BLOCK` of them.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Protocol

import torch
from torch import Tensor

from gradprobe_hf.runtime.row_chunks import ROWS_IN_A_BLOCK

BLOCK = ROWS_IN_A_BLOCK
PartSpecs = dict[str, tuple[tuple[int, int], torch.dtype]]  # of each part, its shape and what it is kept in


class RowStore(Protocol):
    """Rows are of the matrix, in whole blocks; a store begins with zeros."""

    def load(self, rows: slice) -> dict[str, Tensor]:
        """Some rows of every part; not to be written to."""

    def keep(self, rows: slice, parts: Mapping[str, Tensor]) -> None:
        """Replace these rows."""

    def clear(self) -> None:
        """All zeros again."""


class MemoryStore:
    """Parts in the memory of a device."""

    def __init__(self, layout: PartSpecs, device: torch.device) -> None:
        self.parts = {name: torch.zeros(shape, dtype=kept, device=device) for name, (shape, kept) in layout.items()}

    def load(self, rows: slice) -> dict[str, Tensor]:
        return {name: part[_own_rows(name, rows)] for name, part in self.parts.items()}

    def keep(self, rows: slice, parts: Mapping[str, Tensor]) -> None:
        for name, part in parts.items():
            self.parts[name][_own_rows(name, rows)].copy_(part)

    def clear(self) -> None:
        for part in self.parts.values():
            part.zero_()


class FileStore:
    """Parts in files of their own, which are read and written. (Mapped into memory they took longer: the first touch of
    each page is an interruption.)

    Args:
        path: what the names of the files begin with.
        trail: of files that the page cache is not to fill with; None: it may.
    """

    def __init__(self, layout: PartSpecs, path: Path, trail: PageCacheTrail | None) -> None:
        self._layout, self._trail = layout, trail
        self._height = max(rows for (rows, _), _ in layout.values())
        self._paths = {name: path.with_name(f"{path.name}.{name}") for name in layout}
        self.clear()

    def clear(self) -> None:
        for name, (shape, kept) in self._layout.items():
            _reserve(self._paths[name], torch.Size(shape).numel() * kept.itemsize)

    def load(self, rows: slice) -> dict[str, Tensor]:
        found = {}
        with self._opened("rb", rows) as files:
            for name, file in files.items():
                (_, width), kept = self._layout[name]
                own = _own_rows(name, rows)
                found[name] = torch.empty(own.stop - own.start, width, dtype=kept)
                file.seek(own.start * width * kept.itemsize)
                file.readinto(_bytes_of(found[name]))  # type: ignore[attr-defined]  # typeshed's BinaryIO lacks it
        return found

    def keep(self, rows: slice, parts: Mapping[str, Tensor]) -> None:
        with self._opened("r+b", rows) as files:
            for name, part in parts.items():
                (_, width), kept = self._layout[name]
                files[name].seek(_own_rows(name, rows).start * width * kept.itemsize)
                files[name].write(_bytes_of(part.to("cpu", kept)))

    @contextmanager
    def _opened(self, mode: str, rows: slice) -> Iterator[dict[str, BinaryIO]]:
        with ExitStack() as stack:
            yield {name: stack.enter_context(open(path, mode)) for name, path in self._paths.items()}  # type: ignore[misc]
        if self._trail is not None and rows.stop == self._height:
            self._trail.leave(tuple(self._paths.values()))


class PageCacheTrail:
    """The last of many files that are gone through again and again, and that are more than the page cache can keep.

    Whatever it keeps of them is gone again when it would be of use, and it drops the model's own files for that, which
    are read as often. So it is told to forget what is behind us.
    """

    LENGTH = 3  # matrices, of which there may be pages in the cache

    def __init__(self) -> None:
        self._behind: deque[tuple[Path, ...]] = deque()

    def leave(self, paths: tuple[Path, ...]) -> None:
        """These files have been read or written to their end.

        Pages have to be on the disk before they can be forgotten, and asking for it starts writing them: it is asked
        twice.
        """
        _forget(paths)
        if paths in self._behind:
            return
        self._behind.append(paths)
        if len(self._behind) > self.LENGTH:
            _forget(self._behind.popleft())


def _forget(paths: tuple[Path, ...]) -> None:
    """See posix_fadvise(2); nothing where there is no such call."""
    for path in paths if hasattr(os, "posix_fadvise") else ():
        with suppress(FileNotFoundError), open(path, "rb") as file:  # a trial that is over has deleted its own
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _own_rows(name: str, rows: slice) -> slice:
    """Rows of a matrix as those of one of its parts."""
    if name != "bases":
        return rows
    assert rows.start % BLOCK == 0, "rows are worked on in whole blocks"
    return slice(rows.start // BLOCK, -(-rows.stop // BLOCK))


def _bytes_of(part: Tensor) -> memoryview:
    """Of a contiguous tensor, without a copy."""
    return part.view(torch.uint8).numpy().data


def _reserve(path: Path, nbytes: int) -> None:
    """A file of zeros whose blocks are on the disk: what does not fit is said before the first batch."""
    try:
        with open(path, "wb") as file:
            if hasattr(os, "posix_fallocate") and nbytes:
                os.posix_fallocate(file.fileno(), 0, nbytes)
            else:
                for _ in range(0, nbytes, 2**20):
                    file.write(bytes(2**20))
                file.truncate(nbytes)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise OSError(
            errno.ENOSPC,
            "no room for the accumulators; choose another offload_folder (--offload-folder), accumulator_dtype='int8', "
            "or fisher='factored', which needs none",
            str(path.parent),
        ) from error
