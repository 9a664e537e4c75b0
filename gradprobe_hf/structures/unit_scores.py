"""The table of what units are worth: which FFN channels and groups of heads of a block go.

With W `[out, in]` the matrix that reads the units, x_t its input and d_t the gradient of the loss at its output for
token t of sequence s, and u the consecutive columns of one unit. To add one: a function of the evidence, and a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from gradprobe_hf.scores.random import random_score
from gradprobe_hf.structures.importance import least_missed

Measured = frozenset[Literal["inputs", "gradients"]]
NOTHING: Measured = frozenset()
INPUTS: Measured = frozenset({"inputs"})
GRADIENTS: Measured = frozenset({"gradients"})


@dataclass(frozen=True)
class UnitEvidence:
    """What is known of the units of one matrix.

    Attributes:
        weight: W, `[out, in]`, float32 or float64.
        count: of units, each of `in / count` consecutive columns.
        name: of the matrix.
        seed: of the configuration.
        inverse: `(sum_t x_t x_t^T + damping I)^-1`, `[in, in]`, where inputs were measured.
        damping: that number.
        input_sq: `sum_t x_t^2`, `[in]`, where inputs were measured.
        output_sq: `sum_t ||W_u x_t,u||^2`, `[count]`, where inputs were measured.
        gate_squares, gate_total: `sum_s g[s, u]^2` and `sum_s g[s, u]`, `[count]`, where gradients were: with a gate on
            each unit, `g[s, u] = sum_{t in s} sum_{c in u} x_tc (W^T d_t)_c` is the derivative of the loss in it.
        gone: which went already, bool `[count]`; None: none.
    """

    weight: Tensor
    count: int
    name: str
    seed: int
    inverse: Tensor | None = None
    damping: Tensor | float = 0.0
    input_sq: Tensor | None = None
    output_sq: Tensor | None = None
    gate_squares: Tensor | None = None
    gate_total: Tensor | None = None
    gone: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class UnitScore:
    """One way to tell which units go.

    Attributes:
        chosen: evidence and how many units go -> which, bool `[count]`.
        measured: what it takes to know: the inputs of the matrix, by a forward pass, and its gradients, by a probe.
        sentence: for the model card.
        source: paper and section.
    """

    chosen: Callable[[UnitEvidence, int], Tensor]
    measured: Measured
    sentence: str
    source: str

    @property
    def takes_rounds(self) -> bool:
        """Whether units can go in portions with all anew measured before each: inputs are those of a model with all."""
        return self.measured == GRADIENTS


def lowest(score: Callable[[UnitEvidence], Tensor], evidence: UnitEvidence, going: int) -> Tensor:
    """The units with the lowest scores, bool `[count]`, those that went already among them; of equal ones the first."""
    return lowest_of(score(evidence), going, evidence.gone)


def lowest_of(scores: Tensor, going: int, before: Tensor | None = None) -> Tensor:
    """So many of the lowest of these, bool of the same shape, `[count]`; of equal ones the first.

    Args:
        before: which are among them in any case.
    """
    scores = scores.cpu()
    if before is not None:
        scores = scores.masked_fill(before, -torch.inf)
    return torch.zeros(len(scores), dtype=torch.bool).index_fill_(0, scores.argsort(stable=True)[:going], True)


def wanda_unit_scores(evidence: UnitEvidence) -> Tensor:
    """`sum_o sum_{c in u} |W_oc| sqrt(sum_t x_tc^2)`, `[count]`."""
    assert evidence.input_sq is not None, "inputs were measured"
    return _by_unit(evidence.weight.abs().sum(0) * evidence.input_sq.sqrt(), evidence.count)


def fisher_unit_scores(evidence: UnitEvidence) -> Tensor:
    """`sum_s g[s, u]^2`, `[count]`: the Fisher information of the unit's gate."""
    assert evidence.gate_squares is not None, "gradients were measured"
    return evidence.gate_squares


def taylor_unit_scores(evidence: UnitEvidence) -> Tensor:
    """`|sum_s g[s, u]|`, `[count]`: how the loss changes with the unit's gate, to first order."""
    assert evidence.gate_total is not None, "gradients were measured"
    return evidence.gate_total.abs()


def random_unit_scores(evidence: UnitEvidence) -> Tensor:
    """Uniform in [0, 1), `[count]`."""
    return random_score(slice(0, 1), evidence.count, evidence.name, evidence.seed)[0]


def _by_unit(columns: Tensor, count: int) -> Tensor:
    return columns.unflatten(0, (count, -1)).sum(1)


def _obs(evidence: UnitEvidence, going: int) -> Tensor:
    assert evidence.inverse is not None, "inputs were measured"
    return least_missed(evidence.weight, evidence.inverse, evidence.count, going)


def _obs_by_loss(evidence: UnitEvidence, going: int) -> Tensor:
    inverse, outputs, gates = evidence.inverse, evidence.output_sq, evidence.gate_squares
    assert inverse is not None, "inputs were measured"
    assert outputs is not None, "inputs were measured"
    assert gates is not None, "gradients were measured"
    # A unit without outputs has no error that a factor could weigh.
    factors = (gates.to(outputs) / outputs).nan_to_num_(0.0, posinf=0.0).sqrt_()
    return least_missed(evidence.weight, inverse, evidence.count, going, factors, evidence.damping)


UNIT_SCORES: dict[str, UnitScore] = {
    "obs": UnitScore(
        chosen=_obs,
        measured=INPUTS,
        sentence="Inside a block those units went that the others could make up for best in its outputs on the "
        "calibration inputs (Optimal Brain Surgeon on whole columns).",
        source="Hassibi and Stork 1993; for units Kurtic et al. 2023, ZipLM (arXiv:2302.04089)",
    ),
    "obs+fisher": UnitScore(
        chosen=_obs_by_loss,
        measured=INPUTS | GRADIENTS,
        sentence="Inside a block those units went that the others could make up for best in its outputs on the "
        "calibration inputs (Optimal Brain Surgeon on whole columns), an error of a unit's weighted by the root of "
        "how much the loss depends on it (the Fisher information of its gate over its squared outputs).",
        source="as of obs and fisher; their product is this package's own",
    ),
    "wanda": UnitScore(
        chosen=partial(lowest, wanda_unit_scores),
        measured=INPUTS,
        sentence="Inside a block those units went whose weights, each times the norm of its input on the calibration "
        "text, were smallest together (Wanda-sp).",
        source="Sun et al. 2023 (arXiv:2306.11695); for units An et al. 2023, FLAP (arXiv:2312.11983), its baseline",
    ),
    "fisher": UnitScore(
        chosen=partial(lowest, fisher_unit_scores),
        measured=GRADIENTS,
        sentence="Inside a block those units went whose gate had the lowest Fisher information: the squared derivative "
        "of the loss of a sequence in a factor on the whole unit, summed over the calibration sequences.",
        source="Kwon et al. 2022 (arXiv:2204.09656); Liu et al. 2021, Group Fisher (arXiv:2108.00708)",
    ),
    "taylor": UnitScore(
        chosen=partial(lowest, taylor_unit_scores),
        measured=GRADIENTS,
        sentence="Inside a block those units went without which the calibration loss would change least to first "
        "order.",
        source="Molchanov et al. 2019 (arXiv:1906.10771); Ma et al. 2023, LLM-Pruner (arXiv:2305.11627)",
    ),
    "random": UnitScore(
        chosen=partial(lowest, random_unit_scores),
        measured=NOTHING,
        sentence="Inside a block it was random which units went.",
        source="",
    ),
}
