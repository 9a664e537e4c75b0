"""File sizes: what a checkpoint's weights take on the disk, how much of it zstd leaves, and what the Hub transfers.

Zeros are stored as any other number, so that only a compressed file shows them. zstd is in Python 3.14, or in the
package `zstandard` (`pip install zstandard`); without either nothing is compressed.

The Hub transfers files in chunks that are cut by content and compressed one by one with LZ4 (Xet). What that comes to
is asked of the library that does it, `hf_xet`: files are uploaded into a folder in place of a server.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HFValidationError

from gradprobe_hf.checkpoint.inspect import weight_files

logger = logging.getLogger(__name__)

INSTALL = "pip install zstandard"
ROOM = 2  # times the largest file has to be free, to try what the Hub transfers
PORTION = 2**22  # bytes that are read at once


@dataclass(frozen=True)
class FileSizes:
    """Bytes of safetensors files.

    Attributes:
        stored: on the disk.
        zstd: that zstd makes of them; None where it is not at hand.
        hub: that an upload of them takes, where the Hub has none of their chunks; None where that cannot be told
            (no `hf_xet`, `HF_HUB_DISABLE_XET`, or no room to try it).
    """

    stored: int
    zstd: int | None
    hub: int | None = None

    @classmethod
    def of(cls, files: Sequence[Path], scratch: Path | None = None) -> FileSizes:
        """Args: `scratch`: a folder with room for the largest of the files; default: the system's temporary one."""
        return cls(sum(file.stat().st_size for file in files), _compressed(files), _transferred(files, scratch))


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


def _transferred(files: Sequence[Path], scratch: Path | None) -> int | None:
    if constants.HF_HUB_DISABLE_XET or find_spec("hf_xet") is None:
        return None
    try:
        room = shutil.disk_usage(scratch or tempfile.gettempdir()).free
        if room < ROOM * max((file.stat().st_size for file in files), default=0):
            raise OSError(f"{room:,} bytes are free")  # before others on this disk run out of it
        return sum(_uploaded(file, scratch) for file in files)
    except Exception as error:  # another release of hf_xet, a full disk, ...: none may cost a finished checkpoint
        logger.debug("what the Hub transfers was not measured: %s", error)
        return None


def _uploaded(path: Path, scratch: Path | None) -> int:
    """Bytes of an upload: compressed chunks, and their list. Each file by itself, so that the folder stays small."""
    hf_xet = import_module("hf_xet")
    with tempfile.TemporaryDirectory(dir=scratch, prefix=".xet-") as folder:
        commit = hf_xet.XetSession().new_upload_commit(endpoint=f"local://{folder}")
        try:
            commit.start_upload_file(str(path), sha256=hf_xet.SKIP_SHA256)
            return int(commit.wait_to_finish().dedup_metrics.total_bytes_uploaded)
        except BaseException:
            commit.abort()
            raise


def _compressor() -> Callable[[], Any] | None:
    """What makes an object with `compress` and `flush`, at zstd's default level."""
    if find_spec("compression") is not None and find_spec("compression.zstd") is not None:
        make: Callable[[], Any] = import_module("compression.zstd").ZstdCompressor
        return make
    if find_spec("zstandard") is not None:
        zstandard = import_module("zstandard")
        return lambda: zstandard.ZstdCompressor().compressobj()
    return None
