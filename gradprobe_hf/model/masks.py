"""Attention masks: which tokens are no padding."""

from __future__ import annotations

from typing import Any

from torch import Tensor

_UNSEEN = -1e3  # what is added to the score of a token that is not seen is less, in any dtype


def unpadded(mask: Any, tokens: Tensor) -> Tensor | None:
    """Which tokens a mask calls no padding, bool `[rows, tokens]`; None: it is none of these tokens.

    Of a mask of pairs, `[rows, tokens, tokens]` of zeros and ones or `[rows, heads, tokens, tokens]` as transformers
    hands it on, padding is what no token sees.

    Args:
        tokens: `[rows, tokens]`, or values of them.

    >>> import torch
    >>> unpadded(torch.tensor([[1, 1, 0]]), torch.tensor([[5, 6, 0]]))
    tensor([[ True,  True, False]])
    >>> unpadded(torch.tensor([[[[True, False, False], [True, True, False], [True, True, False]]]]), torch.ones(1, 3))
    tensor([[ True,  True, False]])
    """
    if not isinstance(mask, Tensor):
        return None
    if mask.shape == tokens.shape:
        return mask != 0
    is_of_pairs = tokens.ndim == 2 and mask.ndim in (3, 4) and (len(mask), mask.shape[-1]) == tuple(tokens.shape)
    if not is_of_pairs:
        return None
    sees = mask > _UNSEEN if mask.ndim == 4 and mask.is_floating_point() else mask != 0
    return sees.flatten(1, -2).any(1)
