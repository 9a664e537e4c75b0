"""The probe pair: up to two probes, and everything that can be decided from them without another.

Probe 0 measures the targets as they are served, candidates are chosen from it, probe 1 measures with them shrunk. The
statistics stay: `masks_at` any budget, or `masks_within` any threshold, are then a matter of selection alone.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gradprobe_hf.config.values import GradientThreshold
from gradprobe_hf.decisions.threshold import no_evidence
from gradprobe_hf.model.block_cache import BlockOutputCache
from gradprobe_hf.model.fsdp import is_sharded
from gradprobe_hf.model.targets import Region, Target
from gradprobe_hf.probe.engine import ProbePass, observe_inputs, run_probe
from gradprobe_hf.probe.matrix import MatrixStatistics
from gradprobe_hf.probe.statistics import Statistics
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.run.diagnostics import Diagnostics
from gradprobe_hf.run.probe_state import ProbeState
from gradprobe_hf.runtime.row_chunks import row_chunks
from gradprobe_hf.scores.budget import Budget
from gradprobe_hf.scores.evidence import Evidence, Term
from gradprobe_hf.scores.fisher import estimated_fisher
from gradprobe_hf.selection.keys import Keys, key_range, keys_of
from gradprobe_hf.selection.packed_masks import PackedMasks
from gradprobe_hf.selection.published_rule import thresholds
from gradprobe_hf.selection.select import select_masks


@dataclass(frozen=True)
class Position:
    """Where in its run a probe pair is.

    Attributes:
        number: of the pair: its probes are numbers `2 number` and `2 number + 1`.
        served: what is pruned already, masks of its targets or of others.
        candidates: proposed before, for its targets or for more; None: the pair proposes them.
        cache: where a pass starts, if not at the beginning.
        depth: the share of the model that a backward pass goes through.
        label: what progress bars say of it.
    """

    number: int = 0
    served: PackedMasks = field(default_factory=PackedMasks)
    candidates: PackedMasks | None = None
    cache: BlockOutputCache | None = None
    depth: float = 1.0
    label: str = ""


class ProbePair:
    """Up to two probes of some targets.

    Args:
        targets: what is decided: all targets of the context, or those of a step.
        diagnostics: added to.
    """

    def __init__(
        self, context: RunContext, targets: Sequence[Target], diagnostics: Diagnostics, at: Position | None = None
    ) -> None:
        self.context, self.targets, self.diagnostics = context, tuple(targets), diagnostics
        self.at = at or Position()
        self.served = self.at.served
        self._bytes = 0
        needs = context.config.needs
        as_it_is = self.at.number == 0 and not self.served and needs.probes
        self._shared = context.shared_probe if as_it_is else None
        self.first: Statistics = self._shared.statistics if self._shared else self._new_statistics(needs.terms)
        self.second: Statistics | None = None  # of a decision whose second probe keeps its own
        self.row_fisher_before: dict[str, list[float]] = {}  # what `diagnostics.row_fisher` was
        self.candidates: PackedMasks | None = None  # only as long as a second probe, or a filter, needs them

    def run(self, sparsity: float, begun: int | None = None) -> PackedMasks:
        """Probe, propose, probe again, decide.

        Args:
            sparsity: the budget, as a fraction of these targets.
            begun: the number of the probe that an earlier run was killed in, or after: it goes on from there.
        """
        config, own = self.context.config, 2 * self.at.number
        if begun != own + 1:
            self.probe_as_served(resumed=begun == own)
            candidates = self.at.candidates or self.propose(sparsity)
            if not config.decision_row.has_second_probe:
                self._note_row_fisher()
                return candidates
            self.candidates = candidates
            del candidates
        self.probe_shrunk(resumed=begun == own + 1)
        self._note_row_fisher()
        if config.decision_row.filters is not None:
            return self.masks_within(config.gradient_threshold)
        return self.masks_at(sparsity)

    def probe_as_served(self, resumed: bool = False) -> None:
        """Probe 0, or the forward pass that is all a score needs, or nothing."""
        context, needs = self.context, self.context.config.needs
        if not needs.terms:
            return
        if self._shared is not None:
            self._count_probe("probe 0", self._shared.loss)
        elif needs.probes:
            self._probe(ProbeState(2 * self.at.number, {"first": self.first}, self.served, self.at.candidates), resumed)
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
            return self._select(row.function, Budget(sparsity, config.candidate_scope, config.group, bounds))

    def probe_shrunk(self, resumed: bool = False) -> None:
        """Probe 1: adds to the sums of the first, or keeps its own."""
        context, row = self.context, self.context.config.decision_row
        if self._shared is not None and not row.keeps_second:
            self.first = self._new_statistics(context.config.needs.terms)
            self.first.copy_(self._shared.statistics)
        statistics = {"first": self.first}
        if row.keeps_second:
            self.second = statistics["second"] = self._new_statistics(frozenset(row.terms))
        else:
            self.first.probe = 1
            if not resumed:
                # The sums of probe 0 are the same in every process by now: one of them must bring them along alone.
                self.first.clear_except_on_main(context.processes)
        state = ProbeState(2 * self.at.number + 1, statistics, self.served, self.candidates)
        # Candidates live in `state` alone, so that they are gone before the final masks are made: 0.9 GB at 7B.
        self.candidates = None
        self._probe(state, resumed)
        if row.filters is not None:
            self.candidates = state.candidates

    def masks_at(self, sparsity: float) -> PackedMasks:
        """The decision at a budget; the same statistics serve any number of budgets."""
        config = self.context.config
        function = config.decision_row.function
        if function is None:
            return self.propose(sparsity)
        with self.context.stopwatch("selection"):
            return self._select(function, config.budget_of(sparsity))

    def masks_within(self, gradient_threshold: GradientThreshold, candidates: PackedMasks | None = None) -> PackedMasks:
        """The threshold rule; the same statistics serve any number of thresholds.

        Args:
            candidates: some of those that the second probe has shrunk; default: all of them.
        """
        candidates = self.candidates if candidates is None else candidates
        masks, everywhere = PackedMasks(), self.context.targets  # a step has its share of what all matrices are told
        limits = dict(
            zip((target.name for target in everywhere), thresholds(everywhere, gradient_threshold), strict=True)
        )
        with self.context.stopwatch("selection"):
            for target in self.targets:
                masks.add(target.name, list(self._within(target, limits[target.name], candidates)))
        return masks

    def _within(self, target: Target, threshold: float, candidates: PackedMasks | None) -> Iterator[Tensor]:
        """The rows of a matrix's mask; what is given back for want of evidence is counted."""
        filters = self.context.config.decision_row.filters
        assert filters is not None, "a rule that filters its candidates"
        assert self.second is not None, "the second probe kept its own"
        assert candidates is not None, "they are what the rule is about"
        model = self.context.model
        matrix, first = target.matrix(model), target.region(model).rows.start
        blind = 0
        for rows in row_chunks(matrix.shape) if matrix.numel() else [slice(0, matrix.shape[0])]:
            held = slice(first + rows.start, first + rows.stop)
            peaks = self.first[target.name].read("peak", held), self.second[target.name].read("peak", held)
            device = peaks[0].device  # where the matrix is computed with; it may be kept elsewhere
            chosen, weight = candidates.rows(target.name, rows).to(device), matrix[rows].to(device)
            blind += int((chosen & no_evidence(*peaks) & (weight != 0)).sum())
            yield filters(chosen, *peaks, threshold, weight)
        self.diagnostics.without_evidence[target.name] = blind

    def _note_row_fisher(self) -> None:
        """What a weight update weighs rows by: these statistics do not live until then."""
        context, config = self.context, self.context.config
        self.row_fisher_before = dict(self.diagnostics.row_fisher)
        wanted = config.update_row.weighs_rows or context.keeps_row_fisher
        if not wanted or not config.uses_fisher:
            return
        for target in self.targets:
            if self.first[target.name].reached:
                rows = _row_fisher(target, self.first[target.name], config.fisher)
                if is_sharded(context.model):
                    context.processes.sum_(rows)
                self.diagnostics.row_fisher[target.name] = rows.tolist()

    def _new_statistics(self, terms: frozenset[Term]) -> Statistics:
        storage = self.context.storage
        if storage.folder is not None:
            # Files go with the pair, not with the run: rounds and searches make many, each as large as the model.
            folder = Path(tempfile.mkdtemp(dir=storage.folder))
            weakref.finalize(self, shutil.rmtree, folder, True)
            storage = replace(storage, folder=folder)
        statistics = Statistics(self.targets, terms, self.context.model, storage)
        self._bytes += statistics.nbytes
        self.diagnostics.accumulator_bytes = max(self.diagnostics.accumulator_bytes, self._bytes)
        return statistics

    def _probe(self, state: ProbeState, resumed: bool) -> None:
        """One probe, from where it was left, and its sums over all processes."""
        context, snapshots = self.context, self.context.snapshots
        with context.stopwatch(state.stage):
            if snapshots and resumed:
                state.load(snapshots.read(state.step))
                self.served = state.served
                self.diagnostics.load(state.diagnostics)
            elif snapshots:
                state.diagnostics = self.diagnostics.to_dict()
                snapshots.enter(state.step, state.values(), state.parts())
            loss = run_probe(context.workload, self._pass(state))
            if snapshots:
                snapshots.record(state.step, state.values(), state.parts(), len(state.tally))
            state.measured.reduce(context.processes)
        self._count_probe(state.stage, loss.mean)

    def _pass(self, state: ProbeState) -> ProbePass:
        context, config = self.context, self.context.config
        own = {target.name for target in self.targets}
        others = [target for target in context.targets if target.name in self.served and target.name not in own]
        what = "candidates shrunk" if state.is_second else "original weights"
        return ProbePass(
            self.targets,
            state.measured,
            shrunk=state.candidates if state.is_second else self.served,
            factor=config.reduction_factor if state.is_second else 0.0,
            pruned=(others, self.served),
            cache=self.at.cache,
            spike_limit=config.spike_limit if config.decision_row.limits_spikes else 0.0,
            tally=state.tally,
            after_batch=partial(self._save, state),
            refuses_flat=len(self.targets) == len(context.targets),
            label=f"{state.stage} ({self.at.label}{what})",
        )

    def _save(self, state: ProbeState) -> None:
        snapshots = self.context.snapshots
        if snapshots and len(state.tally) % snapshots.save_every == 0:
            snapshots.record(state.step, state.values(), state.parts(), len(state.tally))

    def _count_probe(self, stage: str, loss: float) -> None:
        self.diagnostics.probe_losses[stage] = loss
        skipped = self.at.cache.share if self.at.cache else 0.0
        self.diagnostics.count("forward", 1 - skipped)
        self.diagnostics.count("backward", self.at.depth)

    def _select(self, function: Callable[[Evidence], Tensor], budget: Budget) -> PackedMasks:
        context = self.context
        if budget.bounds is not None:
            # The attempts of a search begin below the least that goes in the end.
            budget = replace(budget, bounds=(min(budget.bounds[0], budget.sparsity), budget.bounds[1]))
        ranges: dict[str, tuple[float, float]] = {}
        keys = _recorded(keys_of(context.model, partial(self._score, function)), ranges)
        masks = select_masks(self.targets, keys, budget, context.processes, is_sharded(context.model))
        self.diagnostics.score_ranges |= ranges
        return masks

    def _score(self, function: Callable[[Evidence], Tensor], target: Target, weight: Tensor, part: Region) -> Tensor:
        config = self.context.config
        known = self.first[target.name]
        return function(
            Evidence(weight, known, part.rows, part.columns, target.name, target.shape[1], config.fisher, config.seed)
        )


def _recorded(keys: Keys, ranges: dict[str, tuple[float, float]]) -> Keys:
    """The same keys; the lowest and highest score of each matrix are put down in `ranges`."""

    def recorded(target: Target) -> Iterator[Tensor]:
        ends = []
        for part in keys(target):
            if target.name not in ranges and part.numel():
                ends.append(key_range(part))
            yield part
        if ends:
            ranges[target.name] = (min(low for low, _ in ends), max(high for _, high in ends))

    return recorded


def _row_fisher(target: Target, statistics: MatrixStatistics, estimate: str) -> Tensor:
    """The mean Fisher information of the weights of each row, `[out]`; of a sharded matrix this process's share."""
    found, region = torch.zeros(target.shape[0], dtype=torch.float64), statistics.region
    for chunk in row_chunks(region.shape) if 0 not in region.shape else ():
        rows = slice(region.rows.start + chunk.start, region.rows.start + chunk.stop)
        mean = estimated_fisher(statistics, estimate, rows).mean(1)
        found[rows] = mean.double().cpu() * (region.shape[1] / target.shape[1])
    return found


def merged(masks: Mapping[str, Tensor], more: Mapping[str, Tensor]) -> PackedMasks:
    """Both sets of masks; those of `more` win."""
    found = PackedMasks()
    for part in (masks, more):
        for name in part:
            assert isinstance(part, PackedMasks), "packed"
            found.add_packed(name, part.packed(name), part.columns(name))
    return found
