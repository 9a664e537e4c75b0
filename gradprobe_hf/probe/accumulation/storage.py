"""Accumulator storage: the parts of an accumulator in memory or in files, loaded and saved a few rows at a time.

An accumulator `[out, in]` has one part or more: `values` and `codes` have a row for each of its rows, `bases` has one
for every block of `ROWS_IN_A_BLOCK`. All row slices below are rows of the accumulator, in whole blocks.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import torch
from torch import Tensor

from gradprobe_hf.config.values import AccumulatorDevice, AccumulatorDtype
from gradprobe_hf.probe.accumulation.page_cache import PageCacheTrail
from gradprobe_hf.runtime.row_chunks import ROWS_IN_A_BLOCK

PartSpecs = dict[str, tuple[tuple[int, int], torch.dtype]]  # part name -> (shape, dtype as stored)


@dataclass(frozen=True)
class AccumulatorStorage:
    """Where accumulators are stored, and in which precision.

    Attributes:
        dtype: precision of the stored values.
        device: "same" as the matrix, "cpu" or "disk".
        folder: for their files; set if and only if `device` is "disk".
        page_cache: drops their pages behind a pass; None where the page cache has room for all of them.
    """

    dtype: AccumulatorDtype = "float32"
    device: AccumulatorDevice = "same"
    folder: Path | None = None
    page_cache: PageCacheTrail | None = None

    def open(self, specs: PartSpecs, device: torch.device, name: str) -> RowStore:
        """A store of zeros. `device` is the matrix's; `name` is the beginning of the file names."""
        if self.folder is not None:
            return FileStore(specs, self.folder / name, self.page_cache)
        return MemoryStore(specs, torch.device("cpu") if self.device == "cpu" else device)


class RowStore(Protocol):
    """The parts of one accumulator, all zero at the start."""

    def load(self, rows: slice) -> dict[str, Tensor]:
        """Some rows of every part; read-only."""

    def save(self, rows: slice, parts: Mapping[str, Tensor]) -> None:
        """Overwrite some rows of these parts."""

    def clear(self) -> None:
        """Reset every part to zero."""


class MemoryStore:
    """Parts as tensors on one device."""

    def __init__(self, specs: PartSpecs, device: torch.device) -> None:
        self.parts = {name: torch.zeros(shape, dtype=dtype, device=device) for name, (shape, dtype) in specs.items()}

    def load(self, rows: slice) -> dict[str, Tensor]:
        # Views: a snapshot, or a read of a few rows, costs no memory.
        return {name: part[_rows_of_part(name, rows)] for name, part in self.parts.items()}

    def save(self, rows: slice, parts: Mapping[str, Tensor]) -> None:
        for name, part in parts.items():
            self.parts[name][_rows_of_part(name, rows)].copy_(part)

    def clear(self) -> None:
        for part in self.parts.values():
            part.zero_()


class FileStore:
    """Parts in one file each.

    Files are read and written, not memory-mapped: with a mapping the first touch of every page is a fault, which was
    slower.

    Args:
        path: folder and beginning of the file names.
        page_cache: told when a pass reaches the last row.
    """

    def __init__(self, specs: PartSpecs, path: Path, page_cache: PageCacheTrail | None) -> None:
        self._specs, self._page_cache = specs, page_cache
        self._height = max(rows for (rows, _), _ in specs.values())
        self._paths = {name: path.with_name(f"{path.name}.{name}") for name in specs}
        self.clear()

    def clear(self) -> None:
        for name, (shape, dtype) in self._specs.items():
            _allocate(self._paths[name], torch.Size(shape).numel() * dtype.itemsize)

    def load(self, rows: slice) -> dict[str, Tensor]:
        parts = {}
        with self._opened("rb", rows) as files:
            for name, file in files.items():
                (_, width), dtype = self._specs[name]
                part_rows = _rows_of_part(name, rows)
                parts[name] = torch.empty(part_rows.stop - part_rows.start, width, dtype=dtype)
                file.seek(part_rows.start * width * dtype.itemsize)
                file.readinto(_bytes_of(parts[name]))  # type: ignore[attr-defined]  # typeshed's BinaryIO lacks it
        return parts

    def save(self, rows: slice, parts: Mapping[str, Tensor]) -> None:
        with self._opened("r+b", rows) as files:
            for name, part in parts.items():
                (_, width), dtype = self._specs[name]
                files[name].seek(_rows_of_part(name, rows).start * width * dtype.itemsize)
                files[name].write(_bytes_of(part.to("cpu", dtype)))

    @contextmanager
    def _opened(self, mode: str, rows: slice) -> Iterator[dict[str, BinaryIO]]:
        # Opened for each access: a mixture of experts has thousands of these files, more than a process may hold open.
        with ExitStack() as stack:
            yield {name: stack.enter_context(open(path, mode)) for name, path in self._paths.items()}  # type: ignore[misc]
        if self._page_cache is not None and rows.stop == self._height:
            self._page_cache.leave(tuple(self._paths.values()))


def _rows_of_part(name: str, rows: slice) -> slice:
    """Rows of an accumulator -> the rows of one of its parts."""
    if name != "bases":
        return rows
    assert rows.start % ROWS_IN_A_BLOCK == 0, "rows are processed in whole blocks"
    return slice(rows.start // ROWS_IN_A_BLOCK, -(-rows.stop // ROWS_IN_A_BLOCK))  # rounded up: a smaller last block


def _bytes_of(part: Tensor) -> memoryview:
    """The memory of a contiguous tensor, without a copy. Through uint8, since NumPy has no bfloat16."""
    return part.view(torch.uint8).numpy().data


def _allocate(path: Path, nbytes: int) -> None:
    """Create a file of zeros, its blocks allocated: a disk that is too small fails before the first batch."""
    try:
        with open(path, "wb") as file:
            # truncate() alone would make a sparse file, which takes its blocks hours later, when rows are written.
            # posix_fallocate does not exist on macOS and Windows, and refuses a length of 0, which an empty shard has.
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
