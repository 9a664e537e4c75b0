"""The latency table: seconds of a block of each width, as they were measured, and of what is around the blocks.

What a shape takes is the sum: what is around the blocks, and for each block that stays what a dense one takes, less
what is saved along each axis (attention with fewer heads, a narrower feed-forward network, fewer experts).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradprobe_hf.structures.table import blocks_in


@dataclass(frozen=True)
class LatencyTable:
    """Seconds of one text.

    Attributes:
        blocks: how many there are.
        around: of what is no block: embeddings and the head.
        block: of a dense block.
        narrower: structure -> amounts of it that go, rising from 0, and the seconds of a block without each of them.
        terms: what was timed: tokens, rounds, the device, threads.

    >>> table = LatencyTable(4, 1.0, 2.0, {"ffn": ([0, 512], [2.0, 1.0])})
    >>> table.dense, table({"ffn": 256, "blocks": 2})
    (9.0, 4.0)
    """

    blocks: int
    around: float
    block: float
    narrower: Mapping[str, tuple[Sequence[int], Sequence[float]]]
    terms: Mapping[str, Any] | None = None

    @property
    def dense(self) -> float:
        """Of the model as it is."""
        return self({})

    def __call__(self, going: Mapping[str, int]) -> float:
        """Of a shape, on straight lines between the amounts that were timed."""
        saved = sum(
            self.block - float(np.interp(going[name], amounts, seconds))
            for name, (amounts, seconds) in self.narrower.items()
            if going.get(name)
        )
        return self.around + (self.blocks - blocks_in(going)) * (self.block - saved)
