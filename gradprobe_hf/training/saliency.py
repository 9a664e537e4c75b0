"""Saliency: how much a weight matters, from what AdamW knows of it. One pure function each; the lowest go first.

Layout: weight `w`, first moment `m` (the running mean of its gradient) and second moment `v` (of its square), all of
one shape, float32; `epsilon` is a scalar tensor that is small beside sqrt(v) of this matrix. An absolute 1e-8 is not:
where v is about 5e-10, as in fine-tuning, sqrt(v) is 2e-5, but where it is 1e-16 such an epsilon takes the place of v,
and the saliency becomes another. No saliency is negative: `ordered` makes a signed one so.

Sources: magnitude, Han et al. 2015 (arXiv:1506.02626); Fisher, Theis et al. 2018 (arXiv:1801.05787), with AdamW's v for
the mean squared gradient; movement, Sanh et al. 2020 (arXiv:2005.07683), with m for the gradient. The others are those
of the state-based pruning study that this package starts from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Saliency = Literal[
    "magnitude", "fourth-root", "momentum", "gradient-product", "signal-to-noise", "movement", "state-fisher"
]


def magnitude(w: Tensor) -> Tensor:
    """`|w|`"""
    return w.abs()


def fourth_root(w: Tensor, v: Tensor) -> Tensor:
    """`|w| v^(1/4)`: half way between magnitude and Fisher."""
    return w.abs() * v.sqrt().sqrt()


def momentum(w: Tensor, m: Tensor) -> Tensor:
    """`|w| sqrt(|m|)`"""
    return w.abs() * m.abs().sqrt()


def gradient_product(w: Tensor, m: Tensor, v: Tensor, epsilon: Tensor) -> Tensor:
    """`|w m| |w| / sqrt(v)`: the first-order change of the loss, by the size of AdamW's step."""
    return (w * w * m).abs() / (v.sqrt() + epsilon)


def signal_to_noise(w: Tensor, m: Tensor, v: Tensor, epsilon: Tensor) -> Tensor:
    """`|w| sqrt(|m|) sqrt(m^2 / v)`: momentum, where the gradient agrees with itself."""
    return w.abs() * m.abs().sqrt() * (m.abs() / (v.sqrt() + epsilon))


def movement(w: Tensor, m: Tensor, v: Tensor, epsilon: Tensor) -> Tensor:
    """`-w m / sqrt(v)`, made non-negative in the same order: a weight that training moves to zero goes first.

    A weight that is zero scores 0 here and lies in the middle of the others: the selection lets it go before all.
    """
    return ordered(-w * m / (v.sqrt() + epsilon))


def state_fisher(w: Tensor, v: Tensor) -> Tensor:
    """`w^2 v`, as its root `|w| sqrt(v)`: the same order, and no underflow."""
    return w.abs() * v.sqrt()


# Each with the arguments it takes beside the weight.
SALIENCIES: dict[Saliency, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    "magnitude": (magnitude, ()),
    "fourth-root": (fourth_root, ("v",)),
    "momentum": (momentum, ("m",)),
    "gradient-product": (gradient_product, ("m", "v", "epsilon")),
    "signal-to-noise": (signal_to_noise, ("m", "v", "epsilon")),
    "movement": (movement, ("m", "v", "epsilon")),
    "state-fisher": (state_fisher, ("v",)),
}
MOMENTS = {"m": "exp_avg", "v": "exp_avg_sq"}  # by torch's names


def reads(saliency: Saliency) -> tuple[str, ...]:
    """What it reads of the optimizer's state."""
    return tuple(MOMENTS[name] for name in SALIENCIES[saliency][1] if name in MOMENTS)


def ordered(signed: Tensor) -> Tensor:
    """Float32 of any sign -> non-negative float32 in the same order, two bits coarser (-0.0 as 0.0, NaN as NaN).

    The bits of a float, those of a negative one inverted, order like the value; without their lowest two they are the
    bits of a non-negative float again.

    >>> ordered(torch.tensor([-2.0, -1.0, -1e-30, 0.0, 1e-30, 3.0])).argsort().tolist()
    [0, 1, 2, 3, 4, 5]
    """
    bits = (signed.float() + 0.0).view(torch.int32)
    shifted = torch.where(bits < 0, ~bits, bits + -(2**31))  # orders like the value, read as unsigned
    return ((shifted >> 2) & 0x3FFF_FFFF).view(torch.float32).masked_fill_(signed.isnan(), torch.nan)
