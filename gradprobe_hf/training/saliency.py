"""Saliencies: how much a weight matters, from AdamW's state. One pure function each; the lowest are pruned first.

Layout: weight `w`, first moment `m` (running mean of the gradient) and second moment `v` (of its square), of one shape
and in float32. `epsilon` is a scalar tensor, small beside sqrt(v) of this matrix. AdamW's absolute 1e-8 would not do:
with v about 5e-10, as in fine-tuning, sqrt(v) is 2e-5, but with v below 1e-16 such an epsilon takes the place of v, and
the saliency becomes another. No saliency is negative, because the selection sorts by bits: see `nonnegative`.

Sources: magnitude, Han et al. 2015 (arXiv:1506.02626); Fisher, Theis et al. 2018 (arXiv:1801.05787), with AdamW's v for
the mean squared gradient; movement, Sanh et al. 2020 (arXiv:2005.07683), with m for the gradient. The others are
heuristics of the notes that this package began with; we know of no paper that has them.
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
    """`|w|`."""
    return w.abs()


def fourth_root(w: Tensor, v: Tensor) -> Tensor:
    """`|w| v^(1/4)`: halfway between magnitude and Fisher."""
    return w.abs() * v.sqrt().sqrt()


def momentum(w: Tensor, m: Tensor) -> Tensor:
    """`|w| sqrt(|m|)`."""
    return w.abs() * m.abs().sqrt()


def gradient_product(w: Tensor, m: Tensor, v: Tensor, epsilon: Tensor) -> Tensor:
    """`|w m| |w| / sqrt(v)`: the first-order change of the loss, by the size of AdamW's step."""
    return (w * w * m).abs() / (v.sqrt() + epsilon)


def signal_to_noise(w: Tensor, m: Tensor, v: Tensor, epsilon: Tensor) -> Tensor:
    """`|w| sqrt(|m|) sqrt(m^2 / v)`: momentum, where gradients of successive steps agree."""
    return w.abs() * m.abs().sqrt() * (m.abs() / (v.sqrt() + epsilon))


def movement(w: Tensor, m: Tensor, v: Tensor, epsilon: Tensor) -> Tensor:
    """`-w m / sqrt(v)`, made non-negative in the same order: weights that training moves towards zero go first.

    A weight that is zero scores 0, in the middle of the others; the selection prunes zeros before everything else.
    """
    return nonnegative(-w * m / (v.sqrt() + epsilon))


def state_fisher(w: Tensor, v: Tensor) -> Tensor:
    """`w^2 v`, as its root `|w| sqrt(v)`: the same order without underflow."""
    return w.abs() * v.sqrt()


# The function, and the arguments that it takes beside the weight.
SALIENCIES: dict[Saliency, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    "magnitude": (magnitude, ()),
    "fourth-root": (fourth_root, ("v",)),
    "momentum": (momentum, ("m",)),
    "gradient-product": (gradient_product, ("m", "v", "epsilon")),
    "signal-to-noise": (signal_to_noise, ("m", "v", "epsilon")),
    "movement": (movement, ("m", "v", "epsilon")),
    "state-fisher": (state_fisher, ("v",)),
}
MOMENTS = {"m": "exp_avg", "v": "exp_avg_sq"}  # torch's names, the same in all of its Adam family


def state_names(saliency: Saliency) -> tuple[str, ...]:
    """Entries of the optimizer's state that a saliency reads.

    >>> state_names("movement")
    ('exp_avg', 'exp_avg_sq')
    """
    return tuple(MOMENTS[name] for name in SALIENCIES[saliency][1] if name in MOMENTS)


def nonnegative(signed: Tensor) -> Tensor:
    """Float32 of any sign -> non-negative float32 in the same order, two bits coarser; NaN stays NaN.

    >>> nonnegative(torch.tensor([-2.0, -1.0, -1e-30, 0.0, 1e-30, 3.0])).argsort().tolist()
    [0, 1, 2, 3, 4, 5]
    """
    # Non-negative floats order like their bits read as an integer, negative ones the other way round. Inverting all
    # bits of a negative float, and the sign bit alone of the others, gives unsigned integers in the order of the
    # values. `+ 0.0` turns -0.0 into 0.0 first: two bit patterns of one value would be two places in the order.
    bits = (signed.float() + 0.0).view(torch.int32)
    unsigned = torch.where(bits < 0, ~bits, bits + -(2**31))
    # Two bits less make room: below 2^30 an integer is the bits of a float in [0, 2), never of an infinity or NaN. The
    # shift of int32 is arithmetic, hence the mask. NaN has a place in that order too, which would hide it: put it back.
    return ((unsigned >> 2) & 0x3FFF_FFFF).view(torch.float32).masked_fill_(signed.isnan(), torch.nan)
