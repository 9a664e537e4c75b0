"""Real processes over gloo: teams that live as long as the session, and children that are killed.

All are forked, so that nothing is imported again. A team is forked once and then runs one function after another: most
of a test of two processes would be spent on starting them. Its members forget what they can between two functions; one
that raises, ends or hangs fails its test, and the next test gets a new team.
"""

from __future__ import annotations

import ctypes
import gc
import io
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

# A process that waits for another that never comes fails its test; gloo's own patience is half an hour.
PATIENCE = timedelta(minutes=2)
_DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


class TeamError(Exception):
    """A function failed in a process of a team; the message is its traceback."""


@dataclass(frozen=True)
class Member:
    """A process of a team, and the parent's end of the line to it."""

    pid: int
    line: Connection


class Team:
    """Processes that are joined by gloo, as Accelerate's launcher would start them.

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        self.store = tempfile.mkdtemp(prefix="team-")
        self.members: list[Member] = []
        for rank in range(count):
            ours, theirs = Pipe()
            pid = _fork(partial(_serve, theirs, rank, count, f"{self.store}/store"))
            theirs.close()
            self.members.append(Member(pid, ours))

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
        """What `function(*arguments)` returns in each member, by rank.

        Raises:
            TeamError: in the first member that fails; the team is of no more use.
        """
        call = pickle.dumps((function, arguments))
        for member in self.members:
            member.line.send_bytes(call)
        answers: dict[Connection, Any] = {}
        deadline = time.monotonic() + 2 * PATIENCE.total_seconds()
        while len(answers) < len(self.members):
            left = [member.line for member in self.members if member.line not in answers]
            for line in wait(left, timeout=max(0.0, deadline - time.monotonic())) or [None]:
                answers[line] = _answer(line)
        return [answers[member.line] for member in self.members]

    def stop(self) -> None:
        for member in self.members:
            with suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)
            os.waitpid(member.pid, 0)
            member.line.close()
        shutil.rmtree(self.store, ignore_errors=True)


_teams: dict[int, Team] = {}


def together(function: Callable[..., Any], *arguments: Any, processes: int = 2) -> list[Any]:
    """What `function(*arguments)` returns in each of the processes, by rank; it is found by name there."""
    if processes not in _teams:
        _teams[processes] = Team(processes)
    try:
        return _teams[processes].run(function, arguments)
    except BaseException:
        _teams.pop(processes).stop()
        raise


def stop_teams() -> None:
    """At the end of the session."""
    while _teams:
        _teams.popitem()[1].stop()


def _answer(line: Connection | None) -> Any:
    if line is None:
        raise TeamError("a process hangs")
    try:
        fine, answer = torch.load(io.BytesIO(line.recv_bytes()), weights_only=False)
    except (EOFError, ConnectionError):
        raise TeamError("a process ended") from None
    if not fine:
        raise TeamError(answer)
    return answer


def _serve(line: Connection, rank: int, count: int, store: str) -> None:
    """Life of a member: one function after another, until the line is cut."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # never opened: they meet in a file
        "GLOO_SOCKET_IFNAME": "lo",
        "ACCELERATE_USE_CPU": "yes",
        "ACCELERATE_MIXED_PRECISION": "no",
        "OMP_NUM_THREADS": "1",  # left to itself, Accelerate takes more: a fork has none of its parent's
    }
    _join(rank, count, store)
    PartialState()
    environment = dict(os.environ)
    while True:
        try:
            function, arguments = pickle.loads(line.recv_bytes())
        except EOFError:
            return
        torch.manual_seed(0)
        try:
            answer = (True, function(*arguments))
            torch.distributed.barrier()  # none is ahead of the others with its collectives
        except BaseException:  # whatever it was, it is the parent's to judge
            answer = (False, f"in process {rank}: {traceback.format_exc()}")
        packed = io.BytesIO()
        torch.save(answer, packed)
        line.send_bytes(packed.getvalue())
        del answer, packed, function, arguments
        _forget(environment)


def _join(rank: int, count: int, store: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=PATIENCE
    )


def _forget(environment: dict[str, str]) -> None:
    """As a process that has just been started."""
    os.environ.clear()
    os.environ |= environment
    AcceleratorState._reset_state()
    GradientState._reset_state()
    torch.set_num_threads(1)
    gc.collect()


@dataclass(frozen=True)
class Deaths:
    """How processes ended.

    Attributes:
        codes: exit codes by rank; negative: the signal that killed it.
        first: the exit code of the one that ended first.
    """

    codes: list[int]
    first: int


def survivors(function: Callable[..., Any], *arguments: Any, processes: int = 2) -> Deaths:
    """Run in processes that no launcher watches: one that ends does not stop the others."""

    def joined(rank: int) -> None:
        _join(rank, processes, f"{folder}/store")
        function(*arguments)

    with tempfile.TemporaryDirectory() as folder:
        running = {_fork(partial(joined, rank)): rank for rank in range(processes)}
        ended: dict[int, int] = {}  # in the order in which they ended
        while running:
            for child in list(running):
                found, status = os.waitpid(child, os.WNOHANG)
                if found:
                    ended[running.pop(child)] = os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
    return Deaths([ended[rank] for rank in range(processes)], next(iter(ended.values())))


def in_child(function: Callable[[], Any], killed_after: float | None = None) -> int:
    """Run `function` in a forked process, and SIGKILL it after so many seconds; returns its exit code (-9: killed)."""
    child = _fork(function)
    if killed_after is not None:
        time.sleep(killed_after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


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


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
