"""The trial: one pair of probes, and everything that can be decided from it without another.

Probe 0 measures the targets as they are served, candidates are chosen from it, probe 1 measures with them shrunk. The
statistics stay: `masks_at` any budget, or `masks_within` any threshold, are then a matter of selection alone.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from gradprobe_hf.config import GradientThreshold, Scope
from gradprobe_hf.decisions.decision import (
    candidate_score,
    evidence_needed,
    keys_of,
    no_evidence,
    path_score,
    row_fisher,
    threshold_mask,
)
from gradprobe_hf.model.block_cache import BlockOutputCache
from gradprobe_hf.model.fsdp import is_sharded
from gradprobe_hf.model.parameters import row_chunks
from gradprobe_hf.model.targets import Target
from gradprobe_hf.probe.engine import Tally, observe_inputs, run_probe
from gradprobe_hf.probe.statistics import Statistics
from gradprobe_hf.run.context import Diagnostics, RunContext
from gradprobe_hf.run.snapshots import ProbeState, Snapshots
from gradprobe_hf.selection.packed_masks import PackedMasks
from gradprobe_hf.selection.published_rule import thresholds
from gradprobe_hf.selection.select import Bounds, Keys, key_range, select_masks


class ProbePair:
    """One pair of probes.

    Args:
        targets: what is decided: all targets of the setting, or those of a step.
        findings: added to.
        number: of the trial in its run: its probes are numbers `2 number` and `2 number + 1`.
        served: what is pruned already, masks of these targets or of others.
        candidates: proposed before, for these targets or for more; by default this trial proposes them.
        prefix: where a pass starts, if not at the beginning.
        depth: the share of the model that a backward pass goes through.
        place: what progress bars say of where in its run it is.
    """

    def __init__(
        self,
        setting: RunContext,
        targets: Sequence[Target],
        findings: Diagnostics,
        number: int = 0,
        served: PackedMasks | None = None,
        candidates: PackedMasks | None = None,
        prefix: BlockOutputCache | None = None,
        depth: float = 1.0,
        place: str = "",
    ) -> None:
        self.setting, self.targets, self.findings, self.number = setting, tuple(targets), findings, number
        self.served, self.prefix, self.depth, self.place = served or PackedMasks(), prefix, depth, place
        self._proposed = candidates
        self._bytes = 0
        needed = evidence_needed(setting.config)
        as_it_is = number == 0 and not self.served and needed.passes == "probe"
        self._lent = setting.first if as_it_is else None
        self.first: Statistics | None = None
        if needed.terms:
            self.first = self._lent.statistics if self._lent else self._new_statistics(needed.terms)
        self.after: Statistics | None = None
        self.rows_before: dict[str, list[float]] = {}  # what `findings.row_fisher` was
        self.candidates: PackedMasks | None = None  # only as long as a second probe, or the threshold rule, needs them

    def run(self, sparsity: float, begun: int | None = None) -> PackedMasks:
        """Probe, propose, probe again, decide.

        Args:
            sparsity: the budget, as a fraction of these targets.
            begun: the number of the probe that an earlier run was killed in, or after: it goes on from there.
        """
        config = self.setting.config
        if begun != 2 * self.number + 1:
            self.probe_as_served(resumed=begun == 2 * self.number)
            candidates = self._proposed or self.propose(sparsity)
            if config.decision == "none":
                self._note_rows()
                return candidates
            self.candidates = candidates
            del candidates
        self.probe_shrunk(resumed=begun == 2 * self.number + 1)
        self._note_rows()
        if config.decision == "threshold":
            assert self.candidates is not None, "proposed, or recalled"
            return self.masks_within(config.gradient_threshold)
        return self.masks_at(sparsity)

    def probe_as_served(self, resumed: bool = False) -> None:
        """Probe 0, or the forward pass that is all a strategy needs."""
        if self.first is None:
            return
        setting = self.setting
        if self._lent is not None:
            self._count_probe("probe 0", self._lent.loss)
        elif evidence_needed(setting.config).passes == "probe":
            progress = ProbeState(2 * self.number, Tally(), {"first": self.first}, self._proposed, self.served)
            self._probe("original weights", self.first, progress, resumed)
        else:
            assert setting.batches is not None, "the caller read them for this"
            with setting.stopwatch("inputs"):
                observe_inputs(
                    setting.model, self.targets, setting.batches, self.first, setting.progress, setting.processes
                )
                self.first.reduce(setting.processes)
            self.findings.count("forward", 1)
        unreached = set(self.first.unreached)
        self.findings.reached |= {target.name for target in self.targets if target.name not in unreached}

    def propose(self, sparsity: float) -> PackedMasks:
        """The strategy's candidates at a budget."""
        config = self.setting.config
        score = partial(candidate_score, statistics=self.first, config=config)
        with self.setting.stopwatch("candidates"):
            # Bounds are for what is pruned in the end; so are candidates, where nothing decides after them.
            bounds = config.bounds if config.decision == "none" else None
            return self._select(keys_of(self.setting.model, score), config.candidate_scope, sparsity, bounds)

    def probe_shrunk(self, resumed: bool = False) -> None:
        """Probe 1: adds to the sums of the first (path), or keeps its own (threshold)."""
        config = self.setting.config
        assert self.first is not None, "probes have statistics"
        if self._lent is not None and config.decision == "path":
            self.first = self._new_statistics(evidence_needed(config).terms)
            self.first.copy_(self._lent.statistics)
        roles = {"first": self.first}
        if config.decision == "threshold":
            self.after = roles["after"] = self._new_statistics(frozenset({"peak"}))
        else:
            self.first.probe = 1
            if not resumed:
                self.first.yield_to_main(self.setting.processes)
        progress = ProbeState(2 * self.number + 1, Tally(), roles, self.candidates, self.served)
        self.candidates = None  # they live in `progress` alone, so that they are gone before the final masks are made
        self._probe("candidates shrunk", self.after or self.first, progress, resumed)
        if config.decision == "threshold":
            self.candidates = progress.candidates

    def masks_at(self, sparsity: float) -> PackedMasks:
        """The decision at a budget; the same statistics serve any number of budgets."""
        config = self.setting.config
        if config.decision == "none":
            return self.propose(sparsity)
        assert self.first is not None, "probes have statistics"
        score = partial(path_score, statistics=self.first, fisher=config.fisher)
        with self.setting.stopwatch("selection"):
            return self._select(keys_of(self.setting.model, score), config.decision_scope, sparsity, config.bounds)

    def masks_within(self, gradient_threshold: GradientThreshold) -> PackedMasks:
        """The threshold decision; the same statistics serve any number of thresholds."""
        masks, everywhere = PackedMasks(), self.setting.targets  # a step has its share of what all matrices are told
        limits = dict(
            zip((target.name for target in everywhere), thresholds(everywhere, gradient_threshold), strict=True)
        )
        with self.setting.stopwatch("selection"):
            for target in self.targets:
                masks.add(target.name, list(self._within(target, limits[target.name])))
        return masks

    def _within(self, target: Target, threshold: float) -> Iterator[Tensor]:
        """The rows of a matrix's mask; what is given back for want of evidence is counted."""
        assert self.first is not None, "probes have statistics"
        assert self.after is not None, "the second probe kept its own"
        assert self.candidates is not None, "they are what the rule is about"
        model = self.setting.model
        matrix, first = target.matrix(model), target.region(model).rows.start
        blind = 0
        for rows in row_chunks(matrix.shape) if matrix.numel() else [slice(0, matrix.shape[0])]:
            held = slice(first + rows.start, first + rows.stop)
            peaks = self.first[target.name].read("peak", held), self.after[target.name].read("peak", held)
            device = peaks[0].device  # where the matrix is computed with; it may be kept elsewhere
            chosen, weight = self.candidates.rows(target.name, rows).to(device), matrix[rows].to(device)
            blind += int((chosen & no_evidence(*peaks) & (weight != 0)).sum())
            yield threshold_mask(chosen, *peaks, threshold, weight)
        self.findings.without_evidence[target.name] = blind

    def _note_rows(self) -> None:
        """What a reconstruction weighs rows by: these statistics do not live until then."""
        config = self.setting.config
        self.rows_before = dict(self.findings.row_fisher)
        if (config.reconstruction != "admm" and not self.setting.is_shared) or is_sharded(self.setting.model):
            return
        if config.strategy != "fisher" and config.decision != "path":
            return
        assert self.first is not None, "probes have statistics"
        for target in self.targets:
            if self.first[target.name].reached:
                rows = row_fisher(target, self.first[target.name], config.fisher)
                self.findings.row_fisher[target.name] = rows.tolist()

    def _new_statistics(self, terms: frozenset) -> Statistics:
        keeping = self.setting.keeping
        if keeping.folder is not None:
            folder = Path(tempfile.mkdtemp(dir=keeping.folder))
            weakref.finalize(self, shutil.rmtree, folder, True)  # a run may have many trials
            keeping = replace(keeping, folder=folder)
        statistics = Statistics(self.targets, terms, self.setting.model, keeping)
        self._bytes += statistics.nbytes
        self.findings.accumulator_bytes = max(self.findings.accumulator_bytes, self._bytes)
        return statistics

    def _probe(self, state: str, statistics: Statistics, progress: ProbeState, resumed: bool) -> None:
        """One probe, from where it was left, and its sums over all processes."""
        setting, journal = self.setting, self.setting.journal
        assert setting.batches is not None, "the caller read them for this"
        with setting.stopwatch(progress.stage):
            if journal and resumed:
                journal.recall(progress)
                self.served = progress.served
                self.findings.take(progress.notes)
            elif journal:
                progress.notes.update(self.findings.to_notes())
                journal.enter(progress)
            own = {target.name for target in self.targets}
            others = [target for target in setting.targets if target.name in self.served and target.name not in own]
            loss = run_probe(
                setting.model,
                self.targets,
                setting.batches,
                statistics,
                shrunk=self.served if progress.number % 2 == 0 else progress.candidates,
                factor=0.0 if progress.number % 2 == 0 else setting.config.reduction_factor,
                pruned=(others, self.served),
                prefix=self.prefix,
                spike_limit=setting.config.spike_limit if setting.config.decision == "path" else 0.0,
                loss_fn=setting.loss_fn,
                checkpointing=setting.checkpointing,
                processes=setting.processes,
                tally=progress.tally,
                after_batch=partial(_saved, journal, progress) if journal else None,
                label=f"{progress.stage} ({self.place}{state})",
                progress=setting.progress and setting.processes.is_main,
            )
            if journal:
                journal.record(progress)
            statistics.reduce(setting.processes)
        self._count_probe(progress.stage, loss.mean)

    def _count_probe(self, stage: str, loss: float) -> None:
        self.findings.probe_losses[stage] = loss
        skipped = self.prefix.share if self.prefix else 0.0
        self.findings.count("forward", 1 - skipped)
        self.findings.count("backward", self.depth)

    def _select(self, keys: Keys, scope: Scope, sparsity: float, bounds: Bounds | None) -> PackedMasks:
        ranges: dict[str, tuple[float, float]] = {}

        def recorded(target: Target) -> Iterator[Tensor]:
            ends = []
            for part in keys(target):
                if target.name not in ranges and part.numel():
                    ends.append(key_range(part))
                yield part
            if ends:
                ranges[target.name] = (min(low for low, _ in ends), max(high for _, high in ends))

        setting = self.setting
        if bounds is not None:  # the trials of a schedule begin below the least that goes in the end
            bounds = min(bounds[0], sparsity), bounds[1]
        masks = select_masks(
            self.targets,
            recorded,
            sparsity,
            scope,
            setting.config.group,
            bounds,
            processes=setting.processes,
            sharded=is_sharded(setting.model),
        )
        self.findings.score_ranges |= ranges
        return masks


def _saved(journal: Snapshots, progress: ProbeState) -> None:
    if len(progress.tally) % journal.save_every == 0:
        journal.record(progress)


def merged(masks: Mapping[str, Tensor], more: Mapping[str, Tensor]) -> PackedMasks:
    """Both sets of masks; those of `more` win."""
    found = PackedMasks()
    for part in (masks, more):
        for name in part:
            assert isinstance(part, PackedMasks), "packed"
            found.add_packed(name, part.packed(name), part.columns(name))
    return found
