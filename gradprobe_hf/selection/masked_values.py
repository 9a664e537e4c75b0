"""Masked values: those under a mask set to zero, or saved and restored."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def zero_masked_(matrix: Tensor, mask: Tensor) -> Tensor:
    """Set what is under the mask to 0.0, in place; NaN and infinity too.

    >>> zero_masked_(torch.tensor([[-1.0, 2.0, torch.nan]]), torch.tensor([[True, False, True]]))
    tensor([[0., 2., 0.]])
    """
    if matrix.device.type != "cpu":
        return matrix.masked_fill_(mask, 0)
    # An AND of bits: three times as fast as `masked_fill_`, which branches at every element.
    integers = _SAME_SIZE[matrix.element_size()]
    kept = mask.view(torch.uint8).to(integers).sub_(1)  # a mask of 1 becomes 0, and of 0 becomes -1: all bits set
    matrix.view(integers).bitwise_and_(kept)
    return matrix


class SavedValues:
    """A copy of the values under the masks of some matrices, to restore them bit for bit.

    Args:
        matrices: name -> matrix `[out, in]`, a view of the model's parameter.
        masks: name -> bool `[out, in]`.
    """

    def __init__(self, matrices: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> None:
        self.matrices, self.masks = matrices, masks
        # All values of one device and dtype share one tensor. Many small tensors, each allocated among the large
        # temporaries of `masked_select`, would leave the heap full of holes: with SmolLM2 up to a gigabyte.
        counts = {name: int(masks[name].sum()) for name in matrices}
        totals: dict[tuple[torch.device, torch.dtype], int] = {}
        for name, matrix in matrices.items():
            kind = (matrix.device, matrix.dtype)
            totals[kind] = totals.get(kind, 0) + counts[name]
        free = {(device, dtype): torch.empty(n, device=device, dtype=dtype) for (device, dtype), n in totals.items()}
        self._values: dict[str, Tensor] = {}
        for name, matrix in matrices.items():
            kind = (matrix.device, matrix.dtype)
            own, free[kind] = free[kind][: counts[name]], free[kind][counts[name] :]
            self._values[name] = own.copy_(matrix.masked_select(masks[name].to(matrix.device)))

    def restore(self) -> None:
        """Write the values back."""
        for name, values in self._values.items():
            matrix = self.matrices[name]
            matrix.masked_scatter_(self.masks[name].to(matrix.device), values)
