"""Fisher: the loss that removing a weight adds, to second order.

With the Hessian's diagonal estimated by the empirical Fisher F (squared gradients of the summed loss), removing w_i
adds about `w_i^2 F_i / 2`. Sources: LeCun et al. 1989, Optimal Brain Damage, eq. 5, for the diagonal; Theis et al. 2018
(arXiv:1801.05787) for the empirical Fisher in its place. The factor 1/2 changes no order and is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from gradprobe_hf.scores.evidence import Evidence, MatrixEvidence
from gradprobe_hf.scores.terms import MARGINALS, Term


def fisher_score(weight: Tensor, fisher: Tensor) -> Tensor:
    """`score = W^2 * F`, `[out, in]`. With two probes F sums over both: the curvature along the path between them.

    >>> import torch
    >>> fisher_score(torch.tensor([[-2.0, 1.0]]), torch.tensor([[1.0, 3.0]]))
    tensor([[4., 3.]])
    """
    return weight.square() * fisher


def blended_fisher(sequence: Tensor, factored: Tensor) -> Tensor:
    """`F = sqrt(S * K)`, `[out, in]`: the detail of the sequence Fisher S, steadied by the factored Fisher K.

    S sums one squared gradient per sequence: unbiased, but noisy with few sequences. K is the outer product of two
    marginals: nearly free of noise, but blind to which input goes with which output gradient. The geometric mean lets
    each correct the other.

    >>> import torch
    >>> blended_fisher(torch.tensor([[4.0]]), torch.tensor([[9.0]]))
    tensor([[6.]])
    """
    # Roots before the product: S * K underflows in float32.
    return sequence.sqrt() * factored.sqrt()


@dataclass(frozen=True)
class FisherEstimate:
    """One estimate of the squared gradient.

    Attributes:
        function: statistics of a matrix and a slice of its rows -> F, `[rows, in]`.
        terms: the statistics that it reads.
        sentence: what a weight's square is multiplied by, for the model card.
    """

    function: Callable[[MatrixEvidence, slice], Tensor]
    terms: tuple[Term, ...]
    sentence: str


FISHER_ESTIMATES: dict[str, FisherEstimate] = {
    "blend": FisherEstimate(
        lambda known, rows: blended_fisher(known.read("sequence", rows), known.factored(rows)),
        ("sequence", MARGINALS),
        "the geometric mean of its squared gradient summed over sequences and of that sum's factored estimate",
    ),
    "sequence": FisherEstimate(
        lambda known, rows: known.read("sequence", rows),
        ("sequence",),
        "its squared gradient, summed over sequences",
    ),
    "token": FisherEstimate(
        lambda known, rows: known.read("token", rows),
        ("token",),
        "its squared gradient, summed over tokens",
    ),
    "factored": FisherEstimate(
        lambda known, rows: known.factored(rows),
        (MARGINALS,),
        "the product of its input's and its output gradient's energy",
    ),
}


def estimated_fisher(statistics: MatrixEvidence, estimate: str, rows: slice) -> Tensor:
    """F, `[rows, in]`, summed over the probes made so far."""
    return FISHER_ESTIMATES[estimate].function(statistics, rows)


def score_by_fisher(evidence: Evidence) -> Tensor:
    """`W^2 F` of some rows; see `unreached_score` for a matrix that the loss does not depend on."""
    if not evidence.statistics.reached:
        return unreached_score(evidence.weight)
    return fisher_score(evidence.weight, estimated_fisher(evidence.statistics, evidence.fisher, evidence.rows))


def unreached_score(weight: Tensor) -> Tensor:
    """Without any evidence the weights of a matrix go after all others, among themselves by magnitude."""
    return 1e38 * (1 + weight.abs() / (1 + weight.abs()))
