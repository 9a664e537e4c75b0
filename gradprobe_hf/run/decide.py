"""The pruning decision: which weights go, what the kept ones become, and what is known about why.

The model is left as it was throughout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from gradprobe_hf.data.batches import Batches
from gradprobe_hf.evaluation.divergence import PairedMeasurement, measure_pair
from gradprobe_hf.evaluation.perplexity import Measurement, measure
from gradprobe_hf.evaluation.task_metric import measure_metric
from gradprobe_hf.model.fsdp import is_sharded
from gradprobe_hf.model.patches import eval_mode
from gradprobe_hf.model.routing import routed
from gradprobe_hf.probe.attachment import blocks_in_order, serving
from gradprobe_hf.reconstruction.block_matching import Matched
from gradprobe_hf.reconstruction.new_weights import NewWeights
from gradprobe_hf.reconstruction.reconstruct import reconstruct, reconstruction_passes
from gradprobe_hf.reconstruction.silenced_blocks import silenced
from gradprobe_hf.reconstruction.task import FinishedBlock, Reconstruction
from gradprobe_hf.run.context import BlockOrder, RunContext
from gradprobe_hf.run.diagnostics import Diagnostics
from gradprobe_hf.run.schedule import decide_in_rounds, search
from gradprobe_hf.run.sequential import decide_in_order
from gradprobe_hf.run.shape_search import choose_shape, with_shape
from gradprobe_hf.run.snapshots import Snapshots, Step
from gradprobe_hf.run.structured import decide_structures, removal_of
from gradprobe_hf.selection.packed_masks import PackedMasks
from gradprobe_hf.structures.removal import Removal

Metric = Callable[[Any], float]


@dataclass(frozen=True)
class PruningDecision:
    """What goes, and what is known about why.

    Attributes:
        masks: parameter name -> bool `[out, in]`, True = pruned.
        diagnostics: of the probe pairs that led there.
        unreached: matrices the calibration loss does not depend on.
        new_weights: of the matrices whose kept weights change.
        damping: what it was raised to in the matrices whose Hessian could not be inverted otherwise.
        matched: how the training of each block went, where blocks were trained.
        removal: which structures go, where whole ones do: what the masks are of.
    """

    masks: Mapping[str, Tensor]
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    unreached: tuple[str, ...] = ()
    new_weights: NewWeights = field(default_factory=NewWeights)
    damping: dict[str, float] = field(default_factory=dict)
    matched: dict[str, Matched] = field(default_factory=dict)
    removal: Removal | None = None


@dataclass(frozen=True)
class Judge:
    """The user's own metric, of which more is better: what `max_metric_drop` is about in place of perplexity.

    Attributes:
        dense: its value for the model as it is.
    """

    metric: Metric
    dense: float

    @classmethod
    def of(cls, context: RunContext, metric: Metric) -> Judge:
        """Called before anything is computed, because a function that fails fails here.

        Raises:
            ValueError: it returns no number.
        """
        with context.stopwatch("evaluate attempts"):
            dense = _judged(context, metric)
        if math.isnan(dense):
            raise ValueError("metric_fn returned nan for the model as it is: nothing compares with that.")
        return cls(metric, dense)


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
        masks = _recall(snapshots, diagnostics)
        context = _with_chosen_shape(context, diagnostics)
    else:
        context = _shaped(context, diagnostics)
        masks = decide_masks(context, diagnostics, judge)
        if snapshots is not None:
            _save(snapshots, masks, diagnostics)
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
    with _served(context, decision):
        loss = measure(replace(context.workload_on(batches), progress=False), "shapes", allows_nan=True).loss
    return math.inf if math.isnan(loss) else loss, decision.removal


def decide_masks(context: RunContext, diagnostics: Diagnostics, judge: Judge | None = None) -> PackedMasks | None:
    """The masks; None where a weight update chooses them."""
    config = context.config
    if config.reconstructs or config.weighs_units:
        # One batch tells whether blocks run one after the other; better before the probes than after them.
        blocks_in_order(context.model, context.targets, next(iter(context.calibration)))
    if config.update_row.chooses_mask:
        return None
    if config.structure is not None:
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
    if masks is not None and not context.config.reconstructs:
        biases = silenced(context.model, sorted(gone))
        return PruningDecision(masks, diagnostics, _unreached(context, diagnostics), biases, removal=removal)
    with context.stopwatch("reconstruction"):
        found = reconstruct(
            Reconstruction(
                context.workload,
                context.targets,
                context.config,
                masks,
                diagnostics.row_fisher,
                context.folder,
                _blocks_before(snapshots),
                None if snapshots is None else _BlockSaver(snapshots),
                gone,
                {} if removal is None else removal.routes,
            )
        )
    diagnostics.count("forward", reconstruction_passes(context.config))
    trained = [matched.epochs for matched in found.matched.values()]
    for kind in ("forward", "backward") if trained else ():
        diagnostics.count(kind, sum(trained) / len(trained))
    unreached = _unreached(context, diagnostics) if masks is not None else ()
    return PruningDecision(
        found.masks, diagnostics, unreached, found.new_weights, found.damping, found.matched, removal
    )


def evaluate(
    context: RunContext, decision: PruningDecision | None, label: str, allows_nan: bool = False
) -> Measurement:
    """The loss of the model as a decision would leave it, or as it is; its weights are untouched.

    Args:
        label: what the progress bar says.
        allows_nan: as in `measure`.
    """
    made = decision or PruningDecision({})
    with _served(context, made):
        return measure(context.workload_on(context.evaluation), f"evaluation ({label})", allows_nan)


def evaluate_pair(context: RunContext, decision: PruningDecision, label: str = "evaluation") -> PairedMeasurement:
    """The losses of the model as it is and as a decision would leave it, and how far apart their predictions are."""
    work = context.workload_on(context.evaluation)
    # Both through measured maps: transformers multiplies with all experts of a mixture at once and rounds otherwise, so
    # that a model of which nothing goes would differ from itself.
    dense, pruned = (partial(_served, context, made) for made in (PruningDecision({}), decision))
    return measure_pair(work, work, pruned, label, dense)


def evaluate_metric(context: RunContext, decision: PruningDecision | None, label: str) -> float:
    """The task's metric of the model as a decision would leave it, or as it is; its weights are untouched."""
    assert context.metric is not None, "asked for where there is one"
    made = decision or PruningDecision({})
    with _served(context, made):
        return measure_metric(context.workload_on(context.evaluation), context.metric, f"evaluation ({label})")


@contextmanager
def _served(context: RunContext, decision: PruningDecision) -> Iterator[None]:
    """The model as a decision would leave it."""
    targets = [*context.targets, *decision.new_weights.vectors]
    routes = {} if decision.removal is None else decision.removal.routes
    # Routers first: vectors of theirs are served around what is put there.
    with (
        routed(context.model, routes),
        serving(context.model, targets, decision.masks, new_weights=decision.new_weights),
    ):
        yield


def _save(snapshots: Snapshots, masks: PackedMasks | None, diagnostics: Diagnostics) -> None:
    values = {"diagnostics": diagnostics.to_dict(), "columns": None if masks is None else masks.all_columns}
    snapshots.enter(Step.of("decision"), values, [("masks", {} if masks is None else masks.all_packed)])


def _recall(snapshots: Snapshots, diagnostics: Diagnostics) -> PackedMasks | None:
    kept = snapshots.read(Step.of("decision"))
    diagnostics.load(kept.values["diagnostics"])
    columns = kept.values["columns"]
    return None if columns is None else PackedMasks.from_packed(kept.part("masks"), columns)


@dataclass(frozen=True)
class _BlockSaver:
    """Saves every block that reconstruction has finished."""

    snapshots: Snapshots

    def __call__(self, number: int, block: FinishedBlock) -> None:
        matched = None if block.matched is None else asdict(block.matched)
        values = {"columns": block.masks.all_columns, "damping": block.damping, "matched": matched}
        parts = [("weights", block.new_weights), ("vectors", block.vectors), ("masks", block.masks.all_packed)]
        self.snapshots.record(Step.of("block", number), values, parts)


def _blocks_before(snapshots: Snapshots | None) -> list[FinishedBlock]:
    """The blocks that an earlier run has finished, in all processes."""
    latest = snapshots.latest() if snapshots else None
    if snapshots is None or latest is None or latest.stage != "block":
        return []
    found = []
    for number in range(latest.number + 1):
        kept = snapshots.read(Step.of("block", number))
        masks = PackedMasks.from_packed(kept.part("masks"), kept.values["columns"])
        values = kept.values
        matched = Matched(**values["matched"]) if values["matched"] else None
        found.append(FinishedBlock(kept.part("weights"), masks, values["damping"], kept.part("vectors"), matched))
    return found


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
        with context.stopwatch("evaluate attempts"), _served(context, made):
            if self.judge is not None:
                return self.sign * _judged(context, self.judge.metric)
            if context.metric is not None:
                return self.sign * measure_metric(context.workload_on(context.selection), context.metric)
            found = measure(context.workload_on(context.selection), "evaluation", allows_nan=bool(masks))
        return found.metric


def _judged(context: RunContext, metric: Metric) -> float:
    with eval_mode(context.model):
        value = _number(metric(context.model))
    # Rounding may differ between processes, and with it the branch that each would take.
    return float(context.processes.broadcast(value))


def _number(value: Any) -> float:
    """What a metric returned, as a number."""
    shown = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__} {value!r:.80}"
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError("text")
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"metric_fn must return a number, of which more is better, got {shown}.") from error


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
            "the processes reached different masks: they do not hold the same model, or not the same calibration "
            "data. Load both from the same place in every process. Nothing was changed."
        )
