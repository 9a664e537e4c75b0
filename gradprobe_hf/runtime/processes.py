"""Processes: the other processes that prune the same model, as `accelerate launch` and torchrun start them.

Every collective of the package is made here, and counted: their number must not grow with the number of batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor

Item = TypeVar("Item")


@dataclass
class Processes:
    """This process among `count`; alone, every collective does nothing.

    Attributes:
        rank: which one this is, from 0; 0 is the main one, which writes files.
        count: how many there are.
        collectives: how many collectives were made so far.
    """

    rank: int = 0
    count: int = 1
    collectives: int = field(default=0, compare=False)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def mine(self, items: Sequence[Item]) -> list[Item]:
        """This process's share: every item belongs to exactly one process."""
        return list(items[self.rank :: self.count])

    def sum_(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def max_(self, tensor: Tensor) -> Tensor:
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def min_(self, tensor: Tensor) -> Tensor:
        return self._reduce(tensor, dist.ReduceOp.MIN)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The same tensor of every process, by rank."""
        if self.count == 1:
            return [tensor]
        sent = _where_they_talk(tensor)
        found = [torch.empty_like(sent) for _ in range(self.count)]
        with self._talking():
            dist.all_gather(found, sent)
        return [one.to(tensor.device) for one in found]

    def scatter_rows(self, matrix: Tensor) -> Tensor:
        """The sum of `matrix [rows, columns]` over all processes, of which each gets its own rows.

        Rows are dealt as `torch.chunk` does, which is how FSDP2 shards: the last processes may get fewer, or none.
        """
        if self.count == 1:
            return matrix
        share = -(-matrix.shape[0] // self.count)
        padded = torch.nn.functional.pad(matrix, (0, 0, 0, share * self.count - matrix.shape[0]))
        own = torch.empty(share, matrix.shape[1], dtype=matrix.dtype, device=matrix.device)
        with self._talking():
            dist.reduce_scatter_tensor(own, padded)
        return own[: len(range(matrix.shape[0])[self.rank * share : (self.rank + 1) * share])]

    def agree(self, value: Any, source: int = 0) -> Any:
        """The value of process `source`, in all of them."""
        if self.count == 1:
            return value
        box = [value]
        with self._talking():
            dist.broadcast_object_list(box, src=source)
        return box[0]

    def on_main(self, check: Callable[[], None]) -> None:
        """Run a check in the main process; what it raises is raised in all of them."""
        failure = None
        if self.is_main:
            try:
                check()
            except (ValueError, OSError) as error:
                failure = error
        failure = self.agree(failure)
        if failure is not None:
            raise failure

    def wait(self) -> None:
        """Until every process is here."""
        if self.count > 1:
            with self._talking():
                dist.barrier()

    def _reduce(self, tensor: Tensor, operation: Any) -> Tensor:
        if self.count > 1:
            sent = _where_they_talk(tensor)
            with self._talking():
                dist.all_reduce(sent, operation)
            if sent is not tensor:
                tensor.copy_(sent)
        return tensor

    @contextmanager
    def _talking(self) -> Iterator[None]:
        self.collectives += 1
        try:
            yield
        except RuntimeError as error:  # what gloo and nccl raise when the other side is gone, or too late
            raise ConnectionError(
                f"process {self.rank} of {self.count} lost the others: {error}. One of them ended or hangs; its own "
                "message says why. Nothing was written, and the weights of this process are as they were."
            ) from error


def _where_they_talk(tensor: Tensor) -> Tensor:
    """The tensor on a device that the process group has a backend for: nccl alone has none for the CPU."""
    talking = {pair.split(":")[0] for pair in dist.get_backend_config().split(",")}
    if tensor.device.type in talking or not torch.accelerator.is_available():
        return tensor
    return tensor.to(torch.accelerator.current_accelerator())


def join_processes() -> Processes:
    """The processes this one was launched with; starts the process group if nothing has yet."""
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        PartialState(
            cpu=not torch.accelerator.is_available()
        )  # left to itself it would take no notice of CPU processes
    if not dist.is_initialized():
        return Processes()
    return Processes(dist.get_rank(), dist.get_world_size())
