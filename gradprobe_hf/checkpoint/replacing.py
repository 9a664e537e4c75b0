"""A folder that appears whole or not at all."""

from __future__ import annotations

import errno
import glob
import itertools
import logging
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from gradprobe_hf.runtime.scratch import held, is_held, remove_abandoned

logger = logging.getLogger(__name__)


@contextmanager
def replacing(path: Path, overwrite: bool = True) -> Iterator[Path]:
    """A scratch folder beside `path` that takes its place if the body succeeds, and vanishes if it does not.

    One that a process left behind which was killed vanishes, too, when the next one writes there.

    Args:
        overwrite: whether what is there in the end is replaced; otherwise the folder comes to lie beside it.

    Raises:
        OSError: the disk is full, or a file could not be written.
    """
    path = path.resolve()  # of a link the folder is replaced, and the link stays
    path.parent.mkdir(parents=True, exist_ok=True)
    begins = _beside(path, "partial")
    remove_abandoned(path.parent, begins)
    put_back(path)
    scratch = path.with_name(begins + secrets.token_hex(6))
    try:
        scratch.mkdir()  # inside the try: an interrupt right after it must not leave the folder behind
        with held(scratch):
            yield scratch
            _swap(scratch, path if overwrite or not path.exists() else free_folder(path))
    except Exception as error:
        if _errno(error) == errno.ENOSPC:
            raise OSError(errno.ENOSPC, f"the disk is full; nothing was kept of {path.name}", str(path)) from error
        if isinstance(error, SafetensorError) or (_errno(error) is not None and not isinstance(error, OSError)):
            raise OSError(f"could not write {path}: {error}. Nothing was kept of it.") from error
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def free_folder(path: Path) -> Path:
    """This one, or one beside it where it has been taken while a run was going on. That is said."""
    if not path.exists() and not _is_being_written(path):
        return path
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    free = next(one for one in numbered if not one.exists() and not _is_being_written(one))
    logger.warning("%s was made while this ran, and is left as it is: the result is in %s.", path, free)
    return free


def _is_being_written(path: Path) -> bool:
    """Whether another run is about to put its checkpoint there."""
    path = path.resolve()  # as it is replaced
    begun = path.parent.glob(f"{glob.escape(_beside(path, 'partial'))}*")
    return any(is_held(one) for one in begun)


def put_back(path: Path) -> None:
    """Undo half a change of places: of a process that was killed between its two renames `path` is in the old folder.

    What lies beside a `path` that is there is left of one that was killed while it removed that.
    """
    for old in path.parent.glob(f"{glob.escape(_beside(path, 'old'))}*"):
        with held(old) as is_abandoned, suppress(OSError):
            if is_abandoned and all(one.name == path.name for one in old.iterdir()):  # else it is somebody's own
                if not path.exists() and (old / path.name).exists():
                    (old / path.name).rename(path)
                shutil.rmtree(old, ignore_errors=True)


def _beside(path: Path, kind: str) -> str:
    """How the name of a scratch folder beside this one begins: of a long name with a part, since 255 bytes are most."""
    return f".{path.name.encode()[:200].decode(errors='ignore')}.{kind}-"


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
    old = Path(tempfile.mkdtemp(prefix=_beside(path, "old"), dir=path.parent))
    with held(old):
        try:
            path.rename(old / path.name)
            scratch.rename(path)
        except BaseException:
            if not path.exists():
                (old / path.name).rename(path)
            shutil.rmtree(old, ignore_errors=True)
            raise
        shutil.rmtree(old, ignore_errors=True)
