"""Rivals: published methods that the package does not have, for the tables of `quality.py`.

They are rows of the package's own tables, under names that only the benchmark knows, so that everything around them is
the same. A budget that differs by block or matrix comes as masks; an update "in budgets" reads from a mask how many
weights of a matrix go, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradprobe_hf.model.targets import Target
from gradprobe_hf.probe.engine import observe_inputs
from gradprobe_hf.probe.statistics import Statistics
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.run.diagnostics import Diagnostics
from gradprobe_hf.scores.budget import Budget
from gradprobe_hf.scores.evidence import Evidence
from gradprobe_hf.scores.fisher import unreached_score
from gradprobe_hf.scores.groups import group_mask, row_mask
from gradprobe_hf.scores.table import SCORES, Score
from gradprobe_hf.scores.wanda import wanda_score
from gradprobe_hf.selection.packed_masks import PackedMasks
from gradprobe_hf.updates.admm import solve_admm
from gradprobe_hf.updates.problem import MatrixProblem, Solution
from gradprobe_hf.updates.sweep import solve_sparsegpt
from gradprobe_hf.updates.table import UPDATES, WeightUpdate

GRADIENT_WEIGHT = 100.0  # alpha of GBLM-Pruner
OUTLIER = 5.0  # M of OWL: an outlier is so many times the mean
RANGE = 0.08  # lambda of OWL: how far from the mean sparsity a block may be; twice that between the extremes

Masks = Callable[[RunContext, Diagnostics], PackedMasks]


def gblm_score(weight: Tensor, input_sq: Tensor, gradient_sq: Tensor, sequences: int, terms: int) -> Tensor:
    """`|W| * (||X_j|| + alpha ||G||)`, `[out, in]`, compared within a row (GBLM-Pruner's l2 form).

    G are the gradients of each sequence's *mean* loss, and ||X_j||^2 is a mean over sequences, as its code has them.

    Args:
        input_sq: sum over all tokens of each input squared, `[in]`.
        gradient_sq: sum over sequences of the squared gradient of each one's *summed* loss, `[out, in]`.
        sequences, terms: how many sequences there are, and of how many terms the loss of one is a sum.

    >>> weight, ones = torch.tensor([[-2.0, 1.0]]), torch.ones(1, 2)
    >>> gblm_score(weight, torch.tensor([4.0, 16.0]), ones, sequences=4, terms=10)
    tensor([[22., 12.]])
    """
    return weight.abs() * ((input_sq / sequences).sqrt() + GRADIENT_WEIGHT * gradient_sq.sqrt() / terms)


def gblm(sequences: int, length: int) -> Score:
    """The score of so many windows of so many tokens."""

    def score(evidence: Evidence) -> Tensor:
        known, rows = evidence.statistics, evidence.rows
        if not known.reached:
            return unreached_score(evidence.weight)
        squares = known.read("sequence", rows)
        return gblm_score(evidence.weight, known.input_sq(rows), squares, sequences, length - 1)

    return Score(
        function=score,
        measured="gradients",
        terms=("sequence", "marginals"),
        scope="row",
        sentence="GBLM-Pruner.",
        source="Das et al. 2023 (arXiv:2311.04902); github.com/VILA-Lab/GBLM-Pruner",
    )


def solve_wanda(problem: MatrixProblem, mask: Tensor | None) -> Solution:  # noqa: ARG001 - it chooses its own
    """Wanda on the inputs as the blocks pruned before hand them on: as its authors' code and llm-compressor do it."""
    scores, budget = wanda_score(problem.weight, problem.hessian.diagonal()), problem.budget
    per_row = round(budget.sparsity * scores.shape[1])
    goes = row_mask(scores, per_row) if budget.group is None else group_mask(scores, *budget.group)
    return Solution(problem.weight.masked_fill(goes, 0), goes, problem.damping)


def solve_sparsegpt_in_budgets(problem: MatrixProblem, mask: Tensor | None) -> Solution:
    """SparseGPT with as many weights as a mask has of this matrix."""
    return solve_sparsegpt(_as_many(problem, mask), None)


def solve_admm_in_budgets(problem: MatrixProblem, mask: Tensor | None) -> Solution:
    """SparseGPT, its mask revised by ADMM, with as many weights as a mask has of this matrix."""
    within = _as_many(problem, mask)
    return solve_admm(within, solve_sparsegpt(within, None).mask)


def _as_many(problem: MatrixProblem, mask: Tensor | None) -> MatrixProblem:
    assert mask is not None, "it has the budget"
    return replace(problem, budget=Budget(int(mask.sum()) / mask.numel(), "tensor"), row_fisher=None)


_NO_PATTERN = {"pattern": "a pattern prunes every matrix alike"}
RIVAL_UPDATES = {
    "wanda by block": WeightUpdate(
        function=solve_wanda,
        chooses_mask=True,
        scope="row",
        sentence="Wanda, block by block.",
        source="Sun et al. 2023 (arXiv:2306.11695); github.com/locuslab/wanda",
    ),
    "sparsegpt in budgets": WeightUpdate(
        function=solve_sparsegpt_in_budgets,
        sentence="SparseGPT in each matrix's budget.",
        refuses=_NO_PATTERN,
        source="Frantar and Alistarh 2023 (arXiv:2301.00774)",
    ),
    "sparsegpt+admm in budgets": WeightUpdate(
        function=solve_admm_in_budgets,
        dense_target=0.25,
        sentence="SparseGPT in each matrix's budget, its mask revised by ADMM.",
        refuses=_NO_PATTERN,
        source="Frantar and Alistarh 2023 (arXiv:2301.00774); Boža 2024 (arXiv:2401.02938)",
    ),
}


def register(sequences: int, length: int) -> None:
    """Make the rivals known to the configuration. Args: as of `gblm`."""
    SCORES["gblm"] = gblm(sequences, length)
    UPDATES.update(RIVAL_UPDATES)


def owl_masks(context: RunContext, diagnostics: Diagnostics) -> PackedMasks:
    """Wanda's masks with OWL's budgets of blocks; the whole budget is met to the element.

    Sources: Yin et al. 2023 (arXiv:2310.05175); github.com/luuyin/OWL.
    """
    targets = context.targets
    statistics = Statistics(targets, frozenset({"marginals"}), context.model, context.storage)
    observe_inputs(context.workload, targets, statistics)
    diagnostics.count("forward", 1)
    scores = {
        target.name: wanda_score(target.matrix(context.model).float(), statistics[target.name].input_sq(slice(None)))
        for target in targets
    }
    sparsities = owl_sparsities(outlier_shares(targets, scores), targets, context.config.final_sparsity)
    total = round(context.config.final_sparsity * sum(target.numel for target in targets))
    masks = PackedMasks()
    for target, count in zip(targets, exact_counts(sparsities, targets, total), strict=True):
        masks.add(target.name, [spread_over_rows(scores[target.name], count)])
    return masks


def outlier_shares(targets: Sequence[Target], scores: Mapping[str, Tensor]) -> dict[str, float]:
    """By block, the share of its weights whose score is more than `OUTLIER` times the block's mean."""
    found = {}
    for block in dict.fromkeys(target.block for target in targets):
        inside = [scores[target.name] for target in targets if target.block == block]
        size = sum(score.numel() for score in inside)
        mean = sum(float(score.sum(dtype=torch.float64)) for score in inside) / size
        found[block] = sum(int((score > OUTLIER * mean).sum()) for score in inside) / size
    return found


def owl_sparsities(shares: Mapping[str, float], targets: Sequence[Target], sparsity: float) -> dict[str, float]:
    """A sparsity for each block: the more outliers, the fewer weights go; from one extreme to the other `2 * RANGE`."""
    low, high = min(shares.values()), max(shares.values())
    kept = {block: 2 * RANGE * (share - low) / ((high - low) or 1) for block, share in shares.items()}
    mean = sum(kept[target.block] * target.numel for target in targets) / sum(target.numel for target in targets)
    return {block: sparsity + mean - share for block, share in kept.items()}


def exact_counts(sparsities: Mapping[str, float], targets: Sequence[Target], total: int) -> list[int]:
    """How many weights of each matrix go, `total` together: rounded down, and one more where most was cut off."""
    wanted = [sparsities[target.block] * target.numel for target in targets]
    counts = [int(each) for each in wanted]
    by_rest = sorted(range(len(wanted)), key=lambda index: counts[index] - wanted[index])
    for index in by_rest[: total - sum(counts)]:
        counts[index] += 1
    return counts


def spread_over_rows(scores: Tensor, count: int) -> Tensor:
    """The lowest scores of each row, as many in every row but that the first have one more where it does not divide."""
    rows, columns = scores.shape
    of_row = torch.full((rows, 1), count // rows, device=scores.device)
    of_row[: count % rows] += 1
    goes = torch.arange(columns, device=scores.device) < of_row
    order = scores.argsort(dim=1, stable=True)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, goes)
