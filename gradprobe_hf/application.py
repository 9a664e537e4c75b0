"""Application: zeros into the model, at the very end, and back again if anything after it fails."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gradprobe_hf.targets import Target


@contextmanager
def masks_applied(
    model: nn.Module, targets: Sequence[Target], masks: Mapping[str, Tensor], keep: bool = True
) -> Iterator[None]:
    """Zero the masked weights for the body of the `with`.

    They stay zero afterwards if `keep` is set and the body returned. If it raised, or was interrupted, every weight
    has its original bits again: the originals of the pruned weights alone are kept until then.
    """
    originals: list[tuple[Tensor, Tensor, Tensor]] = []
    keeping = False
    try:
        with torch.no_grad():
            for target in targets:
                weight, mask = target.matrix(model), masks[target.name]
                originals.append((weight, mask, weight.masked_select(mask)))  # before the write: nothing is lost
                weight.masked_fill_(mask, 0)
        yield
        keeping = keep
    finally:
        if not keeping:
            with torch.no_grad():
                while originals:  # each is let go as soon as it is back
                    weight, mask, values = originals.pop()
                    weight.masked_scatter_(mask, values)
