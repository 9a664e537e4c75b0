"""Unit evidence: what is measured of the channels, heads and experts of a model.

Blocks that go whole hand on what they are given meanwhile, and no token is sent to experts that go, so that all is
measured in the model that is left of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from tqdm.auto import tqdm

from gradprobe_hf.model.passes.block_cache import BlockOutputCache
from gradprobe_hf.model.targets import Target
from gradprobe_hf.probe.engine import ProbePass, run_probe
from gradprobe_hf.probe.gates import GateSums
from gradprobe_hf.probe.maps.attachment import blocks_in_order, instrumented
from gradprobe_hf.probe.maps.serving import ServedWeights
from gradprobe_hf.probe.statistics import Statistics
from gradprobe_hf.probe.steps import own_steps
from gradprobe_hf.reconstruction.hessians import BlockHessians
from gradprobe_hf.reconstruction.new_weights import NewWeights
from gradprobe_hf.reconstruction.silenced_blocks import silenced
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.run.diagnostics import Diagnostics
from gradprobe_hf.scores.terms import GATES
from gradprobe_hf.selection.packed_masks import PackedMasks
from gradprobe_hf.structures.importance import outputs_squared
from gradprobe_hf.structures.plan import Units
from gradprobe_hf.structures.removal import Removal
from gradprobe_hf.structures.unit_scores import UnitEvidence
from gradprobe_hf.updates.sweep import damping_of, inverse_factor


@dataclass(frozen=True)
class Weighed:
    """Some units of one block. Attributes: the `structure` that they are, and the `evidence` about them."""

    structure: str
    units: Units
    evidence: UnitEvidence


def weighed_units(
    context: RunContext,
    removal: Removal,
    structures: Set[str],
    diagnostics: Diagnostics,
    *,
    all_inputs: bool = False,
) -> Iterator[Weighed]:
    """All units of these structures in the blocks that stay, with what the score of each structure reads of them.

    Every process gets the same. What is measured of a block is freed with the next one.

    Args:
        all_inputs: measure the inputs of every matrix, whether or not its score reads them.
    """
    scores = {name: score for name, score in context.config.unit_scores.items() if name in structures}
    staying = [(name, units) for name, units in units_that_stay(removal) if name in structures]
    gates: dict[str, GateSums] = {}
    if by_gates := [units for name, units in staying if "gradients" in scores[name].measured]:
        found = _gates(context, [(units.reader, units.count) for units in by_gates], removal, diagnostics)
        gates = {units.reader.name: sums for units, sums in zip(by_gates, found, strict=True)}
    by_inputs = {name for name, score in scores.items() if all_inputs or "inputs" in score.measured}
    for name, units in staying:
        if name not in by_inputs:
            gone = removal.units.get(units.reader.name)
            yield Weighed(name, units, _with_gates(_evidence(context, units), gates, gone))
    if any(name in by_inputs for name, _ in staying):
        for one in _by_inputs(context, removal, by_inputs):
            yield replace(one, evidence=_with_gates(one.evidence, gates))
        diagnostics.count("forward", 1)


def units_that_stay(removal: Removal) -> list[tuple[str, Units]]:
    """Structure and units, of every block that does not go whole."""
    return [
        (name, units)
        for name, everywhere in removal.plan.units.items()
        for units in everywhere
        if units.reader.block not in removal.blocks
    ]


def removed_blocks(context: RunContext, removal: Removal) -> tuple[list[Target], PackedMasks, NewWeights]:
    """What runs the model without the blocks that go: their matrices and biases, masks of those, zeros for these."""
    inside = [target for target in context.targets if target.block in removal.blocks]
    biases, masks = silenced(context.model, sorted(removal.blocks)), PackedMasks()
    for target in inside:
        masks.add(target.name, [removal.mask(target)])
    return [*inside, *biases.vectors], masks, biases


def _by_inputs(context: RunContext, removal: Removal, structures: Set[str]) -> Iterator[Weighed]:
    """One walk from block to block: H of the matrices that read units of these structures."""
    model = context.model
    # Inputs are those of a model without the blocks and experts that went, but with all of its units: which of these go
    # is decided for every block alike, and least squares follow on the stream of what is left.
    own = [batch for batch, _ in own_steps(model, context.targets, context.calibration, context.processes)]
    cache = BlockOutputCache(model, own, blocks_in_order(model, context.targets, own))
    gone, masks, biases = removed_blocks(context, removal)
    staying = units_that_stay(removal)
    for block in tqdm(cache.blocks.names, desc="units", unit="block", disable=not context.progress, leave=False):
        if block in removal.blocks:
            with instrumented(model, gone, ServedWeights(masks, new_weights=biases)):
                cache.advance([block])
            continue
        here = [(name, units) for name, units in staying if name in structures and units.reader.block == block]
        collected = _collect(context, cache, block, [units.reader for _, units in here])
        for name, units in here:
            hessian = collected.of(units.reader).hessian
            squares = hessian.diagonal().clone()
            outputs = outputs_squared(units.reader.matrix(model).to(hessian), hessian, units.count)
            factor, took = inverse_factor(hessian, context.config.fixed_damping)
            measured = {"inverse": factor.t() @ factor, "input_sq": squares, "output_sq": outputs}
            evidence = _evidence(context, units, **measured, damping=damping_of(hessian, took))
            del (
                hessian,
                factor,
                measured,
            )  # each is [in, in], as is the inverse: three of them would be the run's highest point
            yield Weighed(name, units, evidence)


def _collect(context: RunContext, cache: BlockOutputCache, block: str, readers: Sequence[Target]) -> BlockHessians:
    """The Hessians of these matrices of a block; it is finished then."""
    collected = BlockHessians(context.model, context.processes, has_drift=False)
    left = []
    with instrumented(context.model, readers, ServedWeights(), on_input=collected.add):
        for number, batch in enumerate(cache.batches):
            with collected.batch(batch):
                left.append(cache.run(number, block))
    cache.finish([block], left)
    return collected


def _with_gates(evidence: UnitEvidence, gates: Mapping[str, GateSums], gone: Tensor | None = None) -> UnitEvidence:
    """The evidence, with what a probe found at the gates of its units if there was one, and which went already."""
    sums = gates.get(evidence.name)
    if sums is None:
        return replace(evidence, gone=gone)
    return replace(evidence, gate_squares=sums.squares, gate_total=sums.total, gone=gone)


def expert_fisher(context: RunContext, removal: Removal, diagnostics: Diagnostics) -> dict[str, Tensor]:
    """Name of each router that stays -> the Fisher information of a gate on the output of each expert, `[experts]`.

    What an expert hands on is `y = W x + b` of its last matrix, weighted by the router: with d the gradient of the loss
    at that output, a gate's derivative is `sum_t y_t d_t`, all inputs of the matrix being one unit. No token, no
    information: an expert that is never chosen goes first.
    """
    staying = [one for one in removal.plan.experts if one.mixture.block not in removal.blocks]
    readers = [(expert[-1], 1) for one in staying for expert in one.matrices]
    # One probe for all experts of all blocks: their gates cost two vectors each.
    sums = iter(_gates(context, readers, removal, diagnostics))
    return {
        one.mixture.router: torch.cat([next(sums).squares.cpu() for _ in range(one.mixture.count)]) for one in staying
    }


def _gates(
    context: RunContext, readers: Sequence[tuple[Target, int]], removal: Removal, diagnostics: Diagnostics
) -> list[GateSums]:
    """One probe: the sums of each of these matrices, which has so many units of inputs."""
    targets, counts = [reader for reader, _ in readers], {reader.name: count for reader, count in readers}
    statistics = Statistics(targets, frozenset({GATES}), context.model, units=counts)
    gone, masks, biases = removed_blocks(context, removal)
    # Without its columns in the matrix that reads it, a unit that went already has no part in the model.
    shrunk = PackedMasks()
    for target in targets if removal.units else ():
        shrunk.add(target.name, [removal.mask(target)])
    readers_of_others = [
        units.reader
        for _, units in units_that_stay(removal)
        if units.reader.name in removal.units and units.reader.name not in counts
    ]
    for target in readers_of_others:
        masks.add(target.name, [removal.mask(target)])
    gone = [*gone, *readers_of_others]
    one = ProbePass(
        targets,
        statistics,
        shrunk=shrunk if removal.units else None,
        factor=0.0,
        pruned=(gone, masks),
        new_weights=biases,
        refuses_flat=True,
        label="probe (gates)",
    )
    with context.stopwatch("probe 0"):
        loss = run_probe(context.workload, one)
        statistics.reduce(context.processes)
    _check_finite(targets, statistics)
    diagnostics.probe_losses["probe 0"] = loss.mean
    diagnostics.count("forward", 1)
    diagnostics.count("backward", 1)
    return [statistics[reader.name].gates for reader in targets]


def _check_finite(targets: Sequence[Target], statistics: Statistics) -> None:
    """Raise ValueError for the first gates that order nothing: among NaN, the first units would go."""
    for target in targets:
        gates = statistics[target.name].gates
        if not (torch.isfinite(gates.squares).all() and torch.isfinite(gates.total).all()):
            raise ValueError(
                f"the gradients of {target.name} are not finite, so its units cannot be ordered: look for NaN in the "
                "model's weights, or a dtype that overflows (float16: try bfloat16). Nothing was changed."
            )


def _evidence(context: RunContext, units: Units, **measured: Tensor) -> UnitEvidence:
    stored = units.reader.matrix(context.model)
    known = next(iter(measured.values()), None)
    weight = stored.to(torch.promote_types(stored.dtype, torch.float32) if known is None else known.dtype)
    weight = weight if known is None else weight.to(known.device)
    return UnitEvidence(weight, units.count, units.reader.name, context.config.seed, **measured)
