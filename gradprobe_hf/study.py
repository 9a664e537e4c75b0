"""Study: everything that a run has, ready to decide as often as wanted; no verdict is carried out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from gradprobe_hf.calibration import Batches
from gradprobe_hf.config import GradProbeConfig
from gradprobe_hf.execution import accumulator_files, memory_errors, plan_execution
from gradprobe_hf.loss import LossFunction
from gradprobe_hf.preparation import Loading, prepare
from gradprobe_hf.processes import join_processes
from gradprobe_hf.setting import Setting
from gradprobe_hf.stopwatch import Stopwatch


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
    progress: bool = True,
) -> Iterator[tuple[Setting, Batches]]:
    """The setting of trials, and the text to measure them on. Arguments are those of `prune_pretrained`.

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
    plan = plan_execution(
        material.model,
        material.targets,
        config,
        material.batches,
        loss_fn=loss_fn,
        folder=loading.offload_folder,
        processes=processes,
        stopwatch=stopwatch,
    )
    kept = accumulator_files(material.model, material.targets, config, loading.offload_folder)
    with memory_errors(stopwatch, plan.remedies), kept as keeping:
        setting = Setting(
            material.model,
            material.targets,
            config,
            plan.batches,
            loss_fn=loss_fn,
            checkpointing=plan.checkpointing,
            keeping=keeping,
            processes=processes,
            folder=loading.offload_folder,
            stopwatch=stopwatch,
            progress=progress and processes.is_main,
        )
        yield setting, material.held_out
