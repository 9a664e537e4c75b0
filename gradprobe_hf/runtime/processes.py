"""Processes: those that prune the same model together, as `accelerate launch` or torchrun starts them.

Collectives go through here and are counted, so that a test can show that their number does not grow with that of the
batches. Sharded models are the exception: FSDP2 makes its own in every pass, and `model/fsdp.py` reduces to its shards.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor

from gradprobe_hf.runtime.launched import launched

Item = TypeVar("Item")

PATIENCE = timedelta(days=7)  # with the main process, while it writes and uploads; should it end, all are told at once
_PATIENT: dict[tuple[Any, timedelta], Any] = {}
_BACKENDS = re.compile(r"gloo|nccl|connection (closed|reset|refused)|socket", re.IGNORECASE)  # as errors of theirs say


@dataclass
class Processes:
    """This process among `count`. Alone, every collective returns its input.

    All processes have to make the same collectives in the same order; one that makes another hangs the rest.

    Attributes:
        rank: of this process, from 0; 0 is the main process, which writes files.
        count: how many there are.
        collectives: how many were made so far.
        patient: a group of the same processes in which to wait for what has no time limit; None: that of all else.
    """

    rank: int = 0
    count: int = 1
    collectives: int = field(default=0, compare=False)
    patient: Any = field(default=None, compare=False, repr=False)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def mine(self, items: Sequence[Item]) -> list[Item]:
        """This process's share: every item belongs to exactly one process.

        >>> Processes(rank=1, count=2).mine("abcde")
        ['b', 'd']
        """
        # Interleaved: shares differ by at most one item, and long items at one end are spread over all processes.
        return list(items[self.rank :: self.count])

    def shares(self, costs: Sequence[float]) -> list[int]:
        """Which process works on each of some items of unlike cost: the dearest first, each to who has least to do.

        >>> Processes(count=2).shares([1, 5, 2, 3])
        [0, 0, 1, 1]
        """
        owners, loads = [0] * len(costs), [0.0] * self.count
        for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
            owners[item] = loads.index(min(loads))
            loads[owners[item]] += costs[item]
        return owners

    def sum_(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        return self._all_reduce(tensor, dist.ReduceOp.SUM)

    def max_(self, tensor: Tensor) -> Tensor:
        """The maximum over all processes, in place."""
        return self._all_reduce(tensor, dist.ReduceOp.MAX)

    def min_(self, tensor: Tensor) -> Tensor:
        """The minimum over all processes, in place."""
        return self._all_reduce(tensor, dist.ReduceOp.MIN)

    def send_(self, tensor: Tensor, source: int) -> Tensor:
        """What process `source` has in it, in place; of one shape and dtype in all of them, contiguous."""
        if self.count > 1:
            # As bytes: not every backend has every dtype.
            sent = _on_backend_device(tensor.view(torch.uint8))
            with self._collective():
                dist.broadcast(sent, source)
            if sent.device != tensor.device:
                tensor.view(torch.uint8).copy_(sent)
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all processes, of one shape, by rank."""
        if self.count == 1:
            return [tensor]
        sent = _on_backend_device(tensor)
        received = [torch.empty_like(sent) for _ in range(self.count)]
        with self._collective():
            dist.all_gather(received, sent)
        return [one.to(tensor.device) for one in received]

    def broadcast(self, value: Any, source: int = 0, patiently: bool = False) -> Any:
        """The value of process `source`, in all of them; it is pickled. Args: patiently: as for `in_all`."""
        if self.count == 1:
            return value
        box = [value]
        with self._collective():
            dist.broadcast_object_list(box, source, self.patient if patiently else None)
        return box[0]

    def gather(self, value: Item, group: Any = None) -> list[Item]:
        """The values of all processes, by rank; they are pickled. Default: the group of all else."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        with self._collective():
            dist.all_gather_object(values, value, group)
        return values

    def on_main(self, work: Callable[[], Item], patiently: bool = False) -> Item:
        """What the main process's work returns, in all of them; what it raises is raised in all of them.

        Args:
            patiently: as for `in_all`.
        """
        made, failure = _tried(work) if self.is_main else ([], None)
        values, its = self.broadcast((made, _sendable(failure)), patiently=patiently)
        _raise(failure or its)
        found: Item = values[0]
        return found

    def in_all(self, work: Callable[[], Item], patiently: bool = False) -> Item:
        """What this process's work returns; what the first of them raises is raised in all of them.

        Args:
            patiently: one of them may come hours late: the main one writes files, and uploads them. In the group of all
                else the wait would end with an error after 10 minutes (NCCL) or 30 (gloo).
        """
        made: list[Item] = []
        with self.telling(patiently):
            made.append(work())
        return made[0]

    @contextmanager
    def telling(self, patiently: bool = False) -> Iterator[None]:
        """What the body of the `with` raises in one of them is raised in all, behind it. No collectives are in it."""
        failure = None
        try:
            yield
        except Exception as error:
            failure = error
        group = self.patient if patiently else None
        others = [one for one in self.gather(_sendable(failure), group) if one is not None]
        if failure is None and not all(isinstance(one, Exception) for one in others):  # what another collective tells
            raise ValueError("the processes are not at the same call: one has gone on to another. Start them again.")
        _raise(failure or next(iter(others), None))

    @contextmanager
    def losing(self) -> Iterator[None]:
        """In the body of the `with`, a lost process is a ConnectionError in collectives that torch makes, too (DDP,
        FSDP2)."""
        try:
            yield
        except RuntimeError as error:
            if self.count == 1 or not _BACKENDS.search(str(error)):
                raise
            raise self._lost(error) from error

    def barrier(self) -> None:
        """Wait until every process is here."""
        if self.count > 1:
            with self._collective():
                dist.barrier()

    def _all_reduce(self, tensor: Tensor, operation: Any) -> Tensor:
        if self.count > 1:
            sent = _on_backend_device(tensor)
            with self._collective():
                dist.all_reduce(sent, operation)
            if sent is not tensor:  # callers rely on the sum being in place
                tensor.copy_(sent)
        return tensor

    @contextmanager
    def _collective(self) -> Iterator[None]:
        self.collectives += 1
        try:
            yield
        except RuntimeError as error:  # what gloo and nccl raise when a peer is gone or a timeout has passed
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> ConnectionError:
        return ConnectionError(
            f"process {self.rank} of {self.count} lost the others: one of them ended or hangs, and its own message "
            f"says why. This process wrote nothing more, and its weights are as they were. ({error})"
        )


def _tried(work: Callable[[], Item]) -> tuple[list[Item], Exception | None]:
    """What work returns, or what it raises: in one process alone, that would leave the others waiting for ever."""
    try:
        return [work()], None
    except Exception as error:
        return [], error


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _sendable(error: Exception | None) -> Exception | None:
    """The error, or its words where it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _on_backend_device(tensor: Tensor) -> Tensor:
    """The tensor on a device that the process group has a backend for: nccl alone has none for the CPU."""
    supported = {pair.split(":")[0] for pair in dist.get_backend_config().split(",")}
    if tensor.device.type in supported or not torch.accelerator.is_available():
        return tensor
    return tensor.to(torch.accelerator.current_accelerator())


def join_processes(patience: timedelta | None = None) -> Processes:
    """The processes this one was launched with. Starts the process group if nothing has yet.

    Args:
        patience: how long `in_all` waits patiently; a collective then.
    """
    if not dist.is_initialized() and launched() > 1:
        # Without `cpu=True` PartialState ignores the launcher's variables on a machine that has no accelerator.
        PartialState(cpu=not torch.accelerator.is_available())
    if not dist.is_initialized():
        return Processes()
    patient = None if patience is None or dist.get_world_size() == 1 else _patient_group(patience)
    return Processes(dist.get_rank(), dist.get_world_size(), patient=patient)


def _patient_group(patience: timedelta) -> Any:
    """A group of all processes with a time limit of its own, the same for every run of a program; a collective."""
    key = dist.group.WORLD, patience
    if key not in _PATIENT:
        # Groups are made in the patience of the one that is made: a process that never comes would be waited for so
        # long, and no signal ends that wait.
        Processes(dist.get_rank(), dist.get_world_size()).barrier()
        _PATIENT[key] = dist.new_group(backend="gloo", timeout=patience) if dist.is_gloo_available() else None
    return _PATIENT[key]
