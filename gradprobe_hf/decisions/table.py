"""The table of decisions: which weights go, given their scores and up to two probes.

A second probe measures the loss gradient again with the candidates, the weights that the score would remove, shrunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from gradprobe_hf.decisions.threshold import threshold_mask
from gradprobe_hf.scores.budget import Scope
from gradprobe_hf.scores.evidence import Evidence
from gradprobe_hf.scores.fisher import score_by_fisher
from gradprobe_hf.scores.terms import Term


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One way to decide.

    Attributes:
        probes, rule: the values of these options that mean this decision.
        function: scores weights by the sums over both probes; None: the score's own order decides.
        filters: instead of scoring, keeps some of the candidates: see `threshold_mask`.
        terms: statistics that each probe makes for it; `uses_fisher`: those of the Fisher estimate too.
        keeps_second: whether the second probe has statistics of its own; otherwise it adds to those of the first.
        limits_spikes: whether `spike_limit` applies to the second probe.
        scope: over what the budget is spent by default; None: the score's.
        sentence: for the model card. It may name `{score}`, `{fisher}`, `{unit}`, `{candidate_unit}`, `{threshold}`,
            `{limit}` and `{reduction_factor}`.
        refuses: option -> why it cannot be combined with this decision.
        source: paper, repository, or this package.
    """

    probes: tuple[int, ...]
    rule: str
    function: Callable[[Evidence], Tensor] | None = None
    filters: Callable[[Tensor, Tensor, Tensor, float, Tensor], Tensor] | None = None
    terms: tuple[Term, ...] = ()
    uses_fisher: bool = False
    keeps_second: bool = False
    limits_spikes: bool = False
    scope: Scope | None = None
    sentence: str
    refuses: Mapping[str, str] = field(default_factory=dict)
    source: str

    @property
    def has_second_probe(self) -> bool:
        return 2 in self.probes


_GIVES_BACK = "it gives candidates back, so {option} would not hold"

DECISIONS: dict[str, Decision] = {
    "score": Decision(
        probes=(0, 1),
        rule="budget",
        sentence="{score} The lowest scores were set to zero, with one exact budget over {unit}.",
        source="every published score",
    ),
    "path": Decision(
        probes=(2,),
        rule="budget",
        function=score_by_fisher,
        uses_fisher=True,
        limits_spikes=True,
        scope="global",
        sentence="The loss gradient was measured twice over the calibration data: at the original weights, and with "
        "the candidates, the weights that `{score_name}` alone would remove, multiplied by {reduction_factor}. Each "
        "weight was scored by its square times {fisher}, added over both measurements: an estimate of the loss that "
        "removing it adds. {limit}The lowest scores were set to zero, with one exact budget over {unit}.",
        source="this package; docs/method.md",
    ),
    "threshold": Decision(
        probes=(2,),
        rule="threshold",
        filters=threshold_mask,
        terms=("peak",),
        keeps_second=True,
        sentence="Candidates were proposed by `{score_name}` with a budget over {candidate_unit}, and tentatively "
        "multiplied by {reduction_factor}. A candidate was set to zero if its gradient's largest magnitude grew by no "
        "more than {threshold}; the others were given back, so the budget is an upper bound.",
        refuses={
            "pattern": _GIVES_BACK,
            "min_matrix_sparsity": _GIVES_BACK,
            "max_matrix_sparsity": _GIVES_BACK,
            "rounds": "it has one threshold, not several budgets",
            "max_metric_drop": "it has one threshold, not several budgets; sweep_gradient_thresholds searches",
        },
        source="github.com/dcifrian/GradProbe",
    ),
}
RULES = tuple(dict.fromkeys(row.rule for row in DECISIONS.values()))
