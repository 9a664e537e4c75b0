"""Expected passes: how often a run walks over its calibration set."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.decisions.search import FINEST, levels
from gradprobe_hf.reconstruction.reconstruct import reconstruction_passes
from gradprobe_hf.structures.budgets import BUDGETS
from gradprobe_hf.structures.table import FEWER_BLOCKS, ROWS_WITHOUT, TOKENS_WITHOUT, blocks_in

FORWARDS_A_PROBE = 3  # backward has two products for each of forward's


class Passes(NamedTuple):
    """Walks over the calibration set. Attributes: `trained`: those of both kinds that train blocks."""

    forward: float
    backward: float
    trained: float


def expected_passes(config: GradProbeConfig, blocks: int) -> Passes:
    """Passes, as multiples of one walk over the whole calibration set with the whole model.

    A search that may stop early is counted to its end.

    Args:
        blocks: number of blocks that hold targets.
    """
    needs = config.needs
    forward, backward = (2.0, 2.0) if config.decision_row.has_second_probe else (1.0, 1.0)
    if not needs.probes:
        forward, backward = float(bool(needs.terms)), 0.0
    elif config.structure is not None:
        forward = backward = float(config.gate_probes)
    if config.order == "sequential":
        forward, backward = _sequential_passes(config, blocks)
    updates, epochs = (reconstruction_passes(config), config.refinement_row.epochs) if config.reconstructs else (0, 0)
    if config.max_metric_drop is not None:
        if needs.probes:
            forward, backward = forward * _levels_of(config), backward * _levels_of(config)
        # Bisection goes on with the scores at hand: it updates weights for each budget that it tries, and probes none.
        budgets = attempts_of(config) + 1
        updates, epochs = updates * budgets, epochs * budgets
    if config.rounds:
        forward, backward = forward * len(config.rounds), backward * len(config.rounds)
    forward += _structured_passes(config, blocks)
    return Passes(forward + updates + epochs, backward + epochs, epochs)


def search_passes(
    config: GradProbeConfig, rows: int, blocks: int, shapes: Sequence[Mapping[str, int]], tried: int, probed: float
) -> float:
    """Forward passes of a run that looks for a shape: about as many, before it is known which of them are tried.

    A probe counts as the forward passes that take as long.

    Args:
        rows: of the calibration set.
        blocks: number of blocks that hold targets.
        shapes: that meet the budget, each as how many of each structure go.
        tried: how many of them are pruned; the best a second time, on all rows.
        probed: passes over a few rows beforehand: of the model as it is, and without some of it.
    """
    few = _few(config, rows)
    fixed = [config.varied(structure=dict(going), **dict.fromkeys(BUDGETS)) for going in shapes]
    beforehand = FORWARDS_A_PROBE * (any(one.drops_experts for one in fixed) + any(one.weighs_gates for one in fixed))
    # What units can be made up for is measured beforehand, whatever they go by.
    beforehand += any(one.weighs_inputs or (one.weighs_units and one.updates) for one in fixed)
    every = [
        one.weighs_inputs + reconstruction_passes(one) * one.reconstructs + FORWARDS_A_PROBE * one.gate_probes
        for one in fixed
    ]
    # The order in which blocks go is measured once for all shapes, and the first step of it beforehand.
    further = max(_tried_blocks(blocks_in(going), blocks) for going in shapes) - _tried_blocks(1, blocks)
    return beforehand + few * (probed + max(0, further) / 2) + (tried + 1) * sum(every) / len(every)


def attempts_of(config: GradProbeConfig) -> int:
    """Sparsities that a search measures, bisection included; 0 where nothing is searched for."""
    if config.max_metric_drop is None:
        return 0
    bisections = math.ceil(math.log2(max(config.first_level, config.sparsity_step) / FINEST))
    return _levels_of(config) + max(0, bisections)


def _levels_of(config: GradProbeConfig) -> int:
    return len(list(levels(config.first_level, config.sparsity_step, config.final_sparsity)))


def _structured_passes(config: GradProbeConfig, blocks: int) -> float:
    """Whole structures: a walk that collects Hessians, and walks over a few rows without each of the blocks."""
    tried = _tried_blocks(blocks_in(config.amounts), blocks)
    # Passes begin in front of the block that is left out: half of the model on average.
    return config.weighs_inputs + tried / 2 * _few(config, config.num_samples)


def _few(config: GradProbeConfig, rows: int) -> float:
    """The share of the calibration rows that tells one block from another, if they are full windows of text."""
    return min(1.0, ROWS_WITHOUT / rows, math.ceil(TOKENS_WITHOUT / config.window_length) / rows)


def _tried_blocks(going: int, blocks: int) -> int:
    """How often the loss without a block is measured until so many have gone."""
    return sum(max(0, min(blocks - 2 - gone, FEWER_BLOCKS if gone else blocks)) for gone in range(going))


def _sequential_passes(config: GradProbeConfig, blocks: int) -> tuple[float, float]:
    """Two probes for each step of blocks, and the pass that scores the candidates.

    Backward goes from the last block to the first one of the step. So does forward in `block_order="forward"`, where
    the outputs of all blocks before the step are cached; otherwise it starts from the first block of the model.
    """
    candidates = config.score_alone().needs
    at_once = config.blocks_per_step
    firsts = list(range(0, blocks, at_once))  # for "size" as if blocks were equal
    if config.block_order == "reverse":
        firsts = [max(0, end - at_once) for end in range(blocks, 0, -at_once)]
    reached = sum(1 - first / blocks for first in firsts)
    forward = 2 * reached + 1 if config.block_order == "forward" else 2.0 * len(firsts)
    return forward + bool(candidates.terms), 2 * reached + candidates.probes
