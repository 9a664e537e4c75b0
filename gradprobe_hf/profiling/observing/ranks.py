"""Several processes: what each tells of its steps, without a collective.

A collective that one process of several does not take part in would hang the run: the store that the processes met at
is read and written by each on its own.
"""

from __future__ import annotations

import itertools
import json
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gradprobe_hf.profiling.observing.observation import RankStages

_PATIENCE = timedelta(seconds=10)  # the others are in the same step, or will never tell
_NUMBERS = itertools.count()  # of the recorders of this process


class Ranks:
    """One recorder's side of it."""

    def __init__(self) -> None:
        self._key = f"gradprobe_profile/{next(_NUMBERS)}"

    @staticmethod
    def count() -> int:
        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

    def tell(self, stages: dict[str, float]) -> None:
        """Seconds of each stage of a step in this process."""
        if self.count() > 1:
            self._store().set(f"{self._key}/{dist.get_rank()}", json.dumps(stages))

    def told(self) -> tuple[RankStages, ...]:
        """What all told, waiting for those that have not.

        Raises:
            RuntimeError: one tells nothing.
        """
        if self.count() == 1:
            return ()
        keys = [f"{self._key}/{rank}" for rank in range(self.count())]
        store = self._store()
        store.wait(keys, _PATIENCE)
        return tuple(RankStages(rank, json.loads(store.get(key))) for rank, key in enumerate(keys))

    @staticmethod
    def _store() -> Any:
        return dist.distributed_c10d._get_default_store()  # it has no public name
