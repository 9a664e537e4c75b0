"""Magnitude: the smallest weights go.

Source: Han et al. 2015, Learning both Weights and Connections (arXiv:1506.02626).
"""

from torch import Tensor


def magnitude_score(weight: Tensor) -> Tensor:
    """`score[o, i] = |W[o, i]|`, `[out, in]`.

    >>> import torch
    >>> magnitude_score(torch.tensor([[-2.0, 1.0]]))
    tensor([[2., 1.]])
    """
    return weight.abs()
