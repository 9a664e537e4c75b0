"""The run context: everything that the stages of one run share, made once and handed on whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.data.batches import Batches
from gradprobe_hf.evaluation.task_metric import TaskMetric
from gradprobe_hf.model.passes.loss import LossFunction
from gradprobe_hf.model.targets import Target
from gradprobe_hf.probe.accumulation.storage import AccumulatorStorage
from gradprobe_hf.probe.engine import Workload
from gradprobe_hf.probe.statistics import Statistics
from gradprobe_hf.run.findings import Findings
from gradprobe_hf.run.snapshots import Snapshots
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.runtime.stopwatch import Stopwatch
from gradprobe_hf.tasks.table import Task


@dataclass(frozen=True)
class RunRequest:
    """What a public function is asked to do; the fields are the arguments of `prune_pretrained`.

    Attributes:
        resume_dir: where the run's state is kept, the model's own text among it.
        always_calibrate: read the calibration text even if `config` has no use for it: other configurations have.
        progress: show progress bars, in the main process.
    """

    model_or_id: PreTrainedModel | str | Path
    config: GradProbeConfig
    calibration: Any = None
    processing_class: Any = None
    evaluation: Any = None
    loss_fn: LossFunction | None = None
    from_pretrained_kwargs: dict[str, Any] = field(default_factory=dict)
    resume_dir: str | Path | None = None
    always_calibrate: bool = False
    progress: bool = True


@dataclass(frozen=True)
class SharedProbe:
    """The first probe of the model as it is, made once for several configurations.

    Attributes:
        statistics: with the terms that any of them needs; read, and added to in a copy.
        loss: mean calibration loss, in nats.
        seconds: that it took.
    """

    statistics: Statistics
    loss: float
    seconds: float


@dataclass
class BlockOrder:
    """The order in which blocks go, as far as it was looked for; runs that differ in how many go share it.

    Attributes:
        gone: their names, each with the calibration loss (nats) without it and those before it.
        alone: block -> the loss without it alone, of all that may go.
        next_tried: the others, the one without which the loss was lowest when it was last tried first.
    """

    gone: list[dict[str, Any]] = field(default_factory=list)
    alone: dict[str, float] = field(default_factory=dict)
    next_tried: list[str] = field(default_factory=list)

    def load(self, values: Mapping[str, Any]) -> None:
        """Become the order that `asdict` made these of."""
        for name, value in values.items():
            setattr(self, name, value)


@dataclass(frozen=True)
class RunContext:
    """What the stages of one run share.

    Attributes:
        calibration: batches to calibrate on; empty where the method reads none.
        evaluation: batches to measure on; empty where nothing is measured.
        unreached: matrices that were asked for and are no targets, because the calibration does not reach them.
        selection: batches that a sparsity or a threshold is chosen by, none of them in `evaluation`; empty where
            nothing is chosen so.
        task: what the model is for, if that is known.
        metric: measured on the evaluation beside the loss; None: nothing is.
        checkpointing: whether blocks are recomputed in backward.
        storage: where accumulators are kept.
        folder: for files: accumulators on disk, new weights of an offloaded model; None: a temporary one.
        notes: how the run is computed and why so, for the report; no result depends on it.
        origin: what the model was before it was loaded: the `adapter` folded into it, the type it is `stored_as`, how
            much of each `structure` had gone.
        of_loading: what is known since the model was loaded, and a report says first.
        snapshots: where the run's state is saved, if it is.
        findings: what the search for structures has measured so far.
        shared_probe: a first probe made before, for this configuration too.
        block_order: the order in which blocks go, of several runs together; None: this one looks for it.
        unwritten: writes the calibration text, where that is the model's own and not written yet.
        keeps_row_fisher: whether the Fisher information of rows is kept for another configuration's weight update.
    """

    model: PreTrainedModel
    processing_class: Any
    targets: tuple[Target, ...]
    config: GradProbeConfig
    calibration: Batches
    evaluation: Batches
    unreached: tuple[Target, ...] = ()
    selection: Batches = field(default_factory=Batches.none)
    task: Task | None = None
    metric: TaskMetric | None = None
    loss_fn: LossFunction | None = None
    processes: Processes = field(default_factory=Processes)
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    progress: bool = True
    checkpointing: bool = False
    storage: AccumulatorStorage = field(default_factory=AccumulatorStorage)
    folder: Path | None = None
    notes: dict[str, str] = field(default_factory=dict)
    origin: dict[str, Any] = field(default_factory=dict)
    of_loading: tuple[str, ...] = ()
    snapshots: Snapshots | None = None
    findings: Findings = field(default_factory=Findings)
    shared_probe: SharedProbe | None = None
    keeps_row_fisher: bool = False
    block_order: BlockOrder | None = None
    unwritten: Callable[[], Batches] | None = None

    @property
    def workload(self) -> Workload:
        """Passes over the calibration batches."""
        return self.workload_on(self.calibration)

    def workload_on(self, batches: Batches) -> Workload:
        """Passes over other batches, the evaluation's say."""
        return Workload(self.model, batches, self.loss_fn, self.checkpointing, self.processes, self.progress)
