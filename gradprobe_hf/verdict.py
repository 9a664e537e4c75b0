"""The verdict: probe, propose candidates, probe again with them shrunk, decide. A loaded model and batches -> masks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gradprobe_hf.calibration import Batches
from gradprobe_hf.config import GradProbeConfig, Scope
from gradprobe_hf.decision import (
    candidate_score,
    evidence_needed,
    keys_of,
    no_evidence,
    path_score,
    threshold_mask,
)
from gradprobe_hf.loss import LossFunction
from gradprobe_hf.masks import Masks
from gradprobe_hf.probe import Keeping, Statistics, Tally, observe_inputs, run_probe
from gradprobe_hf.processes import Processes
from gradprobe_hf.reconstruction import reconstruct
from gradprobe_hf.resume import STAGES, Journal, Progress
from gradprobe_hf.selection import Keys, key_range, select_masks
from gradprobe_hf.sharding import is_sharded
from gradprobe_hf.stopwatch import Stopwatch
from gradprobe_hf.targets import Target
from gradprobe_hf.updates import Updates
from gradprobe_hf.weights import row_chunks


@dataclass(frozen=True)
class Verdict:
    """What goes, and what is known about why.

    Attributes:
        masks: parameter name -> bool `[out, in]`, True = pruned.
        score_ranges: lowest and highest score of each matrix, of the scores that ordered it last.
        without_evidence: candidates of each matrix given back because no probe saw a gradient (threshold decision).
        probe_losses: mean calibration loss of each probe, in nats.
        unreached: matrices the calibration loss does not depend on.
        accumulator_bytes: size of all statistics `[out, in]`.
        updates: new values of the matrices, where kept weights were reconstructed.
        damping: what it was raised to in the matrices whose Hessian could not be inverted otherwise.
    """

    masks: Mapping[str, Tensor]
    score_ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    without_evidence: dict[str, int] = field(default_factory=dict)
    probe_losses: dict[str, float] = field(default_factory=dict)
    unreached: tuple[str, ...] = ()
    accumulator_bytes: int = 0
    updates: Updates = field(default_factory=Updates)
    damping: dict[str, float] = field(default_factory=dict)


def reach_verdict(
    model: PreTrainedModel,
    targets: tuple[Target, ...],
    config: GradProbeConfig,
    batches: Batches | None,
    *,
    loss_fn: LossFunction | None = None,
    checkpointing: bool = False,
    keeping: Keeping | None = None,
    processes: Processes | None = None,
    journal: Journal | None = None,
    folder: str | Path | None = None,
    stopwatch: Stopwatch | None = None,
    progress: bool = True,
) -> Verdict:
    """Decide what to prune; the model is left as it was.

    Args:
        batches: the calibration data; None where `evidence_needed(config)` asks for no pass.
        loss_fn: `loss_fn(model, batch)` returns the summed loss in place of the model's own.
        checkpointing: recompute blocks in backward.
        keeping: how accumulators are kept.
        processes: who shares the batches; every process reaches the same verdict.
        journal: where the state is kept that a killed run goes on from.
        folder: for the reconstructed weights of a model that is offloaded.

    Raises:
        ValueError: a calibration loss or scores that are not finite.
        ConnectionError: another process ended.
    """
    trial = _Trial(
        model,
        targets,
        config,
        batches,
        loss_fn,
        checkpointing,
        keeping or Keeping(),
        processes or Processes(),
        journal,
        folder,
        stopwatch or Stopwatch(),
        progress,
    )
    return trial.verdict()


@dataclass
class _Trial:
    """The arguments of `reach_verdict`, and what was found on the way."""

    model: PreTrainedModel
    targets: tuple[Target, ...]
    config: GradProbeConfig
    batches: Batches | None
    loss_fn: LossFunction | None
    checkpointing: bool
    keeping: Keeping
    processes: Processes
    journal: Journal | None
    folder: str | Path | None
    stopwatch: Stopwatch
    progress: bool
    score_ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    without_evidence: dict[str, int] = field(default_factory=dict)
    probe_losses: dict[str, float] = field(default_factory=dict)
    accumulator_bytes: int = 0

    def verdict(self) -> Verdict:
        masks, unreached = (None, ()) if self.config.strategy == "sparsegpt" else self._decided()
        found = Verdict(
            {} if masks is None else masks,
            self.score_ranges,
            self.without_evidence,
            self.probe_losses,
            unreached,
            self.accumulator_bytes,
        )
        if self.config.reconstructs:
            assert self.batches is not None, "the caller read them for this"
            with self.stopwatch("reconstruction"):
                new = reconstruct(
                    self.model,
                    self.targets,
                    self.batches,
                    masks,
                    self.config,
                    folder=self.folder,
                    processes=self.processes,
                    progress=self.progress,
                )
            found = replace(found, masks=new.masks, updates=new.updates, damping=new.damping)
        return found

    def _decided(self) -> tuple[Masks, tuple[str, ...]]:
        """The masks, and the matrices that no probe has seen a gradient of."""
        needed = evidence_needed(self.config)
        first = self._new_statistics(needed.terms, "first") if needed.terms else None
        begun = self.journal.latest_stage() if self.journal and needed.passes == "probe" else None
        candidates = None
        if begun != "probe 1":
            if first is not None:
                self._first_evidence(first, begun == "probe 0")
            candidates = self._candidates(first)
        if self.config.decision == "none":
            assert candidates is not None, "there is no second stage to go on from"
            masks = candidates
        else:
            assert first is not None, "every other decision has probed"
            decide = self._by_path if self.config.decision == "path" else self._by_threshold
            masks = decide(first, candidates)
        self._check_agreement(masks)
        return masks, tuple(first.unreached) if first else ()

    def _check_agreement(self, masks: Masks) -> None:
        """Processes that hold whole models have to end with one mask: a digest of it tells."""
        if self.processes.count == 1 or is_sharded(self.model):
            return
        digest = sha256()
        for name in masks:
            digest.update(masks.packed(name).cpu().numpy().tobytes())
        own = torch.tensor(int.from_bytes(digest.digest()[:7], "big"))
        lowest, highest = self.processes.min_(own.clone()), self.processes.max_(own.clone())
        if lowest != highest:
            raise RuntimeError(
                "the processes reached different masks: they do not hold the same model, or not the same calibration "
                "data. Load both from the same place in every process. Nothing was changed."
            )

    def _first_evidence(self, statistics: Statistics, resumed: bool) -> None:
        if evidence_needed(self.config).passes == "probe":
            progress = Progress("probe 0", Tally(), {"first": statistics})
            self._probe("original weights", statistics, progress, resumed)
            return
        assert self.batches is not None, "the caller read them for this"
        with self.stopwatch("inputs"):
            observe_inputs(self.model, self.targets, self.batches, statistics, self.progress, self.processes)
            statistics.reduce(self.processes)

    def _candidates(self, statistics: Statistics | None) -> Masks:
        score = partial(candidate_score, statistics=statistics, config=self.config)
        with self.stopwatch("candidates"):
            return self._select(keys_of(self.model, score), self.config.candidate_scope)

    def _by_path(self, statistics: Statistics, candidates: Masks | None) -> Masks:
        resumed = candidates is None
        statistics.probe = 1
        if not resumed:
            statistics.yield_to_main(self.processes)
        # The candidates live in `progress` alone, so that they are gone before the final masks are made.
        progress = Progress("probe 1", Tally(), {"first": statistics}, candidates, dict(self.probe_losses))
        del candidates
        self._probe("candidates shrunk", statistics, progress, resumed)
        score = partial(path_score, statistics=statistics, fisher=self.config.fisher)
        progress.candidates = None
        with self.stopwatch("selection"):
            return self._select(keys_of(self.model, score), self.config.decision_scope)

    def _by_threshold(self, before: Statistics, candidates: Masks | None) -> Masks:
        after = self._new_statistics(frozenset({"peak"}), "after")
        notes = {**self.probe_losses, "score_ranges": self.score_ranges}
        progress = Progress("probe 1", Tally(), {"first": before, "after": after}, candidates, notes)
        self._probe("candidates shrunk", after, progress, resumed=candidates is None)
        self.score_ranges = {name: tuple(ends) for name, ends in progress.notes["score_ranges"].items()}
        assert progress.candidates is not None, "given, or recalled"
        masks = Masks()
        with self.stopwatch("selection"):
            for target in self.targets:
                masks.add(target.name, list(self._within_threshold(target, progress.candidates, before, after)))
        return masks

    def _within_threshold(
        self, target: Target, candidates: Masks, before: Statistics, after: Statistics
    ) -> Iterator[Tensor]:
        """The rows of a matrix's mask; what is given back for want of evidence is counted."""
        matrix, first = target.matrix(self.model), target.region(self.model).rows.start
        blind = 0
        for rows in row_chunks(matrix.shape) if matrix.numel() else [slice(0, matrix.shape[0])]:
            chosen, weight = candidates.rows(target.name, rows), matrix[rows]
            held = slice(first + rows.start, first + rows.stop)
            peaks = before[target.name].read("peak", held), after[target.name].read("peak", held)
            blind += int((chosen & no_evidence(*peaks) & (weight != 0)).sum())
            yield threshold_mask(chosen, *peaks, self.config.gradient_threshold, weight)
        self.without_evidence[target.name] = blind

    def _new_statistics(self, terms: frozenset, role: str) -> Statistics:
        folder = self.keeping.folder
        if folder is not None:
            (folder := folder / role).mkdir()
        statistics = Statistics(self.targets, terms, self.model, replace(self.keeping, folder=folder))
        self.accumulator_bytes += statistics.nbytes
        return statistics

    def _probe(self, state: str, statistics: Statistics, progress: Progress, resumed: bool) -> None:
        """One probe, from where it was left, and its sums over all processes."""
        assert self.batches is not None, "the caller read them for this"
        stage = progress.stage
        with self.stopwatch(stage):
            if self.journal and resumed:
                self.journal.recall(progress)
                self.probe_losses.update({k: v for k, v in progress.notes.items() if k in STAGES})
            elif self.journal:
                self.journal.enter(progress)
            loss = run_probe(
                self.model,
                self.targets,
                self.batches,
                statistics,
                shrunk=progress.candidates,
                factor=self.config.reduction_factor,
                loss_fn=self.loss_fn,
                checkpointing=self.checkpointing,
                processes=self.processes,
                tally=progress.tally,
                after_batch=partial(self._saved, progress) if self.journal else None,
                label=f"{stage} ({state})",
                progress=self.progress and self.processes.is_main,
            )
            if self.journal:
                self.journal.record(progress)
            statistics.reduce(self.processes)
        self.probe_losses[stage] = loss.mean

    def _saved(self, progress: Progress) -> None:
        assert self.journal is not None
        if len(progress.tally) % self.journal.save_every == 0:
            self.journal.record(progress)

    def _select(self, keys: Keys, scope: Scope) -> Masks:
        assert self.config.sparsity is not None, "resolved by the configuration"
        self.score_ranges = {}

        def recorded(target: Target) -> Iterator[Tensor]:
            ends = []
            for part in keys(target):
                if target.name not in self.score_ranges and part.numel():
                    ends.append(key_range(part))
                yield part
            if ends:
                self.score_ranges[target.name] = (min(low for low, _ in ends), max(high for _, high in ends))

        return select_masks(
            self.targets,
            recorded,
            self.config.sparsity,
            scope,
            self.config.group,
            processes=self.processes,
            sharded=is_sharded(self.model),
        )
