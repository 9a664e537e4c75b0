"""The probe pair: up to two probes, and everything that can be decided from them without another.

Probe 0 measures the targets as they are served, candidates are chosen from it, probe 1 measures with them shrunk. The
statistics stay: `masks_at` any budget, or `masks_within` any threshold, are then a matter of selection alone.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from gradprobe_hf.config.values import GradientThreshold
from gradprobe_hf.model.passes.block_cache import BlockOutputCache
from gradprobe_hf.model.targets import Target
from gradprobe_hf.probe.engine import ProbePass, observe_inputs, run_probe
from gradprobe_hf.probe.statistics import Statistics
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.run.diagnostics import Diagnostics
from gradprobe_hf.run.probing.pair_masks import MeasuredTargets
from gradprobe_hf.run.probing.probe_state import ProbeStage, ProbeState
from gradprobe_hf.run.probing.row_fisher import row_fisher
from gradprobe_hf.scores.budget import Budget
from gradprobe_hf.scores.terms import Term
from gradprobe_hf.selection.packed_masks import PackedMasks
from gradprobe_hf.selection.published_rule import thresholds


@dataclass(frozen=True)
class Position:
    """Where in its run a probe pair is.

    Attributes:
        number: of the pair, in the order in which the run makes them.
        served: what is pruned already, masks of its targets or of others.
        candidates: proposed before, for its targets or for more; None: the pair proposes them.
        begun: the probe that an earlier run was killed in, or after. A pair that it is one of goes on from there.
        cache: where a pass starts, if not at the beginning.
        depth: the share of the model that a backward pass goes through.
        label: what progress bars say of it.
    """

    number: int = 0
    served: PackedMasks = field(default_factory=PackedMasks)
    candidates: PackedMasks | None = None
    begun: ProbeStage | None = None
    cache: BlockOutputCache | None = None
    depth: float = 1.0
    label: str = ""


class ProbePair:
    """Up to two probes of some targets.

    `run` goes the whole way, by `probe_as_served`, `propose` and `probe_shrunk`. Behind it, `masks_at` and
    `masks_within` decide again from what was measured.

    Args:
        targets: what is decided: all targets of the context, or those of a step.
        diagnostics: added to.

    Attributes:
        served: what is pruned already; of a pair that goes on from a snapshot, as that says.
        first: statistics of probe 0, which probe 1 adds to unless the decision keeps them apart.
        second: statistics of probe 1, where they are kept apart.
        shrunk: candidates that probe 1 has shrunk, as long as a filter needs them.
        row_fisher_before: what `diagnostics.row_fisher` was before this pair.
    """

    def __init__(
        self, context: RunContext, targets: Sequence[Target], diagnostics: Diagnostics, at: Position | None = None
    ) -> None:
        self.context, self.targets, self.diagnostics = context, tuple(targets), diagnostics
        self.at = at or Position()
        self.served = self.at.served
        self._accumulator_bytes = 0
        needs = context.config.needs
        of_model_as_it_is = self.at.number == 0 and not self.served and needs.probes
        self._shared = context.shared_probe if of_model_as_it_is else None
        self.first: Statistics = self._shared.statistics if self._shared else self._new_statistics(needs.terms)
        self.second: Statistics | None = None
        self.shrunk: PackedMasks | None = None
        self.row_fisher_before: dict[str, list[float]] = {}

    def run(self, sparsity: float) -> PackedMasks:
        """Probe, propose, probe again, decide.

        Args:
            sparsity: the budget, as a fraction of these targets.
        """
        config = self.context.config
        if not config.decision_row.has_second_probe:
            self.probe_as_served()
            candidates = self.at.candidates or self.propose(sparsity)
            self._note_row_fisher()
            return candidates
        if self.at.begun == self._second_stage:
            self.probe_shrunk(None)
        else:
            self.probe_as_served()
            # Held by no name here, so that they are gone before the final masks are made: 0.9 GB at 7B.
            self.probe_shrunk(self.at.candidates or self.propose(sparsity))
        self._note_row_fisher()
        if config.decision_row.filters is not None:
            return self.masks_within(config.gradient_threshold)
        return self.masks_at(sparsity)

    def probe_as_served(self) -> None:
        """Probe 0, or the forward pass that is all a score needs, or nothing."""
        context, needs = self.context, self.context.config.needs
        if not needs.terms:
            return
        if self._shared is not None:
            self._count_probe(self._first_stage, self._shared.loss)
        elif needs.probes:
            self._probe(ProbeState(self._first_stage, {"first": self.first}, self.served, self.at.candidates))
        else:
            with context.stopwatch("inputs"):
                observe_inputs(context.workload, self.targets, self.first)
                self.first.reduce(context.processes)
            self.diagnostics.count("forward", 1)
        unreached = set(self.first.unreached)
        self.diagnostics.reached |= {target.name for target in self.targets if target.name not in unreached}

    def propose(self, sparsity: float) -> PackedMasks:
        """The score's candidates at a budget."""
        config, row = self.context.config, self.context.config.score_row
        assert row is not None, "an update that chooses its mask proposes nothing"
        # Bounds are for what is pruned in the end, which the candidates are where nothing decides after them.
        bounds = None if config.decision_row.has_second_probe else config.bounds
        with self.context.stopwatch("candidates"):
            return self._measured.lowest(row.function, Budget(sparsity, config.candidate_scope, config.group, bounds))

    def probe_shrunk(self, candidates: PackedMasks | None) -> None:
        """Probe 1: adds to the sums of the first, or keeps its own.

        Args:
            candidates: what is shrunk; None: what the snapshot says that the probe goes on from.
        """
        context, row = self.context, self.context.config.decision_row
        if self._shared is not None and not row.keeps_second:
            self.first = self._new_statistics(context.config.needs.terms)
            self.first.copy_(self._shared.statistics)
        statistics = {"first": self.first}
        if row.keeps_second:
            self.second = statistics["second"] = self._new_statistics(frozenset(row.terms))
        elif self.at.begun != self._second_stage:  # its snapshot has been here
            self.first.begin_second_probe(context.processes)
        state = ProbeState(self._second_stage, statistics, self.served, candidates)
        self._probe(state)
        if row.filters is not None:
            self.shrunk = state.candidates

    def masks_at(self, sparsity: float) -> PackedMasks:
        """The decision at a budget; the same statistics serve any number of budgets."""
        config = self.context.config
        function = config.decision_row.function
        if function is None:
            return self.propose(sparsity)
        with self.context.stopwatch("selection"):
            return self._measured.lowest(function, config.budget_of(sparsity))

    def masks_within(self, gradient_threshold: GradientThreshold, candidates: PackedMasks | None = None) -> PackedMasks:
        """The threshold rule; the same statistics serve any number of thresholds.

        Args:
            candidates: some of those that the second probe has shrunk; default: all of them.
        """
        candidates = self.shrunk if candidates is None else candidates
        assert candidates is not None, "they are what the rule is about"
        assert self.second is not None, "the second probe kept its own"
        masks, everywhere = PackedMasks(), self.context.targets  # a step has its share of what all matrices are told
        limits = dict(
            zip((target.name for target in everywhere), thresholds(everywhere, gradient_threshold), strict=True)
        )
        with self.context.stopwatch("selection"):
            for target in self.targets:
                kept = self._measured.filtered(self.second, candidates, target, limits[target.name])
                masks.add(target.name, kept)
        return masks

    @property
    def _first_stage(self) -> ProbeStage:
        return ProbeStage(self.at.number)

    @property
    def _second_stage(self) -> ProbeStage:
        return ProbeStage(self.at.number, is_second=True)

    @property
    def _measured(self) -> MeasuredTargets:
        return MeasuredTargets(self.context, self.targets, self.first, self.diagnostics)

    def _note_row_fisher(self) -> None:
        """For a weight update: these statistics do not live until then."""
        self.row_fisher_before = dict(self.diagnostics.row_fisher)
        self.diagnostics.row_fisher |= row_fisher(self.context, self.targets, self.first)

    def _new_statistics(self, terms: frozenset[Term]) -> Statistics:
        storage = self.context.storage
        if storage.folder is not None:
            # Files go with the pair, not with the run: rounds and searches make many, each as large as the model.
            folder = Path(tempfile.mkdtemp(dir=storage.folder))
            weakref.finalize(self, shutil.rmtree, folder, True)
            storage = replace(storage, folder=folder)
        statistics = Statistics(self.targets, terms, self.context.model, storage)
        self._accumulator_bytes += statistics.nbytes
        self.diagnostics.accumulator_bytes = max(self.diagnostics.accumulator_bytes, self._accumulator_bytes)
        return statistics

    def _probe(self, state: ProbeState) -> None:
        """One probe, from where it was left, and its sums over all processes."""
        context, snapshots, stage = self.context, self.context.snapshots, state.stage
        with context.stopwatch(stage.name):
            if snapshots and self.at.begun == stage:
                state.load(snapshots.read(stage.step))
                self.served = state.served
                self.diagnostics.load(state.diagnostics)
            elif snapshots:
                state.diagnostics = self.diagnostics.to_dict()
                snapshots.enter(stage.step, state.values(), state.parts())
            loss = run_probe(context.workload, self._pass(state))
            if snapshots:
                snapshots.record(stage.step, state.values(), state.parts(), len(state.tally))
            state.measured.reduce(context.processes)
        self._count_probe(stage, loss.mean)

    def _pass(self, state: ProbeState) -> ProbePass:
        context, config = self.context, self.context.config
        own = {target.name for target in self.targets}
        others = [target for target in context.targets if target.name in self.served and target.name not in own]
        is_second = state.stage.is_second
        what = "candidates shrunk" if is_second else "original weights"
        return ProbePass(
            self.targets,
            state.measured,
            shrunk=state.candidates if is_second else self.served,
            factor=config.reduction_factor if is_second else 0.0,
            pruned=(others, self.served),
            cache=self.at.cache,
            spike_limit=config.spike_limit if config.decision_row.limits_spikes else 0.0,
            tally=state.tally,
            after_batch=partial(self._save, state),
            refuses_flat=len(self.targets) == len(context.targets),
            label=f"{state.stage.name} ({self.at.label}{what})",
        )

    def _save(self, state: ProbeState) -> None:
        snapshots = self.context.snapshots
        if snapshots and len(state.tally) % snapshots.save_every == 0:
            position = len(state.tally)
            snapshots.record(state.stage.step, state.values(), state.parts(), position, together=False)

    def _count_probe(self, stage: ProbeStage, loss: float) -> None:
        self.diagnostics.probe_losses[stage.name] = loss
        skipped = self.at.cache.share if self.at.cache else 0.0
        self.diagnostics.count("forward", 1 - skipped)
        self.diagnostics.count("backward", self.at.depth)
