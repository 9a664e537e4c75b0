"""File sizes: what a checkpoint's weights take on the disk, and how much of it zstd leaves.

Zeros are stored as any other number, so that only a compressed file shows them. zstd is in Python 3.14, or in the
package `zstandard` (`pip install 'gradprobe_hf[zstd]'`); without either nothing is compressed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError

from gradprobe_hf.checkpoint.inspect import weight_files

INSTALL = "pip install 'gradprobe_hf[zstd]'"
PORTION = 2**22  # bytes that are read at once


@dataclass(frozen=True)
class FileSizes:
    """Attributes: bytes of the safetensors files; those that zstd makes of them, None where it is not at hand."""

    stored: int
    zstd: int | None

    @classmethod
    def of(cls, files: Sequence[Path]) -> FileSizes:
        return cls(sum(file.stat().st_size for file in files), _compressed(files))


def checkpoint_files(name: str | Path, **source: Any) -> list[Path]:
    """The safetensors files of a folder, or of a Hub repository that was fetched before; of others none.

    Args:
        source: `revision`, `cache_dir`.
    """
    folder = Path(name)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(str(name), local_files_only=True, **source))
        except (OSError, ValueError, HFValidationError):
            return []
    try:
        return [folder / file for file in weight_files(folder)]
    except ValueError:
        return []


def _compressed(files: Sequence[Path]) -> int | None:
    compressor = _compressor()
    if compressor is None:
        return None
    total = 0
    for path in files:
        one = compressor()
        with path.open("rb") as file:
            while portion := file.read(PORTION):
                total += len(one.compress(portion))
        total += len(one.flush())
    return total


def _compressor() -> Callable[[], Any] | None:
    """What makes an object with `compress` and `flush`, at zstd's default level."""
    if find_spec("compression") is not None and find_spec("compression.zstd") is not None:
        make: Callable[[], Any] = import_module("compression.zstd").ZstdCompressor
        return make
    if find_spec("zstandard") is not None:
        zstandard = import_module("zstandard")
        return lambda: zstandard.ZstdCompressor().compressobj()
    return None
