"""Study: everything that a run has, ready to decide as often as wanted; no verdict is carried out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from gradprobe_hf.config import GradProbeConfig
from gradprobe_hf.data.batches import Batches
from gradprobe_hf.model.loss import LossFunction
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.run.inputs import Loading, Material, prepare
from gradprobe_hf.run.memory_plan import accumulator_files, memory_errors, plan_execution
from gradprobe_hf.runtime.processes import Processes, join_processes
from gradprobe_hf.runtime.stopwatch import Stopwatch


@contextmanager
def study(
    model_or_id: PreTrainedModel | str | Path,
    config: GradProbeConfig,
    *,
    calibration: Any = None,
    processing_class: Any = None,
    evaluation: Any = None,
    loss_fn: LossFunction | None = None,
    loading: Loading | None = None,
    is_shared: bool = False,
    progress: bool = True,
) -> Iterator[tuple[RunContext, Batches]]:
    """The setting of trials, and the text to measure them on. Arguments are those of `prune_pretrained`.

    Args:
        is_shared: as `plan_execution`.

    Raises:
        ValueError: nothing to calibrate or to measure on; and what `prune_pretrained` raises.
        MemoryError: out of memory in the body.
    """
    processes, stopwatch, loading = join_processes(), Stopwatch(), loading or Loading()
    material = prepare(
        model_or_id,
        config,
        calibration=calibration,
        processing_class=processing_class,
        evaluation=evaluation,
        loading=loading,
        always_calibrate=True,
        stopwatch=stopwatch,
        progress=progress and processes.is_main,
    )
    if material.held_out is None:
        raise ValueError("this needs an evaluation: give a text to measure on (--evaluation).")
    with ready(
        material,
        config,
        loss_fn=loss_fn,
        folder=loading.offload_folder,
        is_shared=is_shared,
        processes=processes,
        stopwatch=stopwatch,
        progress=progress and processes.is_main,
    ) as (setting, _):
        yield setting, material.held_out


@contextmanager
def ready(
    material: Material,
    config: GradProbeConfig,
    *,
    plan_for: GradProbeConfig | None = None,
    loss_fn: LossFunction | None = None,
    folder: str | Path | None = None,
    rows: int | None = None,
    is_shared: bool = False,
    processes: Processes,
    stopwatch: Stopwatch,
    progress: bool,
) -> Iterator[tuple[RunContext, dict[str, str]]]:
    """The setting of what is prepared, in portions that fit into memory; and what was chosen and why, for the report.

    Args:
        plan_for: what the portions have to fit, where other configurations share the setting; default: `config`.
        folder: for accumulators on disk, and new weights of a model that is offloaded.
        rows, is_shared: as `plan_execution`.

    Raises:
        ValueError: as `plan_execution`.
        MemoryError: out of memory, in the body too.
    """
    model, targets = material.model, material.targets
    plan = plan_execution(
        model,
        targets,
        plan_for or config,
        material.batches,
        loss_fn=loss_fn,
        folder=folder,
        rows=rows,
        is_shared=is_shared,
        processes=processes,
        stopwatch=stopwatch,
    )
    kept = accumulator_files(model, targets, config, folder)
    with memory_errors(stopwatch, plan.remedies), kept as keeping:
        setting = RunContext(
            model,
            targets,
            config,
            plan.batches,
            loss_fn=loss_fn,
            checkpointing=plan.checkpointing,
            keeping=keeping,
            processes=processes,
            folder=folder,
            stopwatch=stopwatch,
            progress=progress,
        )
        yield setting, plan.notes
