"""Steps of a reconstruction: this process's batches, and the rows of each that a damping is chosen by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradprobe_hf.data.batches import row_count
from gradprobe_hf.model.fsdp import is_sharded
from gradprobe_hf.model.passes.loss import Batch
from gradprobe_hf.probe.steps import all_steps, share
from gradprobe_hf.reconstruction.task import Reconstruction

HELD_OUT = 8  # one row of so many chooses the damping


@dataclass(frozen=True)
class Step:
    """One batch.

    Attributes:
        counts: one that does not only keeps other processes company.
        held_rows: those that the damping is chosen by, bool `[rows]`; None: none of them.
    """

    batch: Batch
    counts: bool
    held_rows: Tensor | None


def own_steps(task: Reconstruction, batches: Iterable[Batch]) -> list[Step]:
    """This process's batches, in the order of every pass."""
    work, whole = task.work, all_steps(task.work.model, task.targets, batches)
    held = held_rows([row_count(batch) for batch in whole]) if task.config.holds_out else [None] * len(whole)
    own = share(list(zip(whole, held, strict=True)), work.processes, is_sharded(work.model))
    return [Step(batch, counts, rows) for (batch, rows), counts in own]


def held_rows(counts: Sequence[int]) -> list[Tensor | None]:
    """The rows of each batch that the damping is chosen by, bool `[rows]`: every eighth of all, or the last of fewer.

    They are counted over the batches of all processes: neither the size of a batch nor the number of processes has a
    part in the result.

    Args:
        counts: rows of each batch.

    Example:
        >>> held_rows([2, 1])
        [None, tensor([True])]
    """
    rows = torch.arange(sum(counts))
    held = rows % HELD_OUT == HELD_OUT - 1
    if 1 < len(rows) < HELD_OUT:
        held[-1] = True
    return [own if own.any() else None for own in held.split(list(counts))]
