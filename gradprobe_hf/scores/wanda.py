"""Wanda: weights that are small, or whose input is.

Source: Sun et al. 2023, A Simple and Effective Pruning Approach for Large Language Models (arXiv:2306.11695), eq. 1.
"""

from torch import Tensor


def wanda_score(weight: Tensor, input_sq: Tensor) -> Tensor:
    """`score[o, i] = |W[o, i]| * ||x_i||_2`, `[out, in]`, compared within a row.

    Args:
        weight: `[out, in]`.
        input_sq: sum over the calibration tokens of each input squared, `[in]` (or anything that broadcasts).

    >>> import torch
    >>> wanda_score(torch.tensor([[-2.0, 1.0]]), torch.tensor([1.0, 9.0]))
    tensor([[2., 3.]])
    """
    return weight.abs() * input_sq.sqrt()
