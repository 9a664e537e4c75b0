"""The table of scores: how weights are ordered. To add one: a pure function in a file of its own, and a row here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from gradprobe_hf.scores.budget import Scope
from gradprobe_hf.scores.evidence import Evidence
from gradprobe_hf.scores.fisher import score_by_fisher, unreached_score
from gradprobe_hf.scores.magnitude import magnitude_score
from gradprobe_hf.scores.random import random_score
from gradprobe_hf.scores.terms import MARGINALS, Term
from gradprobe_hf.scores.wanda import wanda_score

Measured = Literal["weights", "inputs", "gradients"]


@dataclass(frozen=True, kw_only=True)
class Score:
    """One way to order weights.

    Attributes:
        function: evidence about some rows of a matrix -> scores `[rows, in]`, none negative; the lowest go first.
        measured: what it takes to know them: the weights alone, one forward pass (inputs), or a probe (gradients).
        terms: statistics that it reads.
        uses_fisher: whether it reads those of the configured Fisher estimate too.
        scope: over what its source spends one budget; the default.
        sentence: for the model card; `{fisher}` stands for the Fisher estimate's own words.
        refuses: option -> why it cannot be combined with this score.
        source: paper and equation.
    """

    function: Callable[[Evidence], Tensor]
    measured: Measured
    terms: tuple[Term, ...] = ()
    uses_fisher: bool = False
    scope: Scope
    sentence: str
    refuses: Mapping[str, str] = field(default_factory=dict)
    source: str

    @property
    def default_probes(self) -> int:
        """2 for a score of gradients; one that is published without a probe has none."""
        return 2 if self.measured == "gradients" else 0


def _magnitude(evidence: Evidence) -> Tensor:
    return magnitude_score(evidence.weight)


def _random(evidence: Evidence) -> Tensor:
    drawn = random_score(evidence.rows, evidence.inputs, evidence.name, evidence.seed)
    return drawn[:, evidence.columns].to(evidence.weight.device)


def _wanda(evidence: Evidence) -> Tensor:
    if not evidence.statistics.reached:
        return unreached_score(evidence.weight)
    return wanda_score(evidence.weight, evidence.statistics.input_sq(evidence.rows))


SCORES: dict[str, Score] = {
    "fisher": Score(
        function=score_by_fisher,
        measured="gradients",
        uses_fisher=True,
        scope="global",
        sentence="The loss gradient was measured over the calibration data. Each weight was scored by its square times "
        "{fisher}: an estimate of the loss that removing it adds.",
        source="LeCun et al. 1989, eq. 5; Theis et al. 2018 (arXiv:1801.05787)",
    ),
    "wanda": Score(
        function=_wanda,
        measured="inputs",
        terms=(MARGINALS,),
        scope="row",
        sentence="Each weight was scored by its magnitude times the norm of its input over the calibration data "
        "(Wanda).",
        source="Sun et al. 2023 (arXiv:2306.11695), eq. 1",
    ),
    "magnitude": Score(
        function=_magnitude,
        measured="weights",
        scope="tensor",
        sentence="Each weight was scored by its magnitude.",
        source="Han et al. 2015 (arXiv:1506.02626)",
    ),
    "random": Score(
        function=_random,
        measured="weights",
        scope="tensor",
        sentence="Each weight was given a random score.",
        source="the baseline every other score has to beat",
    ),
}
