"""Room: memory of a CPU that is written again and again.

The first write to each fresh page is an interruption, which takes longer than what is written there; and what is large,
or what lay at the end of the heap, is given back to the system and fresh the next time.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Room:
    """As large as the largest tensor so far, for one of each dtype at a time."""

    def __init__(self) -> None:
        self._kept: dict[torch.dtype, Tensor] = {}

    def take(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised, `[elements]`; the next one of this dtype overwrites it."""
        kept = self._kept.get(dtype)
        if kept is None or len(kept) < elements:
            self._kept[dtype] = kept = torch.empty(elements, dtype=dtype)
        return kept[:elements]
