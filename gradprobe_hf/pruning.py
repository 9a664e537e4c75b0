"""prune_pretrained: load, probe, decide, measure, apply, save. The one file that knows every stage."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from gradprobe_hf.checkpoint.result import PruneResult
from gradprobe_hf.checkpoint.write import check_destination, check_push, check_room, push_folder, write_checkpoint
from gradprobe_hf.comparison import Comparison, baselines, feasible, most_demanding, terms_of
from gradprobe_hf.config import GradProbeConfig
from gradprobe_hf.data.batches import Batches
from gradprobe_hf.decisions.decision import evidence_needed
from gradprobe_hf.evaluation.perplexity import Measurement, measure
from gradprobe_hf.model.fsdp import is_sharded
from gradprobe_hf.model.loading import DeviceMap
from gradprobe_hf.model.loss import LossFunction
from gradprobe_hf.model.offload_store import check_store_room
from gradprobe_hf.model.targets import Target
from gradprobe_hf.probe.attachment import serving
from gradprobe_hf.report.build import build_report
from gradprobe_hf.report.report import ComparedRow
from gradprobe_hf.run.apply import applied
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.run.decide import Metric, PruningDecision, reach_verdict
from gradprobe_hf.run.inputs import Loading, prepare
from gradprobe_hf.run.snapshots import Snapshots, check_save_every, kept_rows, run_identity
from gradprobe_hf.run.study import ready
from gradprobe_hf.runtime.processes import Processes, join_processes
from gradprobe_hf.runtime.stopwatch import Stopwatch

logger = logging.getLogger(__name__)

# Stages that are no part of pruning itself.
_AROUND = ("load", "read data", "evaluate dense", "evaluate pruned")


def prune_pretrained(
    model_or_id: PreTrainedModel | str | Path,
    config: GradProbeConfig | None = None,
    *,
    calibration: Any = None,
    processing_class: Any = None,
    evaluation: Any = None,
    loss_fn: LossFunction | None = None,
    metric_fn: Metric | None = None,
    compare_baselines: bool = False,
    apply: bool = True,
    output_dir: str | Path | None = None,
    overwrite: bool = False,
    push_to_hub: bool = False,
    hub_model_id: str | None = None,
    hub_private_repo: bool | None = None,
    device_map: DeviceMap = None,
    max_memory: dict[int | str, int | str] | None = None,
    offload_folder: str | Path | None = None,
    resume_dir: str | Path | None = None,
    save_every: int = 16,
    progress: bool = True,
    **from_pretrained_kwargs: Any,
) -> PruneResult:
    """Prune a pretrained model by asking its gradients.

    The model changes only at the very end: whenever this raises or is interrupted, at whatever stage, every weight has
    the bits it had before, in memory and on disk.

    Under `accelerate launch` or torchrun every process calls this with the same arguments and a whole, unwrapped model
    (or one that FSDP2 shards): they share the batches, reach the same masks, and the main one writes.

    Args:
        model_or_id: a Hub id, a folder, or a loaded `PreTrainedModel`, offloaded by Accelerate or not.
        config: how to prune; the defaults take 50% of the weights of the blocks.
        calibration: text or batches for the probes. `"pydoc"` (default: the Python manual, always there), `"self"`
            (the model's own text), a `.txt`, `.jsonl` or `.parquet` file or a folder of them, a Hub dataset
            `id[:config[:split]]`, a list of texts, a `datasets.Dataset` (text or `input_ids`), a `DataLoader`, or any
            re-iterable of batches that `model(**batch)` accepts.
        processing_class: the tokenizer; loaded from the model's name by default.
        evaluation: the same choices, to measure the loss before and after. Default: of a causal language model that is
            calibrated on `"pydoc"`, the held-out part of that; else nothing. False: nothing.
        loss_fn: `loss_fn(model, batch)` returns the loss *summed* over tokens, in place of the model's own.
        metric_fn: `metric_fn(model)` returns a number of which more is better, an accuracy say: what `max_metric_drop`
            is about, in place of the perplexity.
        compare_baselines: prune by magnitude, Wanda, SparseGPT and by the probes without further options too, to the
            sparsity that was reached, and measure them: `report.comparison`, and a table and a picture in the card.
        apply: False leaves the weights as they are; masks and report are made all the same.
        output_dir: where to save the checkpoint. An existing folder is refused unless `overwrite` is set.
        push_to_hub: upload it to `hub_model_id` (default: the name of `output_dir`), `hub_private_repo` or not.
        device_map: where the weights go, as for `from_pretrained`: `"auto"`, a device, a dict of modules, or `"disk"`
            for all of them; then they are read when they are needed, and the checkpoint itself is never written to.
        max_memory: bytes for each device that `device_map="auto"` may use.
        offload_folder: for weights on disk that have to be written, and accumulators on disk (default: a temporary
            folder).
        resume_dir: a folder to save the state of the probes in, every `save_every` batches. Called again with the same
            arguments, a run that was killed goes on from there, to the same masks.
        progress: show progress bars.
        from_pretrained_kwargs: for loading by name: `dtype`, `revision`, `gguf_file`, `trust_remote_code`, ...

    Raises:
        ValueError: an option, a pattern, the data or the loss is wrong; the message names the value and the remedy.
        FileExistsError: `output_dir` exists.
        MemoryError: out of memory; the message names the stage and what would help.
        OSError: no such model, no network or login, or a full disk.
        ConnectionError: another process ended.
    """
    config = config or GradProbeConfig()
    check_save_every(save_every)
    if metric_fn is not None and config.max_metric_drop is None:
        raise ValueError("metric_fn is what max_metric_drop is about: set that too, or leave metric_fn out.")
    processes = join_processes()
    progress = progress and processes.is_main
    repo_id = _repository(push_to_hub, hub_model_id, output_dir)
    if output_dir is not None:
        processes.on_main(partial(check_destination, output_dir, _name_of(model_or_id), overwrite))
    stopwatch = Stopwatch()
    material = prepare(
        model_or_id,
        config,
        calibration=calibration,
        processing_class=processing_class,
        evaluation=evaluation,
        loading=Loading(device_map, max_memory, offload_folder, from_pretrained_kwargs),
        always_calibrate=compare_baselines,
        stopwatch=stopwatch,
        progress=progress,
    )
    model, targets, held_out = material.model, material.targets, material.held_out
    if output_dir is not None:
        processes.on_main(partial(check_room, output_dir, model))
    if apply:
        check_store_room(model, {target.parameter for target in targets}, output_dir)
    if config.max_metric_drop is not None and held_out is None and metric_fn is None:
        raise ValueError(
            "max_metric_drop needs something to measure: give an evaluation (--evaluation), or a metric_fn."
        )
    if compare_baselines and held_out is None:
        raise ValueError("compare_baselines needs something to measure: give an evaluation (--evaluation).")
    if repo_id is not None:  # last of the checks: it creates the repository
        repo_id = processes.agree(check_push(repo_id, hub_private_repo) if processes.is_main else None)
    run = _Run(model, targets, config, loss_fn, processes, stopwatch, progress)
    with ready(
        material,
        config,
        plan_for=most_demanding([config, *(baselines(config).values() if compare_baselines else ())]),
        loss_fn=loss_fn,
        folder=offload_folder,
        rows=kept_rows(resume_dir, processes) if resume_dir is not None and config.batch_size == "auto" else None,
        is_shared=compare_baselines,
        processes=processes,
        stopwatch=stopwatch,
        progress=progress,
    ) as (setting, notes):
        batches = setting.batches
        journal = run.journal(resume_dir, save_every, batches, held_out)
        setting = replace(setting, journal=journal)
        rivals = _Rivals(setting, held_out) if compare_baselines and held_out else None
        verdict = reach_verdict(rivals.begin() if rivals else setting, held_out, metric_fn)
        measured = run.evaluate(verdict, held_out) if held_out else {}
        rows = rivals.rows(verdict, measured["pruned"]) if rivals else []
        del setting, rivals
    report = build_report(
        model,
        targets,
        config,
        verdict,
        batches,
        held_out,
        measured,
        dict(stopwatch.seconds),
        material.processing_class,
        notes,
        processes,
        rows,
    )
    for warning in report.warnings:
        logger.warning(warning)
    result = PruneResult(
        model, verdict.masks, report, config, material.processing_class, targets, processes, verdict.updates
    )
    # Whatever fails in here, even an upload, gives the weights back; a checkpoint that was written stays.
    with applied(model, targets, verdict.masks, keep=apply, updates=verdict.updates):
        if output_dir is not None and (processes.is_main or is_sharded(model)):
            with stopwatch("save"):
                write_checkpoint(
                    output_dir,
                    model,
                    material.processing_class,
                    config,
                    report,
                    overwrite=overwrite,
                    where=repo_id,
                    writes=processes.is_main,
                )
        if repo_id is not None and (processes.is_main or is_sharded(model)):
            with stopwatch("upload"):
                if output_dir is None:
                    result.push_to_hub(repo_id)
                elif processes.is_main:
                    push_folder(output_dir, repo_id)
        processes.wait()  # none keeps its zeros if the main one could not save them
    if journal is not None:
        journal.finish()
    return replace(result, report=replace(report, timings=dict(stopwatch.seconds)))


class _Rivals:
    """The published methods beside a run: they begin with its first probe, and end at its sparsity."""

    def __init__(self, setting: RunContext, held_out: Batches) -> None:
        self._own = setting
        # A journal is of the run's own probes: they are not shared then.
        all_of_them = {**baselines(setting.config), "this model": setting.config}
        terms = terms_of(all_of_them) if setting.journal is None else frozenset()
        self._comparison = Comparison(setting, held_out, terms)

    def begin(self) -> RunContext:
        """The setting of the run itself, with the first probe that all of them begin with: it is made here."""
        if self._own.journal is not None:
            return self._own
        return self._comparison.setting(self._own.config, self._own.stopwatch)

    def rows(self, verdict: PruningDecision, found: Measurement) -> list[ComparedRow]:
        """The run's own row is the last."""
        own = self._own
        taken = sum(seconds for stage, seconds in own.stopwatch.seconds.items() if stage not in _AROUND)
        mine = self._comparison.describe("this model", own.config, verdict, taken, found)
        with own.stopwatch("baselines"):
            configs = feasible(own, baselines(own.config, mine.sparsity))
            made = [self._comparison.row_if_possible(name, config) for name, config in configs.items()]
        return [*(row for row in made if row is not None), mine]


@dataclass(frozen=True)
class _Run:
    """What the stages of one call share."""

    model: PreTrainedModel
    targets: tuple[Target, ...]
    config: GradProbeConfig
    loss_fn: LossFunction | None
    processes: Processes
    stopwatch: Stopwatch
    progress: bool

    def journal(
        self, resume_dir: str | Path | None, save_every: int, batches: Batches | None, held_out: Batches | None
    ) -> Snapshots | None:
        if resume_dir is None:
            return None
        if batches is None or evidence_needed(self.config).passes != "probe":
            logger.warning("resume_dir is not used: nothing is probed here, and only probes are resumed.")
            return None
        identity = run_identity(self.model, self.targets, self.config.to_dict(), batches, self.processes)
        if self.config.max_metric_drop is not None and held_out is not None:
            identity["evaluation"] = f"{held_out.source} ({held_out.fingerprint})"
        journal = Snapshots(Path(resume_dir), identity, save_every, self.processes, in_step=is_sharded(self.model))
        journal.check()
        return journal

    def evaluate(self, verdict: PruningDecision, held_out: Batches) -> dict[str, Measurement]:
        """The loss before and after; the pruned model is measured through what it is served, its weights untouched."""
        views: dict[str, AbstractContextManager[None]] = {
            "dense": nullcontext(),
            "pruned": serving(self.model, self.targets, verdict.masks, replaced=verdict.updates),
        }
        measured = {}
        for name, view in views.items():
            with self.stopwatch(f"evaluate {name}"), view:
                measured[name] = measure(
                    self.model, held_out, self.loss_fn, f"evaluation ({name})", self.progress, self.processes
                )
        return measured


def _repository(push_to_hub: bool, hub_model_id: str | None, output_dir: str | Path | None) -> str | None:
    if not push_to_hub:
        return None
    if hub_model_id is None and output_dir is None:
        raise ValueError("push_to_hub=True needs hub_model_id='user/name' (or an output_dir to name it after).")
    return hub_model_id or Path(str(output_dir)).absolute().name


def _name_of(model_or_id: PreTrainedModel | str | Path) -> str:
    return model_or_id.name_or_path if isinstance(model_or_id, PreTrainedModel) else str(model_or_id)
