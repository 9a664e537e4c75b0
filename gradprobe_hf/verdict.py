"""The verdict: probe, propose candidates, probe again with them shrunk, decide. A loaded model and batches -> masks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

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
from gradprobe_hf.probe import Statistics, observe_inputs, run_probe
from gradprobe_hf.selection import Keys, key_range, select_masks
from gradprobe_hf.stopwatch import Stopwatch
from gradprobe_hf.targets import Target


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
    """

    masks: dict[str, Tensor]
    score_ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    without_evidence: dict[str, int] = field(default_factory=dict)
    probe_losses: dict[str, float] = field(default_factory=dict)
    unreached: tuple[str, ...] = ()
    accumulator_bytes: int = 0


def reach_verdict(
    model: PreTrainedModel,
    targets: tuple[Target, ...],
    config: GradProbeConfig,
    batches: Batches | None,
    *,
    loss_fn: LossFunction | None = None,
    stopwatch: Stopwatch | None = None,
    progress: bool = True,
) -> Verdict:
    """Decide what to prune; the model is left as it was.

    Args:
        batches: the calibration data; None where `evidence_needed(config)` asks for no pass.
        loss_fn: `loss_fn(model, batch)` returns the summed loss in place of the model's own.

    Raises:
        ValueError: a calibration loss or scores that are not finite.
    """
    return _Trial(model, targets, config, batches, loss_fn, stopwatch or Stopwatch(), progress).verdict()


@dataclass
class _Trial:
    """The arguments of `reach_verdict`, and what was found on the way."""

    model: PreTrainedModel
    targets: tuple[Target, ...]
    config: GradProbeConfig
    batches: Batches | None
    loss_fn: LossFunction | None
    stopwatch: Stopwatch
    progress: bool
    score_ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    without_evidence: dict[str, int] = field(default_factory=dict)
    probe_losses: dict[str, float] = field(default_factory=dict)
    accumulator_bytes: int = 0

    def verdict(self) -> Verdict:
        statistics = self._first_evidence()
        score = partial(candidate_score, statistics=statistics, config=self.config)
        with self.stopwatch("candidates"):
            masks = self._select(keys_of(self.model, score), self.config.candidate_scope)
        if self.config.decision != "none":
            assert statistics is not None, "every other decision has probed"
            decide = {"path": self._by_path, "threshold": self._by_threshold}[self.config.decision]
            masks = decide(statistics, masks)
        return Verdict(
            masks,
            self.score_ranges,
            self.without_evidence,
            self.probe_losses,
            tuple(statistics.unreached) if statistics else (),
            self.accumulator_bytes,
        )

    def _first_evidence(self) -> Statistics | None:
        needed = evidence_needed(self.config)
        if needed.passes == "none":
            return None
        statistics = self._new_statistics(needed.terms)
        if needed.passes == "probe":
            self._probe("probe 0", "original weights", statistics)
            return statistics
        assert self.batches is not None, "the caller read them for this"
        with self.stopwatch("inputs"):
            observe_inputs(self.model, self.targets, self.batches, statistics, self.progress)
        return statistics

    def _by_path(self, statistics: Statistics, candidates: dict[str, Tensor]) -> dict[str, Tensor]:
        statistics.probe = 1
        self._probe("probe 1", "candidates shrunk", statistics, candidates)
        score = partial(path_score, statistics=statistics, fisher=self.config.fisher)
        with self.stopwatch("selection"):
            return self._select(keys_of(self.model, score), self.config.decision_scope)

    def _by_threshold(self, before: Statistics, candidates: dict[str, Tensor]) -> dict[str, Tensor]:
        after = self._new_statistics(frozenset({"peak"}))
        self._probe("probe 1", "candidates shrunk", after, candidates)
        masks = {}
        with self.stopwatch("selection"):
            for target in self.targets:
                chosen, weight = candidates[target.name], target.matrix(self.model)
                peaks = before[target.name].peaks, after[target.name].peaks
                masks[target.name] = threshold_mask(chosen, *peaks, self.config.gradient_threshold, weight)
                blind = chosen & no_evidence(*peaks) & (weight != 0)
                self.without_evidence[target.name] = int(blind.sum())
        return masks

    def _new_statistics(self, terms: frozenset) -> Statistics:
        statistics = Statistics(self.targets, terms, self.model)
        self.accumulator_bytes += statistics.nbytes
        return statistics

    def _probe(
        self, stage: str, state: str, statistics: Statistics, shrunk: Mapping[str, Tensor] | None = None
    ) -> None:
        assert self.batches is not None, "the caller read them for this"
        with self.stopwatch(stage):
            loss = run_probe(
                self.model,
                self.targets,
                self.batches,
                statistics,
                shrunk=shrunk,
                factor=self.config.reduction_factor,
                loss_fn=self.loss_fn,
                label=f"{stage} ({state})",
                progress=self.progress,
            )
        self.probe_losses[stage] = loss.mean

    def _select(self, keys: Keys, scope: Scope) -> dict[str, Tensor]:
        assert self.config.sparsity is not None, "resolved by the configuration"
        self.score_ranges = {}

        def recorded(target: Target) -> Tensor:
            found = keys(target)
            if target.name not in self.score_ranges:
                self.score_ranges[target.name] = key_range(found)
            return found

        return select_masks(self.targets, recorded, self.config.sparsity, scope, self.config.group)
