"""Shard files: what was written in pieces gets the names of a checkpoint, or is copied into one file.

A safetensors file is the length of its header (8 bytes, little-endian), the header (JSON: name -> dtype, shape and the
bytes' place) and the bytes of the tensors. So files are joined by copying bytes: no tensor is in memory again.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

LARGEST_FILE = 5 * 10**9  # bytes; what huggingface_hub takes for a shard
ALIGNMENT = 8  # of where the tensors begin, in bytes
PORTION = 2**24  # bytes that are copied at once


def name_files(folder: Path, files: Sequence[tuple[Path, Mapping[str, int]]]) -> None:
    """Make a checkpoint of the files that were written: one file if it is small enough, or shards and their index.

    Args:
        files: each with the names of its tensors and their bytes.
    """
    total = sum(size for _, sizes in files for size in sizes.values())
    for path, _ in files:
        open_to_all(path)
    if len(files) == 1:
        files[0][0].rename(folder / SAFE_WEIGHTS_NAME)
    elif total <= LARGEST_FILE and shutil.disk_usage(folder).free > 2 * total:  # both are there for a while
        join([path for path, _ in files], folder / SAFE_WEIGHTS_NAME)
    else:
        _index(folder, files, total)


def open_to_all(path: Path) -> None:
    """Give a file the mode that any file is made with: safetensors makes them for their owner alone (0600)."""
    plain = path.with_suffix(".mode")
    plain.touch()
    path.chmod(plain.stat().st_mode & 0o777)  # to ask for the umask by itself is to change it
    plain.unlink()


def join(pieces: Sequence[Path], path: Path) -> None:
    """Write the tensors of several files into one, and delete them."""
    # Larger elements first, as safetensors orders them: so each tensor begins where its type may.
    tensors = sorted((one for piece in pieces for one in _tensors(piece)), key=lambda one: -one.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for one in tensors:
        header[one.name] = {"dtype": one.dtype, "shape": one.shape, "data_offsets": [end, end + one.size]}
        end += one.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for one in tensors:
            with one.piece.open("rb") as source:
                source.seek(one.start)
                _copy(source, out, one.size)
    for piece in pieces:
        piece.unlink()


def header_bytes(tensors: Mapping[str, Sequence[int]], nbytes: int, files: int = 1) -> int:
    """The most that headers take of a checkpoint.

    Args:
        tensors: their names and shapes.
        nbytes: of all of them: no place has a longer number.
        files: that they are in.
    """
    about = (
        {name: {"dtype": "F8_E4M3", "shape": list(shape), "data_offsets": [nbytes, nbytes]}}
        for name, shape in tensors.items()
    )
    of_a_file = ALIGNMENT + len(json.dumps({"__metadata__": {"format": "pt"}})) + ALIGNMENT
    return files * of_a_file + sum(len(json.dumps(one, separators=(",", ":")).encode()) for one in about)


@dataclass(frozen=True)
class _Stored:
    """A tensor in a file: where its bytes are, and what its header says."""

    name: str
    piece: Path
    dtype: str
    shape: list[int]
    start: int
    size: int

    @property
    def itemsize(self) -> int:
        """Bytes of an element; 0 if it has none."""
        return self.size // max(1, math.prod(self.shape))


def _tensors(piece: Path) -> Iterator[_Stored]:
    with piece.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    for name, about in header.items():
        first, last = about["data_offsets"]
        yield _Stored(name, piece, about["dtype"], about["shape"], 8 + length + first, last - first)


def _copy(source: BinaryIO, out: BinaryIO, size: int) -> None:
    for start in range(0, size, PORTION):
        out.write(source.read(min(PORTION, size - start)))


def _index(folder: Path, files: Sequence[tuple[Path, Mapping[str, int]]], total: int) -> None:
    stem, suffix = SAFE_WEIGHTS_NAME.rsplit(".", 1)
    weight_map: dict[str, str] = {}
    for number, (path, sizes) in enumerate(files, start=1):
        name = f"{stem}-{number:05d}-of-{len(files):05d}.{suffix}"
        path.rename(folder / name)
        weight_map |= dict.fromkeys(sizes, name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
