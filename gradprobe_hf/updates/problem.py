"""The problem that a weight update solves, and its solution: one weight matrix, its inputs and what goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from gradprobe_hf.scores.budget import Budget


class InputSums(NamedTuple):
    """Sums over the inputs of one matrix, some tokens' or all.

    Attributes:
        hessian: `H = sum_t x_t x_t^T`, `[in, in]`, x_t the inputs in the model as pruned so far.
        drift: `D = sum_t (x'_t - x_t) x_t^T`, `[in, in]`, to the inputs x' in the dense model; None: not collected.
        tokens: how many they are.
    """

    hessian: Tensor
    drift: Tensor | None
    tokens: int


@dataclass(frozen=True)
class MatrixProblem:
    """What is known of one matrix; all tensors in float32, or float64 for a float64 model.

    Attributes:
        weight: W, `[out, in]`.
        hessian, drift: H and D of all tokens, as in `InputSums`.
        dense_target: the share of the way from the outputs `W x` to the dense model's `W x'`, in [0, 1].
        damping: added to the diagonal of H, as a fraction of its mean.
        budget: for updates that choose or revise the mask.
        row_fisher: mean Fisher information of the weights of each row, `[out]`; None: unknown.
        held_out: those of the rows that are held out, to choose the damping by; None: it is given.
        tokens: of how many H is the sum, or more; None: unknown.
    """

    weight: Tensor
    hessian: Tensor
    drift: Tensor | None
    dense_target: float
    damping: float
    budget: Budget
    row_fisher: Tensor | None = None
    held_out: InputSums | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class Solution:
    """Attributes: `values [out, in]`, zero under `mask` (bool, True = pruned), and the damping that it took."""

    values: Tensor
    mask: Tensor
    damping: float
