"""Gates: how the loss changes with whole units of a matrix's inputs, FFN channels or attention heads.

Imagine a gate, a factor 1, on the inputs of each unit u: consecutive columns of the matrix W. With x_t the input, d_t
the gradient of the summed loss at the output, for token t of sequence s, the derivative in the gate is

    g[s, u] = sum_{t in s} sum_{c in u} x_tc (W^T d_t)_c

A bias is of no unit, unless one unit is all of the inputs: the gate is on the output then, and g has `b . sum_t d_t`
too.

The sums over sequences are two vectors a matrix, however wide it is:

    squares   sum_s g[s, u]^2     [units], the group's Fisher information, with all cross terms inside it
    total     sum_s g[s, u]       [units]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from gradprobe_hf.runtime.processes import Processes


class GateSums:
    """The sums of one matrix.

    Args:
        units: how many there are, each of as many consecutive inputs.
        dtype: of the sums, float32 or float64.
        device: where the matrix is computed with.
    """

    def __init__(self, units: int, dtype: torch.dtype, device: torch.device) -> None:
        self.squares = torch.zeros(units, dtype=dtype, device=device)
        self.total = torch.zeros(units, dtype=dtype, device=device)

    @property
    def is_whole(self) -> bool:
        """Whether one unit is all of the inputs, an expert say."""
        return len(self.total) == 1

    def add(self, x: Tensor, input_grad: Tensor, offset: Tensor | None = None) -> None:
        """Fold sequences.

        Args:
            x, input_grad: x and `W^T d`, both `[sequences, tokens, in]`.
            offset: of one unit that is all of the inputs, `b . sum_t d_t`, `[sequences]`.
        """
        # Widened before they are multiplied: small float16 gradients would vanish.
        each = (x.to(self.total.dtype) * input_grad).sum(1).unflatten(1, (len(self.total), -1)).sum(2)
        if offset is not None:
            each = each + offset[:, None]
        self.squares += each.square().sum(0)
        self.total += each.sum(0)

    def reduce(self, processes: Processes) -> None:
        """Make the sums those of all processes. A collective."""
        both = processes.sum_(torch.stack([self.squares, self.total]))
        self.squares, self.total = both.unbind()

    def state(self) -> Iterator[tuple[str, Tensor]]:
        yield "gates.squares", self.squares
        yield "gates.total", self.total

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Become what `state` was taken of."""
        device = self.total.device
        self.squares, self.total = (tensors[f"gates.{name}"].to(device, copy=True) for name in ("squares", "total"))
