"""Sequence gradients: the gradient of a weight for each sequence of a batch, from inputs and output gradients.

Shapes: x `[sequences, tokens, in]`, d `[sequences, tokens, out]`. Each gradient is `[out, in]`, and they come one at a
time, so that only one has to be in memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def linear_gradients(x: Tensor, d: Tensor) -> Iterator[Tensor]:
    """`sum_t d_t x_t^T` of each sequence in turn.

    >>> x, d = torch.tensor([[[1.0, 2.0], [3.0, 0.0]]]), torch.tensor([[[1.0], [10.0]]])
    >>> list(linear_gradients(x, d))
    [tensor([[31.,  2.]])]
    """
    for x_s, d_s in zip(x, d, strict=True):
        # float16 ends at 65,504, which the gradient of a summed loss exceeds; bfloat16 has the range of float32.
        yield d_s.float().t() @ x_s.float() if d_s.dtype == torch.float16 else d_s.t() @ x_s


def embedding_gradients(ids: Tensor, d: Tensor, shape: tuple[int, int]) -> Iterator[Tensor]:
    """The same for an embedding `[tokens, features]`, whose input x_t is one-hot: ids `[sequences, tokens]`.

    >>> list(embedding_gradients(torch.tensor([[1, 1]]), torch.tensor([[[1.0], [10.0]]]), (2, 1)))
    [tensor([[ 0.],
            [11.]])]
    """
    # In float32 at least: a frequent token adds up thousands of terms.
    dtype = torch.promote_types(d.dtype, torch.float32)
    for ids_s, d_s in zip(ids, d, strict=True):
        yield torch.zeros(shape, dtype=dtype, device=d.device).index_add_(0, ids_s, d_s.to(dtype))
