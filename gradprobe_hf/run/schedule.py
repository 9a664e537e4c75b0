"""The schedule: which trials lead to the final masks.

one shot      one trial at the final budget
rounds        a trial at each of several budgets, each on the model as the one before would prune it; every round
              decides anew about all weights, so that a pruned one can come back with its original value
iterate       rounds from `initial_sparsity` by `sparsity_step`, until the metric has dropped by more than
              `max_metric_drop`; then the largest budget that keeps the promise, by bisection on the scores at hand
sequential    `sequential.py`: one block after the other
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from gradprobe_hf.config import GradProbeConfig
from gradprobe_hf.decisions.decision import evidence_needed
from gradprobe_hf.reconstruction.blockwise import reconstruction_passes
from gradprobe_hf.run.context import Diagnostics, RunContext
from gradprobe_hf.run.probe_pair import ProbePair
from gradprobe_hf.selection.packed_masks import PackedMasks

UNBOUNDED: dict[str, Any] = {"min_matrix_sparsity": None, "max_matrix_sparsity": None}
FINEST = 0.005  # of the weights: bisection stops here

# What the metric is of the model that masks lead to: lower is better.
Measured = Callable[[PackedMasks], float]


def begun_in(setting: RunContext) -> int | None:
    """The number of the probe that an earlier run of the same journal was killed in, or after."""
    if setting.journal is None or evidence_needed(setting.config).passes != "probe":
        return None
    return setting.journal.latest()


def decide_in_rounds(setting: RunContext, findings: Diagnostics) -> PackedMasks:
    """The masks of the last round; of the only one, where there are no `rounds`."""
    begun = begun_in(setting)
    masks = PackedMasks()
    for number, sparsity in enumerate(setting.config.rounds or (setting.config.final_sparsity,)):
        if begun is None or begun // 2 <= number:
            masks = ProbePair(setting, setting.targets, findings, number, served=masks).run(sparsity, begun)
            begun = None
    return masks


def iterate(setting: RunContext, findings: Diagnostics, measured: Measured, dense: float) -> PackedMasks:
    """The sparsest masks found whose metric is within `max_metric_drop` of the dense model's; if none is, of nothing.

    Where the strategy makes no probe, its scores of the model as it is serve every budget.

    Args:
        measured: the metric of what becomes of the model under masks; lower is better.
        dense: the metric of the model as it is.
    """
    config = setting.config
    limit = allowed(dense, config.max_metric_drop)
    begun, probes = begun_in(setting), evidence_needed(config).passes == "probe"
    trial, best, kept = None, PackedMasks(), 0.0
    for number, sparsity in enumerate(_levels(config.first_level, config.sparsity_step, config.final_sparsity)):
        if begun is not None and begun // 2 > number:
            kept = sparsity  # its masks are what the state serves
            continue
        if trial is None or probes:
            trial = None  # its statistics go before there are others
            trial = ProbePair(setting, setting.targets, findings, number, served=best)
            masks = trial.run(sparsity, begun)
            best, begun = trial.served, None
        else:
            masks = trial.masks_at(sparsity)
        value = measured(masks)
        findings.curve.append(_point(sparsity, value, limit, probed=probes))
        if not value <= limit:  # one that is not a number neither
            return _bisected(trial, best, kept, sparsity, limit, measured, findings)
        best, kept = masks, sparsity
    return best


def _bisected(
    trial: ProbePair,
    best: PackedMasks,
    low: float,
    high: float,
    limit: float,
    measured: Measured,
    findings: Diagnostics,
) -> PackedMasks:
    """Between a budget that keeps the promise and one that does not; no probe is made for a trial."""
    found = None
    while high - low > FINEST:
        middle = (low + high) / 2
        masks = trial.masks_at(middle)
        value = measured(masks)
        findings.curve.append(_point(middle, value, limit, probed=False))
        if value <= limit:
            found, low = masks, middle
        else:
            high = middle
    if found is not None:
        return found
    findings.row_fisher = trial.rows_before  # what is kept was decided, and measured, with these
    return best or trial.masks_at(0.0)


def expected_passes(config: GradProbeConfig, blocks: int) -> tuple[float, float]:
    """Forward and backward passes over the calibration data, in whole ones; of a schedule that may stop early, at most.

    Args:
        blocks: how many the model has that hold targets.
    """
    needed = evidence_needed(config).passes
    probes = {"none": 0, "forward": 0, "probe": 1 if config.decision == "none" else 2}[needed]
    forward, backward = float(probes), float(probes)
    if needed == "forward" and evidence_needed(config).terms:
        forward += 1
    if config.order == "sequential":
        forward, backward = _sequential_passes(config, blocks)
    solved = reconstruction_passes(config) if config.reconstructs else 0
    if config.max_metric_drop is not None:
        levels = len(list(_levels(config.first_level, config.sparsity_step, config.final_sparsity)))
        if needed == "probe":
            forward, backward = forward * levels, backward * levels
        bisections = math.ceil(math.log2(max(config.first_level, config.sparsity_step) / FINEST))
        solved *= levels + max(0, bisections) + 1
    if config.rounds:
        forward, backward = forward * len(config.rounds), backward * len(config.rounds)
    return forward + solved, backward


def _sequential_passes(config: GradProbeConfig, blocks: int) -> tuple[float, float]:
    """Two probes a step; backward from the last block to the step's first, forward from there where that is known."""
    proposing = evidence_needed(replace(config, order="joint", decision="none", **UNBOUNDED))
    at_once = config.blocks_per_step
    firsts = list(range(0, blocks, at_once))  # with "size" as if all were equal
    if config.block_order == "reverse":
        firsts = [max(0, end - at_once) for end in range(blocks, 0, -at_once)]
    reach = sum(1 - first / blocks for first in firsts)
    forward = 2 * reach + 1 if config.block_order == "forward" else 2.0 * len(firsts)
    return forward + bool(proposing.terms), 2 * reach + (proposing.passes == "probe")


def allowed(dense: float, drop: float | str | None) -> float:
    """The worst value of a metric (lower is better) that a drop allows: absolute, or relative like `"5%"`.

    >>> allowed(20.0, 1.5), allowed(20.0, "5%")
    (21.5, 21.0)
    """
    assert drop is not None, "the schedule is not to iterate without it"
    if isinstance(drop, str):
        return dense + abs(dense) * float(drop.removesuffix("%")) / 100
    return dense + drop


def _levels(first: float, step: float, last: float) -> Iterator[float]:
    for number in range(math.ceil(round((last - first) / step, 6))):
        yield round(first + number * step, 6)
    yield last


def _point(sparsity: float, value: float, limit: float, probed: bool) -> dict[str, Any]:
    return {"sparsity": sparsity, "metric": value, "limit": limit, "within": value <= limit, "probed": probed}
