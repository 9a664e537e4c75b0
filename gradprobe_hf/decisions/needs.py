"""What a method has to measure before it can decide, from the rows of the three tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gradprobe_hf.decisions.table import Decision
from gradprobe_hf.scores.fisher import FISHER_ESTIMATES
from gradprobe_hf.scores.table import Score
from gradprobe_hf.scores.terms import GATES, Term


@dataclass(frozen=True)
class Needs:
    """Attributes: `terms` of the first probe's statistics (or of a forward pass), and the kind of `passes`: none over
    any text, forward passes alone, or probes."""

    terms: frozenset[Term]
    passes: Literal["none", "forward", "probe"]

    @property
    def probes(self) -> bool:
        return self.passes == "probe"

    @property
    def accumulates(self) -> bool:
        """Whether something is summed for every weight, or could be; gates are summed for whole units."""
        return self.probes and GATES not in self.terms


def needs_of(score: Score | None, decision: Decision, fisher: str, *, changes_weights: bool) -> Needs:
    """The least that the candidates, the decision and the update can be made from.

    Args:
        score: None where the update chooses the mask.
        fisher: a key of `FISHER_ESTIMATES`.
        changes_weights: whether kept weights are changed for the activations of a text.
    """
    terms: set[Term] = {*decision.terms, *(score.terms if score else ())}
    if uses_fisher(score, decision):
        terms.update(FISHER_ESTIMATES[fisher].terms)
    measured = score.measured if score else "weights"
    if decision.has_second_probe or measured == "gradients":
        return Needs(frozenset(terms), "probe")
    reads_text = measured == "inputs" or changes_weights
    return Needs(frozenset(terms), "forward" if reads_text else "none")


def uses_fisher(score: Score | None, decision: Decision) -> bool:
    return decision.uses_fisher or (score is not None and score.uses_fisher)
