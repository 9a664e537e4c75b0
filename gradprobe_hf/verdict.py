"""The verdict: what goes, what the kept weights become, and why. A loaded model and batches -> masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from gradprobe_hf.blocks import blocks_in_order
from gradprobe_hf.calibration import Batches
from gradprobe_hf.evaluation import measure
from gradprobe_hf.masks import Masks
from gradprobe_hf.modes import eval_mode
from gradprobe_hf.probe import serving
from gradprobe_hf.reconstruction import reconstruct, reconstruction_passes
from gradprobe_hf.schedule import decide_in_rounds, iterate
from gradprobe_hf.sequential import decide_in_order
from gradprobe_hf.setting import Findings, Setting
from gradprobe_hf.sharding import is_sharded
from gradprobe_hf.updates import Updates

Metric = Callable[[Any], float]


@dataclass(frozen=True)
class Verdict:
    """What goes, and what is known about why.

    Attributes:
        masks: parameter name -> bool `[out, in]`, True = pruned.
        findings: of the trials that led there.
        unreached: matrices the calibration loss does not depend on.
        updates: new values of the matrices, where kept weights were reconstructed.
        damping: what it was raised to in the matrices whose Hessian could not be inverted otherwise.
    """

    masks: Mapping[str, Tensor]
    findings: Findings = field(default_factory=Findings)
    unreached: tuple[str, ...] = ()
    updates: Updates = field(default_factory=Updates)
    damping: dict[str, float] = field(default_factory=dict)


def reach_verdict(setting: Setting, held_out: Batches | None = None, metric: Metric | None = None) -> Verdict:
    """Decide what to prune; the model is left as it was.

    Args:
        held_out: what `max_metric_drop` is measured on.
        metric: of the model, higher is better, in place of its perplexity (or loss) there.

    Raises:
        ValueError: a calibration loss or scores that are not finite, or blocks that do not run one after the other.
        ConnectionError: another process ended.
    """
    findings = Findings()
    return conclude(setting, decide(setting, findings, held_out, metric), findings)


def decide(setting: Setting, findings: Findings, held_out: Batches | None, metric: Metric | None) -> Masks | None:
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
        masks = iterate(setting, findings, score, score(Masks()))
        for point in findings.curve:
            point |= {name: score.sign * point[name] for name in ("metric", "limit")}
    else:
        masks = decide_in_rounds(setting, findings)
    _check_agreement(setting, masks)
    return masks


def conclude(setting: Setting, masks: Masks | None, findings: Findings) -> Verdict:
    """The verdict under masks that are decided: kept weights are reconstructed, if they are to be."""
    if masks is not None and not setting.config.reconstructs:
        return Verdict(masks, findings, _unreached(setting, findings))
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
    return Verdict(found.masks, findings, unreached, found.updates, found.damping)


def _unreached(setting: Setting, findings: Findings) -> tuple[str, ...]:
    """Where anything was measured at all, the matrices that nothing was seen of."""
    if not findings.reached:
        return ()
    return tuple(target.name for target in setting.targets if target.name not in findings.reached)


@dataclass(frozen=True)
class _Measured:
    """The metric of what masks lead to, kept weights reconstructed if they are to be; lower is better."""

    setting: Setting
    findings: Findings
    held_out: Batches | None
    metric: Metric | None

    @property
    def sign(self) -> int:
        """Of a metric of one's own, of which more is better, the negative is measured."""
        return 1 if self.metric is None else -1

    def __call__(self, masks: Masks) -> float:
        setting = self.setting
        verdict = conclude(setting, masks, self.findings) if masks else Verdict(masks)
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


def _check_agreement(setting: Setting, masks: Masks) -> None:
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
