"""prune_pretrained: load, probe, decide, measure, apply, save. The one file that knows every stage."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from gradprobe_hf.application import masks_applied
from gradprobe_hf.calibration import Batches, load_batches, shared_rows
from gradprobe_hf.config import GradProbeConfig, Scope
from gradprobe_hf.decision import (
    candidate_score,
    evidence_needed,
    keys_of,
    no_evidence,
    path_score,
    threshold_mask,
)
from gradprobe_hf.evaluation import measure
from gradprobe_hf.hub import check_destination, check_push, check_room, push_folder
from gradprobe_hf.loading import load_model, load_processing_class
from gradprobe_hf.loss import LossFunction, is_causal, objective
from gradprobe_hf.probe import Statistics, observe_inputs, run_probe, serving
from gradprobe_hf.report import MatrixRow, Report, Stopwatch, peak_memory, versions
from gradprobe_hf.result import PruneResult
from gradprobe_hf.selection import Keys, key_range, select_masks
from gradprobe_hf.targets import Target, check_editable, check_group, find_targets

logger = logging.getLogger(__name__)

BUILT_IN = "pydoc"


def prune_pretrained(
    model_or_id: PreTrainedModel | str | Path,
    config: GradProbeConfig | None = None,
    *,
    calibration: Any = None,
    processing_class: Any = None,
    evaluation: Any = None,
    loss_fn: LossFunction | None = None,
    apply: bool = True,
    output_dir: str | Path | None = None,
    overwrite: bool = False,
    push_to_hub: bool = False,
    hub_model_id: str | None = None,
    hub_private_repo: bool | None = None,
    progress: bool = True,
    **from_pretrained_kwargs: Any,
) -> PruneResult:
    """Prune a pretrained model by asking its gradients.

    The model in memory changes only at the very end: whenever this raises or is interrupted, at whatever stage, every
    weight has the bits it had before.

    Args:
        model_or_id: a Hub id, a folder, or a loaded `PreTrainedModel`.
        config: how to prune; the defaults take 50% of the weights of the blocks.
        calibration: text or batches for the probes. `"pydoc"` (default: the Python manual, always there), `"self"`
            (the model's own text), a `.txt`, `.jsonl` or `.parquet` file or a folder of them, a Hub dataset
            `id[:config[:split]]`, a list of texts, a `datasets.Dataset` (text or `input_ids`), a `DataLoader`, or any
            re-iterable of batches that `model(**batch)` accepts.
        processing_class: the tokenizer; loaded from the model's name by default.
        evaluation: the same choices, to measure the loss before and after. Default: the held-out part of `"pydoc"`
            when calibration is `"pydoc"`, else nothing. False: nothing.
        loss_fn: `loss_fn(model, batch)` returns the loss *summed* over tokens, in place of the model's own.
        apply: False leaves the weights as they are; masks and report are made all the same.
        output_dir: where to save the checkpoint. An existing folder is refused unless `overwrite` is set.
        push_to_hub: upload it to `hub_model_id` (default: the name of `output_dir`), `hub_private_repo` or not.
        progress: show progress bars.
        from_pretrained_kwargs: for loading by name: `dtype`, `revision`, `gguf_file`, `trust_remote_code`, ...

    Raises:
        ValueError: an option, a pattern, the data or the loss is wrong; the message names the value and the remedy.
        FileExistsError: `output_dir` exists.
        OSError: no such model, no network or login, or a full disk.
    """
    config = config or GradProbeConfig()
    repo_id = _repository(push_to_hub, hub_model_id, output_dir)
    if output_dir is not None:
        check_destination(output_dir, _name_of(model_or_id), overwrite)
    if repo_id is not None:
        repo_id = check_push(repo_id, hub_private_repo)
    stopwatch = Stopwatch()
    with stopwatch("load"):
        model = load_model(model_or_id, **from_pretrained_kwargs)
        processing_class = processing_class or load_processing_class(model, **from_pretrained_kwargs)
        if output_dir is not None:
            check_room(output_dir, model)
        targets = find_targets(model, config.include, config.exclude)
        check_editable(model, targets)
        if config.group is not None:
            check_group(targets, *config.group)
    run = _Run(model, targets, config, loss_fn, progress, stopwatch)
    with stopwatch("read data"):
        data = partial(
            load_batches,
            model=model,
            processing_class=processing_class,
            sequence_length=config.sequence_length,
            batch_size=config.batch_size,
            seed=config.seed,
            progress=progress,
        )
        needs_data = evidence_needed(config).passes != "none"
        calibration = BUILT_IN if calibration is None else calibration
        evaluation = _default_evaluation(evaluation, calibration, model)
        batches = data(calibration, part="calibration", samples=config.num_samples) if needs_data else None
        held_out = data(evaluation, part="evaluation", samples=config.evaluation_samples) if evaluation else None
    if batches and held_out and (shared := shared_rows(batches, held_out)):
        run.warnings.append(
            f"{shared} of the {held_out.samples} evaluation windows were also calibrated on; evaluate on another text."
        )
    masks = run.decide(batches)
    measured = run.evaluate(masks, held_out) if held_out else None
    report = run.report(masks, batches, held_out, measured)
    result = PruneResult(model, masks, report, config, processing_class, targets)
    # Whatever fails in here, even an upload, gives the weights back; a checkpoint that was written stays.
    with masks_applied(model, targets, masks, keep=apply):
        if output_dir is not None:
            with stopwatch("save"):
                result.save_pretrained(output_dir, overwrite=overwrite, repo_id=repo_id)
        if repo_id is not None:
            with stopwatch("upload"):
                push_folder(output_dir, repo_id) if output_dir else result.push_to_hub(repo_id)
    return replace(result, report=replace(report, timings=dict(stopwatch.seconds)))


@dataclass
class _Run:
    """One pruning run: the stages between the loaded model and the report, and what they found on the way."""

    model: PreTrainedModel
    targets: tuple[Target, ...]
    config: GradProbeConfig
    loss_fn: LossFunction | None
    progress: bool
    stopwatch: Stopwatch
    probes: dict[str, float] = field(default_factory=dict)
    score_ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    without_evidence: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    accumulator_bytes: int = 0

    def decide(self, batches: Batches | None) -> dict[str, Tensor]:
        """Masks of what is pruned."""
        statistics = self._first_evidence(batches)
        if statistics is not None:
            self._warn_unreached(statistics)
        score = partial(candidate_score, statistics=statistics, config=self.config)
        with self.stopwatch("candidates"):
            candidates = self._select(keys_of(self.model, score), self.config.candidate_scope)
        if self.config.decision == "none":
            return candidates
        assert statistics is not None, "every other decision probes"
        assert batches is not None, "and probes something"
        if self.config.decision == "path":
            return self._decide_path(statistics, candidates, batches)
        return self._decide_threshold(statistics, candidates, batches)

    def _first_evidence(self, batches: Batches | None) -> Statistics | None:
        needed = evidence_needed(self.config)
        if needed.passes == "none":
            return None
        assert batches is not None, "the data was loaded for this"
        statistics = Statistics(self.targets, needed.terms, self.model)
        self.accumulator_bytes = statistics.nbytes
        if needed.passes == "forward":
            with self.stopwatch("inputs"):
                observe_inputs(self.model, self.targets, batches, statistics, self.progress)
        else:
            self._probe("probe 0", "probe 0 (original weights)", batches, statistics)
        return statistics

    def _decide_path(
        self, statistics: Statistics, candidates: dict[str, Tensor], batches: Batches
    ) -> dict[str, Tensor]:
        statistics.probe = 1
        self._probe("probe 1", "probe 1 (candidates shrunk)", batches, statistics, candidates)
        with self.stopwatch("selection"):
            score = partial(path_score, statistics=statistics, fisher=self.config.fisher)
            return self._select(keys_of(self.model, score), self.config.decision_scope)

    def _decide_threshold(
        self, statistics: Statistics, candidates: dict[str, Tensor], batches: Batches
    ) -> dict[str, Tensor]:
        after = Statistics(self.targets, frozenset({"peak"}), self.model)
        self.accumulator_bytes += after.nbytes
        self._probe("probe 1", "probe 1 (candidates shrunk)", batches, after, candidates)
        masks = {}
        with self.stopwatch("selection"):
            for target in self.targets:
                peak_0, peak_1 = statistics[target.name].peak, after[target.name].peak
                assert peak_0 is not None, "probe 0 kept peaks"
                assert peak_1 is not None, "probe 1 kept peaks"
                chosen, weight = candidates[target.name], target.matrix(self.model)
                masks[target.name] = threshold_mask(chosen, peak_0, peak_1, self.config.gradient_threshold, weight)
                blind = chosen & no_evidence(peak_0, peak_1) & (weight != 0)
                self.without_evidence[target.name] = int(blind.sum())
        return masks

    def _probe(
        self,
        stage: str,
        label: str,
        batches: Batches,
        statistics: Statistics,
        shrunk: Mapping[str, Tensor] | None = None,
    ) -> None:
        with self.stopwatch(stage):
            loss = run_probe(
                self.model,
                self.targets,
                batches,
                statistics,
                shrunk=shrunk,
                factor=self.config.reduction_factor,
                loss_fn=self.loss_fn,
                label=label,
                progress=self.progress,
            )
        self.probes[stage] = loss.mean

    def _select(self, keys: Keys, scope: Scope) -> dict[str, Tensor]:
        assert self.config.sparsity is not None, "resolved by the configuration"
        self.score_ranges = {}

        def recorded(target: Target) -> Tensor:
            found = keys(target)
            if target.name not in self.score_ranges:
                self.score_ranges[target.name] = key_range(found)
            return found

        return select_masks(self.targets, recorded, self.config.sparsity, scope, self.config.group)

    def evaluate(self, masks: Mapping[str, Tensor], held_out: Batches) -> dict[str, Any]:
        """The loss before and after; the pruned model is measured through what it is served, its weights untouched."""
        measured = {}
        for name in ("dense", "pruned"):
            view = serving(self.model, self.targets, masks) if name == "pruned" else nullcontext()
            with self.stopwatch(f"evaluate {name}"), view:
                found = measure(self.model, held_out, self.loss_fn, f"evaluation ({name})", self.progress)
            measured[name] = found.to_dict()
        return measured

    def report(
        self,
        masks: Mapping[str, Tensor],
        batches: Batches | None,
        held_out: Batches | None,
        measured: dict[str, Any] | None,
    ) -> Report:
        rows = [self._row(target, masks[target.name]) for target in self.targets]
        self._warn_missed_budget(rows)
        for warning in self.warnings:
            logger.warning(warning)
        return Report(
            model={
                "name": self.model.name_or_path,
                "class": type(self.model).__name__,
                "objective": objective(self.model),
                "parameters": self.model.num_parameters(),
                "target_weights": sum(target.numel for target in self.targets),
                "dtype": str(self.model.dtype).removeprefix("torch."),
            },
            config=self.config.to_dict(),
            matrices=rows,
            calibration=batches.describe() if batches else None,
            evaluation={**held_out.describe(), **measured} if held_out and measured else None,
            probes=self.probes,
            timings=dict(self.stopwatch.seconds),
            memory={**peak_memory(), "accumulator_bytes": self.accumulator_bytes},
            versions=versions(),
            warnings=self.warnings,
        )

    def _row(self, target: Target, mask: Tensor) -> MatrixRow:
        weight = target.matrix(self.model)
        zero = weight == 0
        lowest, highest = self.score_ranges.get(target.name, (None, None))
        return MatrixRow(
            name=target.name,
            block=target.block,
            role=target.role,
            shape=target.shape,
            weights=target.numel,
            budget=round((self.config.sparsity or 0.0) * target.numel),
            pruned=int(mask.sum()),
            zeros_before=int(zero.sum()),
            zeros_after=int((mask | zero).sum()),
            score_min=lowest,
            score_max=highest,
            no_evidence=self.without_evidence.get(target.name, 0),
        )

    def _warn_unreached(self, statistics: Statistics) -> None:
        if names := statistics.unreached:
            sample = ", ".join(f"`{name}`" for name in names[:3]) + (", ..." if len(names) > 3 else "")
            self.warnings.append(
                f"The calibration loss does not depend on {len(names)} of {len(self.targets)} matrices ({sample}): "
                "with no evidence about them they are pruned last. Exclude them, or calibrate on what reaches them."
            )

    def _warn_missed_budget(self, rows: list[MatrixRow]) -> None:
        asked = self.config.sparsity or 0.0
        zeros, weights = sum(row.zeros_after for row in rows), sum(row.weights for row in rows)
        if zeros > sum(row.pruned for row in rows):
            self.warnings.append(
                f"Some units of the budget held more zeros than it asked for: sparsity is {zeros / weights:.4%}, not "
                f"{asked:.4%}."
            )
        elif self.config.decision == "threshold":
            blind = sum(self.without_evidence.values())
            self.warnings.append(
                f"The threshold decision reached {zeros / weights:.2%} of at most {asked:.2%}; it gave back {blind:,} "
                "candidates for want of evidence."
            )


def _repository(push_to_hub: bool, hub_model_id: str | None, output_dir: str | Path | None) -> str | None:
    if not push_to_hub:
        return None
    if hub_model_id is None and output_dir is None:
        raise ValueError("push_to_hub=True needs hub_model_id='user/name' (or an output_dir to name it after).")
    return hub_model_id or Path(str(output_dir)).absolute().name


def _name_of(model_or_id: PreTrainedModel | str | Path) -> str:
    return model_or_id.name_or_path if isinstance(model_or_id, PreTrainedModel) else str(model_or_id)


def _default_evaluation(evaluation: Any, calibration: Any, model: PreTrainedModel) -> Any:
    built_in = isinstance(calibration, str) and calibration == BUILT_IN
    if evaluation is None:
        return BUILT_IN if built_in and is_causal(model) else None
    return None if evaluation is False else evaluation
