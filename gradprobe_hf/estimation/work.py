"""Work: the passes and the floating-point operations of a run, priced from the rows of its method."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.estimation.expected_passes import attempts_of, expected_passes
from gradprobe_hf.estimation.footprint import PlacementName
from gradprobe_hf.estimation.formula import active_weights
from gradprobe_hf.estimation.passes import PassCost
from gradprobe_hf.estimation.sizes import unit_readers
from gradprobe_hf.model.targets import Target, go_alone
from gradprobe_hf.scores.terms import matrix_terms

# Whether blocks are recomputed in backward. Those of an offloaded model are, always: autograd would keep their weights
# in memory along with their activations.
RECOMPUTES: dict[PlacementName, bool] = {"resident": False, "checkpointed": True, "offloaded": True}


@dataclass(frozen=True)
class Walk:
    """One walk over the calibration set: `batches` passes of `[rows, length]` tokens."""

    batches: int
    rows: int
    length: int


@dataclass(frozen=True)
class Work:
    """What one placement computes.

    Attributes:
        forwards, backwards: walks over the whole calibration set; recomputation counts as forward.
        flops: floating-point operations.
        bytes_read: weights that are read from disk again, for the passes.
    """

    forwards: float
    backwards: float
    flops: int
    bytes_read: int = 0


def walk_of(model: PreTrainedModel, config: GradProbeConfig, targets: Sequence[Target]) -> Walk:
    """How a run goes through its calibration set."""
    alone = config.batch_size == "auto" or go_alone(model, targets)
    rows = 1 if alone else min(int(config.batch_size), config.num_samples)
    batches = math.ceil(config.num_samples / rows) if config.needs.passes != "none" else 0
    return Walk(batches, rows, config.window_length)


def work_of(
    model: PreTrainedModel,
    targets: Sequence[Target],
    config: GradProbeConfig,
    costs: Mapping[bool, PassCost],
    walk: Walk,
) -> dict[PlacementName, Work]:
    """The work of each placement.

    Args:
        costs: of one batch, without and with recomputation of the blocks.
    """
    forwards, backwards, trained = expected_passes(config, len({target.block for target in targets}))
    # Training a block makes all of a probe's products, but keeps no gradient of a sequence and recomputes nothing.
    probed = backwards - trained
    # Forward is one product of the three: outputs, gradients of the inputs, gradients of the weights. Where nothing is
    # probed, a cost is that of the forward pass alone.
    probes = config.needs.probes
    forward = costs[False].flops / (3 if probes else 1)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    work = {}
    for name, recomputes in RECOMPUTES.items():
        flops = costs[recomputes].flops if probes else 3 * forward
        # A simulated probe makes the gradient of every weight once. Gradients of single sequences take as many
        # operations, those of single tokens as many again, and a Fisher estimate from marginals alone takes neither.
        products = len({row.is_of_tokens for row in matrix_terms(config.needs.terms).values()})
        gradients = (products - 1) * 2 * walk.rows * walk.length * active_weights(model, targets)
        batch = backwards * flops + probed * gradients + max(0.0, forwards - backwards) * forward
        # A search updates the weights of each budget that it tries, and once more those of the best.
        updates = (attempts_of(config) + 1) * reconstruction_operations(config, targets)
        total = round(batch * walk.batches + updates)
        total += weighing_operations(model, targets, config)
        # Each walk of a probe reads every block twice, for forward and for backward.
        read = int(2 * probed * walk.batches * weights) if name == "offloaded" else 0
        work[name] = Work(forwards + recomputes * probed, backwards, total, read)
    return work


def weighing_operations(model: PreTrainedModel, targets: Sequence[Target], config: GradProbeConfig) -> int:
    """Operations that choose units: Hessians of all tokens, their inverses, and what is left of these."""
    if not config.weighs_inputs:
        return 0
    tokens = config.num_samples * config.window_length
    shapes = [reader.shape for reader in unit_readers(model, targets, config)]
    return sum(2 * tokens * inner**2 + 4 * inner**3 + 2 * out * inner**2 for out, inner in shapes)


def reconstruction_operations(config: GradProbeConfig, targets: Sequence[Target]) -> int:
    """Operations of a weight update: Hessians of all tokens, their factors, sweeps, and products of its own."""
    if not config.updates:
        return 0
    tokens, sets = config.num_samples * config.window_length, 2 if config.dense_target else 1
    shapes = [target.shape for target in targets]
    products = sets + config.update_row.products
    return sum(2 * sets * tokens * inner**2 + 2 * inner**3 + 2 * products * out * inner**2 for out, inner in shapes)
