"""A folder that appears whole or not at all."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A scratch folder beside `path` that takes its place if the body succeeds, and vanishes if it does not.

    One that a process left behind which was killed vanishes, too, when the next one writes there.

    Raises:
        OSError: the disk is full, or a file could not be written.
    """
    path = path.resolve()  # of a link the folder is replaced, and the link stays
    path.parent.mkdir(parents=True, exist_ok=True)
    begins = f".{path.name}.partial-"
    _remove_abandoned(path.parent, begins)
    scratch = path.with_name(begins + secrets.token_hex(6))
    try:
        scratch.mkdir()  # inside the try: an interrupt right after it must not leave the folder behind
        with _held(scratch):
            yield scratch
            _swap(scratch, path)
    except Exception as error:
        if _errno(error) == errno.ENOSPC:
            raise OSError(errno.ENOSPC, f"the disk is full; nothing was kept of {path.name}", str(path)) from error
        if isinstance(error, SafetensorError) or (_errno(error) is not None and not isinstance(error, OSError)):
            raise OSError(f"could not write {path}: {error}. Nothing was kept of it.") from error
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _errno(error: Exception) -> int | None:
    """The system's number of what is wrong with a file or its disk; None of any other error."""
    if isinstance(error, OSError):
        return error.errno
    # What is written in Rust: safetensors has an error of its own, and tokenizers raises plain `Exception`.
    in_rust = isinstance(error, SafetensorError) or type(error) is Exception
    found = re.search(r"\(os error (\d+)\)", str(error)) if in_rust else None
    return None if found is None else int(found[1])


def _swap(scratch: Path, path: Path) -> None:
    if not path.exists():
        scratch.rename(path)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old-", dir=path.parent))
    try:
        path.rename(old / path.name)
        scratch.rename(path)
    except BaseException:
        if not path.exists():
            (old / path.name).rename(path)
        shutil.rmtree(old, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Lock a folder for as long as this process lives, or the body takes; whether that can be done.

    The lock is of the folder itself, so that there is no file of it to be renamed or left behind. Network disks, and
    Windows, may know none.
    """
    if fcntl is None:
        yield False
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)


def _remove_abandoned(parent: Path, begins: str) -> None:
    """Scratch folders that nobody holds: they are as large as a model.

    Those that cannot be removed, or found where nobody may list the folder, stay: that costs no result.
    """
    with suppress(OSError):
        for folder in parent.iterdir():
            if folder.name.startswith(begins) and folder.is_dir():
                with _held(folder) as is_abandoned:
                    if is_abandoned:
                        shutil.rmtree(folder, ignore_errors=True)
