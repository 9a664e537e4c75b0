"""Preparation: what every run begins with: the model, its targets, and the texts. Everything wrong is said here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from gradprobe_hf.config import GradProbeConfig
from gradprobe_hf.data.batches import Batches
from gradprobe_hf.data.windows import load_batches
from gradprobe_hf.decisions.decision import evidence_needed
from gradprobe_hf.model.fsdp import check_sharding
from gradprobe_hf.model.loading import DeviceMap, load_model, load_processing_class
from gradprobe_hf.model.loss import is_causal
from gradprobe_hf.model.parameters import settle
from gradprobe_hf.model.targets import Target, find_targets
from gradprobe_hf.run.compatibility import check_targets
from gradprobe_hf.runtime.processes import join_processes
from gradprobe_hf.runtime.stopwatch import Stopwatch

BUILT_IN = "pydoc"


@dataclass(frozen=True)
class Loading:
    """How a model is loaded by name, where that is one argument.

    Attributes:
        device_map, max_memory, offload_folder: as in `prune_pretrained`.
        others: for `from_pretrained`: `dtype`, `revision`, `gguf_file`, `trust_remote_code`, ...
    """

    device_map: DeviceMap = None
    max_memory: dict[int | str, int | str] | None = None
    offload_folder: str | Path | None = None
    others: dict[str, Any] | None = None


@dataclass(frozen=True)
class Material:
    """Attributes: `batches` to calibrate on, None where nothing is read; `held_out` to measure on, or None."""

    model: PreTrainedModel
    processing_class: Any
    targets: tuple[Target, ...]
    batches: Batches | None
    held_out: Batches | None


def prepare(
    model_or_id: PreTrainedModel | str | Path,
    config: GradProbeConfig,
    *,
    calibration: Any = None,
    processing_class: Any = None,
    evaluation: Any = None,
    loading: Loading | None = None,
    always_calibrate: bool = False,
    stopwatch: Stopwatch | None = None,
    progress: bool = True,
) -> Material:
    """Load, find and read; the arguments are those of `prune_pretrained`.

    Args:
        always_calibrate: read the calibration text even if `config` has no use for it.

    Raises:
        ValueError: matrices that cannot be pruned as configured, or data of which nothing can be made.
        OSError: no such model or text.
    """
    loading, stopwatch = loading or Loading(), stopwatch or Stopwatch()
    with stopwatch("load"):
        model, processing_class = _loaded(model_or_id, processing_class, loading)
        check_sharding(model)
        targets = find_targets(model, config.include, config.exclude)
        check_targets(model, targets, config)
    with stopwatch("read data"):
        data = partial(
            load_batches,
            model=model,
            processing_class=processing_class,
            sequence_length=config.sequence_length,
            batch_size=4 if config.batch_size == "auto" else config.batch_size,
            seed=config.seed,
            progress=progress,
        )
        calibration = BUILT_IN if calibration is None else calibration
        evaluation = _default_evaluation(evaluation, calibration, model)
        batches = held_out = None
        if always_calibrate or evidence_needed(config).passes != "none":
            batches = data(calibration, part="calibration", samples=config.num_samples)
        if evaluation is not None:
            held_out = data(evaluation, part="evaluation", samples=config.evaluation_samples)
    return Material(model, processing_class, targets, batches, held_out)


def _loaded(
    model_or_id: PreTrainedModel | str | Path, processing_class: Any, loading: Loading
) -> tuple[PreTrainedModel, Any]:
    placement: dict[str, Any] = {"device_map": loading.device_map, "max_memory": loading.max_memory}
    if not isinstance(model_or_id, PreTrainedModel):  # of a loaded model the folder is for accumulators alone
        placement["offload_folder"] = _own_folder(loading.offload_folder)
    wanted = {name: value for name, value in placement.items() if value is not None}
    others = loading.others or {}
    model = load_model(model_or_id, **wanted, **others)
    settle(model)
    return model, processing_class or load_processing_class(model, **others)


def _own_folder(folder: str | Path | None) -> str | Path | None:
    """Of several processes each has a folder of its own: transformers writes there what it has to convert."""
    processes = join_processes()
    return folder if folder is None or processes.count == 1 else Path(folder) / f"process-{processes.rank}"


def _default_evaluation(evaluation: Any, calibration: Any, model: PreTrainedModel) -> Any:
    built_in = isinstance(calibration, str) and calibration == BUILT_IN
    if evaluation is None:
        return BUILT_IN if built_in and is_causal(model) else None
    return None if evaluation is False else evaluation
