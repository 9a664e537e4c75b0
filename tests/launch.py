"""Real processes: forked, so that nothing is imported again, and joined over gloo by the launcher of Accelerate."""

from __future__ import annotations

import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import debug_launcher
from accelerate.state import AcceleratorState, PartialState

PATIENCE = timedelta(
    minutes=2
)  # a process that waits for another that never comes fails its test; gloo's is half an hour


def together(function: Callable[..., Any], *arguments: Any, processes: int = 2) -> list[Any]:
    """What `function(*arguments)` returns in each of the processes, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        debug_launcher(_keeping, (folder, function, arguments), num_processes=processes)
        _forget()
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(processes)]


def _keeping(folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # left to itself, Accelerate takes more: a fork has none of its parent's
    PartialState(timeout=PATIENCE)
    found = function(*arguments)
    torch.save(found, f"{folder}/{torch.distributed.get_rank()}.pt")
    torch.distributed.barrier()


def survivors(function: Callable[..., Any], *arguments: Any, processes: int = 2) -> list[int]:
    """Exit codes of processes that no launcher watches: one that ends does not stop the others."""

    def joined(rank: int) -> None:
        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes, timeout=PATIENCE
        )
        function(*arguments)

    with tempfile.TemporaryDirectory() as folder:
        children = [_fork(partial(joined, rank)) for rank in range(processes)]
        return [_ended(child) for child in children]


def _forget() -> None:
    """The parent is not one of the processes, whatever the launcher has put in its environment."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    AcceleratorState._reset_state(reset_partial_state=True)


def in_child(function: Callable[[], Any], killed_after: float | None = None) -> int:
    """Run `function` in a forked process, and SIGKILL it after so many seconds; returns its exit code (-9: killed)."""
    child = _fork(function)
    if killed_after is not None:
        time.sleep(killed_after)
        os.kill(child, signal.SIGKILL)
    return _ended(child)


def _fork(function: Callable[[], Any]) -> int:
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)  # the parent's OpenMP threads do not live on in a fork: waiting for them hangs
            function()
        except BaseException:  # whatever it was, pytest must not go on twice
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def _ended(child: int) -> int:
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
