"""What is in a batch: samples, tokens, padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradprobe_hf.profiling.observing.observation import Contents
from gradprobe_hf.tasks.columns import IGNORED


def contents_of(batch: Any, has_decoder: bool = False) -> Contents | None:
    """Of a batch as a data loader hands it out; None where there is no tensor in it.

    Args:
        has_decoder: whether its labels are what a decoder of its own reads, padded by the index that no loss counts.
    """
    found = Uncounted.of(batch, has_decoder)
    return None if found is None else found.count()


@dataclass(frozen=True)
class Uncounted:
    """What a batch holds, with padding that is counted on its device and not read yet: no timed step waits for that.

    Attributes:
        padding: its parts, numbers in tensors without dimensions; None: not known.
    """

    samples: int
    tokens: int | None
    padding: tuple[Tensor, ...] | None

    @classmethod
    def of(cls, batch: Any, has_decoder: bool = False) -> Uncounted | None:
        """As `contents_of`."""
        # Counted while other code is watched for the same calls.
        with torch._C.DisableTorchFunction():
            if isinstance(batch, Mapping):
                values = list(batch.values())
            else:  # an iterator is its user's to draw from, and of anything else it is not known what that would do
                values = (
                    [batch] if isinstance(batch, Tensor) else list(batch) if isinstance(batch, (list, tuple)) else []
                )
            first = next((one for one in values if isinstance(one, Tensor) and one.ndim), None)
            if first is None or (not isinstance(batch, Mapping) and _may_be_rows(values)):
                return None
            named = batch if isinstance(batch, Mapping) else {}
            ids, mask = named.get("input_ids"), named.get("attention_mask")
            tokens = ids.numel() if isinstance(ids, Tensor) else None
            # A mask of another shape says which token sees which.
            padding: tuple[Tensor, ...] | None = None
            if isinstance(mask, Tensor) and isinstance(ids, Tensor) and mask.shape == ids.shape:
                padding = (mask.eq(0).sum(),)
            written = named.get("labels") if has_decoder else None
            if isinstance(written, Tensor) and written.ndim == 2 and tokens is not None:
                tokens += written.numel()
                padding = None if padding is None else (*padding, written.eq(IGNORED).sum())
            return cls(len(first), tokens, padding)

    def count(self) -> Contents:
        with torch._C.DisableTorchFunction():
            return Contents(1, self.samples, self.tokens, None if self.padding is None else sum(map(int, self.padding)))


def _may_be_rows(values: list[Any]) -> bool:
    """Whether tensors of a list may be rows, one each, and not columns: they are all alike."""
    kinds = [(one.dtype, one.shape[1:]) for one in values if isinstance(one, Tensor) and one.ndim]
    return len(kinds) > 1 and len(set(kinds)) == 1


def added(batches: list[Contents], steps: int, processes: int = 1) -> Contents | None:
    """One process's share of all batches of some steps. Tokens and padding only if every batch tells."""
    if not batches or not steps:
        return None
    tokens = [one.tokens for one in batches if one.tokens is not None]
    padding = [one.padding for one in batches if one.padding is not None]
    return Contents(
        steps,
        sum(one.samples for one in batches) // processes,
        sum(tokens) // processes if len(tokens) == len(batches) else None,
        sum(padding) // processes if len(padding) == len(batches) else None,
    )
