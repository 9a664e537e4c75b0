"""The pruning decision: which weights go, what the kept ones become, and what is known about why.

The model is left as it was throughout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from hashlib import sha256

import torch

from gradprobe_hf.data.batches import Batches
from gradprobe_hf.evaluation.perplexity import measure
from gradprobe_hf.evaluation.task_metric import measure_metric
from gradprobe_hf.model.fsdp import is_sharded
from gradprobe_hf.probe.maps.attachment import blocks_in_order
from gradprobe_hf.reconstruction.reconstruct import reconstruct, reconstruction_passes
from gradprobe_hf.reconstruction.silenced_blocks import silenced
from gradprobe_hf.reconstruction.task import Reconstruction
from gradprobe_hf.run.context import BlockOrder, RunContext
from gradprobe_hf.run.decision import BlockSaver, PruningDecision, blocks_before, recall_decision, save_decision
from gradprobe_hf.run.diagnostics import Diagnostics
from gradprobe_hf.run.evaluate import Judge, judged, served, written
from gradprobe_hf.run.probing.schedule import decide_in_rounds, search
from gradprobe_hf.run.probing.sequential import decide_in_order
from gradprobe_hf.run.shapes.search import choose_shape, with_shape
from gradprobe_hf.run.shapes.structured import decide_structures, removal_of
from gradprobe_hf.run.snapshots import Snapshots, Step
from gradprobe_hf.runtime.plain_computation import exact_products
from gradprobe_hf.selection.packed_masks import PackedMasks
from gradprobe_hf.structures.removal import Removal


def decide_pruning(context: RunContext, judge: Judge | None = None) -> PruningDecision:
    """Decide what to prune.

    Args:
        judge: what `max_metric_drop` is about; by default the task's metric, or perplexity (or loss).

    Raises:
        ValueError: a calibration loss or scores that are not finite, or blocks that do not run one after the other.
        ConnectionError: another process ended.
    """
    diagnostics = Diagnostics()
    snapshots = context.snapshots
    known = snapshots.latest() if snapshots else None
    decided = Step.of("decision")
    # Whatever came before the decision is in its masks: a run that was resumed behind it makes no probe again.
    if snapshots is not None and known is not None and known >= decided:
        masks = recall_decision(snapshots, diagnostics)
        context = _with_chosen_shape(context, diagnostics)
    else:
        context = _shaped(context, diagnostics)
        masks = decide_masks(context, diagnostics, judge)
        if snapshots is not None:
            save_decision(snapshots, masks, diagnostics)
    return conclude(context, masks, diagnostics, snapshots)


def _shaped(context: RunContext, diagnostics: Diagnostics) -> RunContext:
    """The context of a run whose shape is known; where it is to meet a budget, it is looked for."""
    if context.config.shape_budget is None:
        return context
    context = replace(context, block_order=BlockOrder())
    with context.stopwatch("shapes"):
        choose_shape(context, diagnostics, _tried)
    return _with_chosen_shape(context, diagnostics)


def _with_chosen_shape(context: RunContext, diagnostics: Diagnostics) -> RunContext:
    return with_shape(context, diagnostics.shapes[0]["removed"]) if diagnostics.shapes else context


def _tried(context: RunContext, batches: Batches, diagnostics: Diagnostics) -> tuple[float, Removal]:
    """A run whose shape is given, up to its loss on some batches."""
    decision = conclude(context, decide_masks(context, diagnostics), diagnostics)
    assert decision.removal is not None, "whole structures go"
    with served(context, decision):
        loss = measure(replace(context.workload_on(batches), progress=False), "shapes", allows_nan=True).loss
    return math.inf if math.isnan(loss) else loss, decision.removal


def decide_masks(context: RunContext, diagnostics: Diagnostics, judge: Judge | None = None) -> PackedMasks | None:
    """The masks; None where a weight update chooses them."""
    config = context.config
    if config.reconstructs or config.weighs_units:
        # One batch tells whether blocks run one after the other; better before the probes than after them.
        blocks_in_order(context.model, context.targets, context.calibration)
    if config.update_row.chooses_mask:
        return None
    if config.structure is not None:
        with exact_products():
            masks = decide_structures(context, diagnostics)
    elif config.order == "sequential":
        masks = decide_in_order(context, diagnostics)
    elif config.max_metric_drop is not None:
        measured = _Measured(context, diagnostics, judge)
        dense = measured(PackedMasks()) if judge is None else measured.sign * judge.dense
        masks = search(context, diagnostics, measured, dense)
        # A search wants less of what it measures; what it found is told as the user's metric has it.
        for point in diagnostics.curve:
            point |= {name: measured.sign * point[name] for name in ("metric", "limit")}
    else:
        masks = decide_in_rounds(context, diagnostics)
    _check_agreement(context, masks)
    return masks


def conclude(
    context: RunContext, masks: PackedMasks | None, diagnostics: Diagnostics, snapshots: Snapshots | None = None
) -> PruningDecision:
    """The decision under masks that are known: kept weights are reconstructed, if they are to be.

    Args:
        snapshots: where every finished block is saved, and known from.
    """
    removal = None if masks is None else removal_of(context, masks)
    gone: frozenset[str] = frozenset() if removal is None else removal.blocks
    if masks is not None and not (context.config.reconstructs and _anything_goes(context, masks)):
        biases = silenced(context.model, sorted(gone))
        return PruningDecision(masks, diagnostics, _unreached(context, diagnostics), biases, removal=removal)
    with context.stopwatch("reconstruction"), exact_products():
        task = Reconstruction(
            work=context.workload,
            targets=context.targets,
            config=context.config,
            masks=masks,
            row_fisher=diagnostics.row_fisher,
            folder=context.folder,
            finished=blocks_before(snapshots),
            after_block=None if snapshots is None else BlockSaver(snapshots),
            silenced=gone,
            routes={} if removal is None else removal.routes,
        )
        found = reconstruct(task)
    diagnostics.count("forward", reconstruction_passes(context.config))
    trained = [matched.epochs for matched in found.matched.values()]
    for kind in ("forward", "backward") if trained else ():
        diagnostics.count(kind, sum(trained) / len(trained))
    return PruningDecision(
        masks=found.masks,
        diagnostics=diagnostics,
        unreached=_unreached(context, diagnostics) if masks is not None else (),
        new_weights=found.new_weights,
        damping=found.damping,
        matched=found.matched,
        removal=removal,
    )


def _anything_goes(context: RunContext, masks: PackedMasks) -> bool:
    """Whether there is something to make up for. A collective: of a sharded model each process has masks of its own.

    There is not where a search has kept nothing: a fit to the same outputs would change every weight by its rounding,
    and fill zeros.
    """
    return bool(context.processes.max_(torch.tensor(int(masks.any()))))


def _unreached(context: RunContext, diagnostics: Diagnostics) -> tuple[str, ...]:
    """Where anything was measured at all, the matrices that nothing was seen of."""
    if not diagnostics.reached:
        return ()
    return tuple(target.name for target in context.targets if target.name not in diagnostics.reached)


@dataclass(frozen=True)
class _Measured:
    """The metric of what masks lead to, kept weights reconstructed if they are to be; lower is better."""

    context: RunContext
    diagnostics: Diagnostics
    judge: Judge | None

    @property
    def sign(self) -> int:
        """Of a metric of which more is better, as one of the user's own, the negative is measured."""
        if self.judge is not None:
            return -1
        return 1 if self.context.metric is None else self.context.metric.sign

    def __call__(self, masks: PackedMasks) -> float:
        context = self.context
        made = conclude(context, masks, self.diagnostics) if masks else PruningDecision(masks)
        if self.judge is not None:
            with context.stopwatch("evaluate attempts"), written(context, made):
                return self.sign * judged(context, self.judge.metric)
        with context.stopwatch("evaluate attempts"), served(context, made):
            if context.metric is not None:
                return self.sign * measure_metric(context.workload_on(context.selection), context.metric)
            found = measure(context.workload_on(context.selection), "evaluation", allows_nan=bool(masks))
        return found.metric


def _check_agreement(context: RunContext, masks: PackedMasks) -> None:
    """Processes that hold whole models have to end with one mask: a digest of it tells."""
    processes = context.processes
    if processes.count == 1 or is_sharded(context.model):
        return
    digest = sha256()
    for name in masks:
        digest.update(masks.packed(name).cpu().numpy().tobytes())
    own = torch.tensor(int.from_bytes(digest.digest()[:7], "big"))
    lowest, highest = processes.min_(own.clone()), processes.max_(own.clone())
    if lowest != highest:
        raise RuntimeError(
            "the processes reached different masks: they do not hold the same model. Load the same weights in every "
            "process. Nothing was changed."
        )
