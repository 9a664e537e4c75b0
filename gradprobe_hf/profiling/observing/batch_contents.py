"""What is in a batch: samples, tokens, padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    # Counted while other code is watched for the same calls.
    with torch._C.DisableTorchFunction():
        if isinstance(batch, Mapping):
            values = list(batch.values())
        else:  # an iterator is its user's to draw from, and of anything else it is not known what that would do
            values = [batch] if isinstance(batch, Tensor) else list(batch) if isinstance(batch, (list, tuple)) else []
        first = next((one for one in values if isinstance(one, Tensor) and one.ndim), None)
        if first is None or (not isinstance(batch, Mapping) and _may_be_rows(values)):
            return None
        named = batch if isinstance(batch, Mapping) else {}
        ids, mask = named.get("input_ids"), named.get("attention_mask")
        tokens = ids.numel() if isinstance(ids, Tensor) else None
        # A mask of another shape says which token sees which.
        padding = None
        if isinstance(mask, Tensor) and isinstance(ids, Tensor) and mask.shape == ids.shape:
            padding = int(mask.eq(0).sum())
        written = named.get("labels") if has_decoder else None
        if isinstance(written, Tensor) and written.ndim == 2 and tokens is not None:
            tokens += written.numel()
            padding = None if padding is None else padding + int(written.eq(IGNORED).sum())
        return Contents(1, len(first), tokens, padding)


class Uncounted:
    """What a batch holds, to be counted later: to count padding is to wait for the device, which no timed step does.

    Of a batch as `contents_of` takes it. Its ids, mask and labels are kept until then, and nothing else of it.
    """

    def __init__(self, batch: Any, has_decoder: bool) -> None:
        self._has_decoder = has_decoder
        with torch._C.DisableTorchFunction():
            self._kept = dict(_parts(batch)) if isinstance(batch, Mapping) else batch

    def count(self) -> Contents | None:
        return contents_of(self._kept, self._has_decoder)


def _parts(batch: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What is counted, and in place of the first tensor one that has its rows alone."""
    first = next((name for name, value in batch.items() if isinstance(value, Tensor) and value.ndim), None)
    for name, value in batch.items():
        if name in ("input_ids", "attention_mask", "labels"):
            yield name, value
        elif name == first:
            yield name, torch.empty(len(value), device="meta")


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
