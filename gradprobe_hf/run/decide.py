"""The verdict: what goes, what the kept weights become, and why. A loaded model and batches -> masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from gradprobe_hf.data.batches import Batches
from gradprobe_hf.evaluation.perplexity import measure
from gradprobe_hf.model.block_cache import blocks_in_order
from gradprobe_hf.model.fsdp import is_sharded
from gradprobe_hf.model.patches import eval_mode
from gradprobe_hf.probe.attachment import serving
from gradprobe_hf.reconstruction.blockwise import reconstruct, reconstruction_passes
from gradprobe_hf.reconstruction.new_weights import NewWeights
from gradprobe_hf.run.blockwise import decide_in_order
from gradprobe_hf.run.context import Diagnostics, RunContext
from gradprobe_hf.run.schedule import decide_in_rounds, iterate
from gradprobe_hf.selection.packed_masks import PackedMasks

Metric = Callable[[Any], float]


@dataclass(frozen=True)
class PruningDecision:
    """What goes, and what is known about why.

    Attributes:
        masks: parameter name -> bool `[out, in]`, True = pruned.
        findings: of the trials that led there.
        unreached: matrices the calibration loss does not depend on.
        updates: new values of the matrices, where kept weights were reconstructed.
        damping: what it was raised to in the matrices whose Hessian could not be inverted otherwise.
    """

    masks: Mapping[str, Tensor]
    findings: Diagnostics = field(default_factory=Diagnostics)
    unreached: tuple[str, ...] = ()
    updates: NewWeights = field(default_factory=NewWeights)
    damping: dict[str, float] = field(default_factory=dict)


def reach_verdict(
    setting: RunContext, held_out: Batches | None = None, metric: Metric | None = None
) -> PruningDecision:
    """Decide what to prune; the model is left as it was.

    Args:
        held_out: what `max_metric_drop` is measured on.
        metric: of the model, higher is better, in place of its perplexity (or loss) there.

    Raises:
        ValueError: a calibration loss or scores that are not finite, or blocks that do not run one after the other.
        ConnectionError: another process ended.
    """
    findings = Diagnostics()
    return conclude(setting, decide(setting, findings, held_out, metric), findings)


def decide(
    setting: RunContext, findings: Diagnostics, held_out: Batches | None, metric: Metric | None
) -> PackedMasks | None:
    """The masks; None where a sweep chooses them while it reconstructs."""
    config = setting.config
    if config.reconstructs:  # before the probes: it takes one batch to know that blocks run one after the other
        assert setting.batches is not None, "the caller read them for this"
        blocks_in_order(setting.model, setting.targets, next(iter(setting.batches)))
    if config.strategy == "sparsegpt":
        return None
    if config.order == "sequential":
        masks = decide_in_order(setting, findings)
    elif config.max_metric_drop is not None:
        score = _Measured(setting, findings, held_out, metric)
        masks = iterate(setting, findings, score, score(PackedMasks()))
        for point in findings.curve:
            point |= {name: score.sign * point[name] for name in ("metric", "limit")}
    else:
        masks = decide_in_rounds(setting, findings)
    _check_agreement(setting, masks)
    return masks


def conclude(setting: RunContext, masks: PackedMasks | None, findings: Diagnostics) -> PruningDecision:
    """The verdict under masks that are decided: kept weights are reconstructed, if they are to be."""
    if masks is not None and not setting.config.reconstructs:
        return PruningDecision(masks, findings, _unreached(setting, findings))
    assert setting.batches is not None, "the caller read them for this"
    with setting.stopwatch("reconstruction"):
        found = reconstruct(
            setting.model,
            setting.targets,
            setting.batches,
            masks,
            setting.config,
            row_fisher=findings.row_fisher,
            folder=setting.folder,
            processes=setting.processes,
            progress=setting.progress and setting.processes.is_main,
        )
    findings.count("forward", reconstruction_passes(setting.config))
    unreached = _unreached(setting, findings) if masks is not None else ()
    return PruningDecision(found.masks, findings, unreached, found.updates, found.damping)


def _unreached(setting: RunContext, findings: Diagnostics) -> tuple[str, ...]:
    """Where anything was measured at all, the matrices that nothing was seen of."""
    if not findings.reached:
        return ()
    return tuple(target.name for target in setting.targets if target.name not in findings.reached)


@dataclass(frozen=True)
class _Measured:
    """The metric of what masks lead to, kept weights reconstructed if they are to be; lower is better."""

    setting: RunContext
    findings: Diagnostics
    held_out: Batches | None
    metric: Metric | None

    @property
    def sign(self) -> int:
        """Of a metric of one's own, of which more is better, the negative is measured."""
        return 1 if self.metric is None else -1

    def __call__(self, masks: PackedMasks) -> float:
        setting = self.setting
        verdict = conclude(setting, masks, self.findings) if masks else PruningDecision(masks)
        view = serving(setting.model, setting.targets, verdict.masks, replaced=verdict.updates)
        with setting.stopwatch("evaluate trials"), view:
            if self.metric is not None:
                with eval_mode(setting.model):
                    value = float(self.metric(setting.model))
                return self.sign * float(setting.processes.agree(value))  # all go on with the same
            assert self.held_out is not None, "checked before"
            found = measure(
                setting.model,
                self.held_out,
                setting.loss_fn,
                "evaluation",
                setting.progress,
                setting.processes,
                is_trial=bool(masks),
            )
        return found.loss if found.perplexity is None else found.perplexity


def _check_agreement(setting: RunContext, masks: PackedMasks) -> None:
    """Processes that hold whole models have to end with one mask: a digest of it tells."""
    processes = setting.processes
    if processes.count == 1 or is_sharded(setting.model):
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
