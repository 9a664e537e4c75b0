"""The decision: statistics of the probes -> which weights go.

`candidate_score` and `path_score` order weights for `selection`; `threshold_mask` is the published rule. Everything is
`[out, in]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from gradprobe_hf.config import Fisher, GradProbeConfig
from gradprobe_hf.model.parameters import execution_device, row_chunks
from gradprobe_hf.model.targets import Region, Target
from gradprobe_hf.probe.matrix import ALL, MatrixStatistics, Term
from gradprobe_hf.probe.statistics import Statistics
from gradprobe_hf.scores.fisher import blended_fisher, fisher_score
from gradprobe_hf.scores.magnitude import magnitude_score
from gradprobe_hf.scores.random import random_score
from gradprobe_hf.scores.wanda import wanda_score
from gradprobe_hf.selection.select import Keys, score_keys

FISHER_TERMS: dict[Fisher, frozenset[Term]] = {
    "blend": frozenset({"sequence", "marginals"}),
    "sequence": frozenset({"sequence"}),
    "token": frozenset({"token"}),
    "factored": frozenset({"marginals"}),
}

Passes = Literal["none", "forward", "probe"]


@dataclass(frozen=True)
class Evidence:
    """What a configuration has to measure: the terms of the first probe, and how much of a pass it takes."""

    terms: frozenset[Term]
    passes: Passes


def evidence_needed(config: GradProbeConfig) -> Evidence:
    """The least that the candidates and the decision can be made from."""
    terms: frozenset[Term] = frozenset()
    if config.strategy == "wanda":
        terms |= {"marginals"}
    if config.strategy == "fisher" or config.decision == "path":
        terms |= FISHER_TERMS[config.fisher]
    if config.decision == "threshold":
        terms |= {"peak"}
    if config.decision != "none" or config.strategy == "fisher":
        return Evidence(terms, "probe")
    return Evidence(terms, "forward" if config.strategy == "wanda" or config.reconstructs else "none")


def fisher_of(statistics: MatrixStatistics, kind: Fisher, rows: slice = ALL) -> Tensor:
    """The Fisher estimate `[rows, in]`, summed over the probes that were folded so far."""
    choices: dict[Fisher, Callable[[], Tensor]] = {
        "blend": lambda: blended_fisher(statistics.read("sequence", rows), statistics.factored(rows)),
        "sequence": lambda: statistics.read("sequence", rows),
        "token": lambda: statistics.read("token", rows),
        "factored": lambda: statistics.factored(rows),
    }
    return choices[kind]()


def row_fisher(target: Target, statistics: MatrixStatistics, kind: Fisher) -> Tensor:
    """The mean Fisher information of the weights of each row, `[out]`."""
    return torch.cat([fisher_of(statistics, kind, rows).mean(1) for rows in row_chunks(target.shape)])


def candidate_score(
    target: Target, weight: Tensor, part: Region, statistics: Statistics | None, config: GradProbeConfig
) -> Tensor:
    """The strategy's score of a part of a matrix; see `unreached_score` for a matrix the loss does not reach."""
    if config.strategy == "magnitude":
        return magnitude_score(weight)
    if config.strategy == "random":
        drawn = random_score(part.rows, target.shape[1], target.name, config.seed)
        return drawn[:, part.columns].to(weight.device)
    assert statistics is not None, f"{config.strategy!r} needs statistics"
    known = statistics[target.name]
    if not known.reached:
        return unreached_score(weight)
    if config.strategy == "wanda":
        return wanda_score(weight, known.input_sq(part.rows))
    return fisher_score(weight, fisher_of(known, config.fisher, part.rows))


def path_score(target: Target, weight: Tensor, part: Region, statistics: Statistics, fisher: Fisher) -> Tensor:
    """`W^2 F` with F of the sums over both probes: the loss that pruning adds, averaged over the path between them."""
    known = statistics[target.name]
    if not known.reached:
        return unreached_score(weight)
    return fisher_score(weight, fisher_of(known, fisher, part.rows))


def unreached_score(weight: Tensor) -> Tensor:
    """No evidence about a whole matrix: its weights go after all others, and among themselves by magnitude."""
    return 1e38 * (1 + weight.abs() / (1 + weight.abs()))


def keys_of(model: nn.Module, score: Callable[[Target, Tensor, Region], Tensor]) -> Keys:
    """A stream of sortable keys: scores are made in float32 (float64 for a float64 model), some rows at a time.

    Args:
        score: called with a target, a part of its weight, and which part it is.
    """

    def keys(target: Target) -> Iterator[Tensor]:
        matrix, held = target.matrix(model), target.region(model)
        if not matrix.numel():  # a shard may be empty
            yield torch.empty(matrix.shape, dtype=torch.int32, device=matrix.device)
            return
        device = execution_device(model, target.parameter)  # where its statistics are
        for rows in row_chunks(matrix.shape):
            weight = matrix[rows].to(device, torch.promote_types(matrix.dtype, torch.float32))
            part = Region(slice(held.rows.start + rows.start, held.rows.start + rows.stop), held.columns)
            yield score_keys(score(target, weight, part), weight, target.name)

    return keys


def threshold_mask(candidates: Tensor, before: Tensor, after: Tensor, threshold: float, weight: Tensor) -> Tensor:
    """The published GradProbe rule: prune candidates with `G_1 <= G_0 (1 + threshold)`, give the others back.

    `G` is the largest magnitude of a gradient over the calibration sequences, at the original and at the shrunk
    weights. The publication takes it over batches of the mean loss; over sequences it does not depend on the batch
    size, and for windows of one length the scale of the loss cancels.

    A gradient of zero in both probes is no evidence (an input never seen, an underflow): the weight is kept, unless it
    is zero already.
    """
    return candidates & ((after <= before * (1 + threshold)) & ~no_evidence(before, after) | (weight == 0))


def no_evidence(before: Tensor, after: Tensor) -> Tensor:
    """Where neither probe saw a gradient."""
    return (before == 0) & (after == 0)
