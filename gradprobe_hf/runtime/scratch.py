"""Scratch: folders that are as large as a model and for one process, and those of processes that were killed.

SIGKILL, which the kernel sends where memory ends and a scheduler where time does, runs no clean-up. So each folder is
locked for as long as its process lives, and whoever makes the next one beside it removes those that nobody holds.
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gradprobe_hf.runtime.processes import Processes

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

_locks: dict[Path, int] = {}  # folder -> the handle that its lock lives with


def scratch_folder(kind: str, parent: str | Path | None = None) -> Path:
    """A new folder `gradprobe-HOST-KIND-...`, this process's until `remove_scratch`; the abandoned ones are removed.

    Only those of this host are: some network disks (Lustre with `localflock`) keep locks on each host for itself, and
    there a folder of another host would look abandoned while its run goes on.

    Args:
        parent: made if it is not there; None: the system's folder for temporary files.

    Raises:
        OSError: nothing can be written there.
    """
    parent = Path(tempfile.gettempdir() if parent is None else parent)
    parent.mkdir(parents=True, exist_ok=True)
    begins = f"gradprobe-{platform.node()}-"
    remove_abandoned(parent, begins)
    # Hidden until it is locked: in between it would look abandoned to another process.
    hidden = Path(tempfile.mkdtemp(prefix=f".{begins}{kind}-", dir=parent))
    lock = _lock(hidden)
    folder = hidden.rename(parent / hidden.name.removeprefix("."))
    if lock is not None:
        _locks[folder] = lock
    return folder


def remove_scratch(folder: Path) -> None:
    """Remove a folder, if it is there, with all that is in it."""
    shutil.rmtree(folder, ignore_errors=True)
    if (lock := _locks.pop(folder, None)) is not None:
        os.close(lock)


def remove_abandoned(parent: Path, begins: str) -> None:
    """Remove the folders of `parent` whose names begin so and that no process holds.

    Those that cannot be removed, or found where nobody may list the folder, stay: that costs no result.
    """
    with suppress(OSError):
        for folder in parent.iterdir():
            if folder.name.startswith(begins) and folder.is_dir():
                with held(folder) as is_abandoned:
                    if is_abandoned:
                        shutil.rmtree(folder, ignore_errors=True)
                        logger.info("removed %s, left by a run that was killed", folder)


@contextmanager
def held(folder: Path) -> Iterator[bool]:
    """Lock a folder for as long as this process lives, or the body takes; whether that can be done."""
    lock = _lock(folder)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            os.close(lock)


def is_held(folder: Path) -> bool:
    """Whether another process holds it; False where nothing can be locked."""
    if fcntl is None:
        return False
    try:
        os.close(_taken(folder))
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@contextmanager
def alone_in(folder: Path | None, processes: Processes) -> Iterator[None]:
    """For the body of the `with` no other run goes on from the state in a folder, which is made. A collective.

    One that is empty at the end goes. Where nothing can be locked, nobody is kept out.

    Raises:
        ValueError: another run is in there, in all processes.
    """
    if folder is None:
        yield
        return
    locks: list[int | None] = []
    processes.on_main(lambda: locks.append(_entered(folder)))
    try:
        yield
    finally:
        if processes.is_main:
            with suppress(OSError):
                folder.rmdir()
        for lock in locks:
            if lock is not None:
                os.close(lock)


def _entered(folder: Path) -> int | None:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return None if fcntl is None else _taken(folder)
    except BlockingIOError:
        raise ValueError(
            f"another run is working in {folder} and has not ended: wait for it, or choose another resume_dir "
            "(--resume-dir)."
        ) from None
    except OSError:
        return None


def _lock(folder: Path) -> int | None:
    """A handle of the folder that holds its lock; None where another process does, or where there are no locks.

    The lock is of the folder itself, so that there is no file of it to be renamed or left behind. Network disks, and
    Windows, may know none.
    """
    if fcntl is None:
        return None
    try:
        return _taken(folder)
    except OSError:
        return None


def _taken(folder: Path) -> int:
    """As `_lock`. Raises BlockingIOError: another process holds it; another OSError: it cannot be locked."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle
