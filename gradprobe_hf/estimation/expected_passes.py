"""Expected passes: how often a configuration goes through the calibration data."""

from __future__ import annotations

import math

from gradprobe_hf.config import GradProbeConfig
from gradprobe_hf.decisions.search import FINEST, levels
from gradprobe_hf.reconstruction.reconstruct import reconstruction_passes


def expected_passes(config: GradProbeConfig, blocks: int) -> tuple[float, float]:
    """Forward and backward passes, in whole ones; of a search that may stop early, at most.

    Args:
        blocks: how many the model has that hold targets.
    """
    needs = config.needs
    forward, backward = (2.0, 2.0) if config.decision_row.has_second_probe else (1.0, 1.0)
    if not needs.probes:
        forward, backward = float(bool(needs.terms)), 0.0
    if config.order == "sequential":
        forward, backward = _sequential_passes(config, blocks)
    solved = reconstruction_passes(config) if config.updates else 0
    if config.max_metric_drop is not None:
        attempts = len(list(levels(config.first_level, config.sparsity_step, config.final_sparsity)))
        if needs.probes:
            forward, backward = forward * attempts, backward * attempts
        bisections = math.ceil(math.log2(max(config.first_level, config.sparsity_step) / FINEST))
        solved *= attempts + max(0, bisections) + 1
    if config.rounds:
        forward, backward = forward * len(config.rounds), backward * len(config.rounds)
    return forward + solved, backward


def _sequential_passes(config: GradProbeConfig, blocks: int) -> tuple[float, float]:
    """Two probes a step; backward from the last block to the step's first, forward from there where that is known."""
    proposing = config.score_alone().needs
    at_once = config.blocks_per_step
    firsts = list(range(0, blocks, at_once))  # with "size" as if all were equal
    if config.block_order == "reverse":
        firsts = [max(0, end - at_once) for end in range(blocks, 0, -at_once)]
    reach = sum(1 - first / blocks for first in firsts)
    forward = 2 * reach + 1 if config.block_order == "forward" else 2.0 * len(firsts)
    return forward + bool(proposing.terms), 2 * reach + proposing.probes
