"""The setting: what the trials of one run are given, and what is found on the way."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from gradprobe_hf.config import GradProbeConfig
from gradprobe_hf.data.batches import Batches
from gradprobe_hf.model.loss import LossFunction
from gradprobe_hf.model.targets import Target
from gradprobe_hf.probe.matrix import AccumulatorStorage
from gradprobe_hf.probe.statistics import Statistics
from gradprobe_hf.run.snapshots import Snapshots
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.runtime.stopwatch import Stopwatch


@dataclass(frozen=True)
class FirstProbe:
    """Probe 0 of the model as it is: what every joint configuration of one comparison begins with.

    Attributes:
        loss: mean calibration loss, in nats.
        seconds: that it took.
    """

    statistics: Statistics
    loss: float
    seconds: float


@dataclass(frozen=True)
class RunContext:
    """What the trials of one run share: what `reach_verdict` is given.

    Attributes:
        first: made before, with at least the terms that `config` needs; trials read it, and add to a copy.
        is_shared: whether what is decided may also serve another configuration, that reconstructs in another way.
    """

    model: PreTrainedModel
    targets: tuple[Target, ...]
    config: GradProbeConfig
    batches: Batches | None
    loss_fn: LossFunction | None = None
    checkpointing: bool = False
    keeping: AccumulatorStorage = field(default_factory=AccumulatorStorage)
    processes: Processes = field(default_factory=Processes)
    journal: Snapshots | None = None
    folder: str | Path | None = None
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    progress: bool = True
    first: FirstProbe | None = None
    is_shared: bool = False


@dataclass
class Diagnostics:
    """What is known besides the masks; every trial of a run adds to it.

    Attributes:
        score_ranges: lowest and highest score of each matrix, of the scores that ordered it last.
        without_evidence: candidates of each matrix given back because no probe saw a gradient (threshold decision).
        probe_losses: mean calibration loss of each probe, in nats.
        curve: sparsity, metric and its limit of each trial of an iterated schedule.
        passes: forward and backward passes over the calibration data, in whole ones; what checkpointing computes again
            does not count.
        reached: matrices that a probe has seen a gradient of (or an input).
        row_fisher: of each matrix, the mean Fisher information of the weights of a row, where a reconstruction uses it.
        accumulator_bytes: size of the statistics `[out, in]` of the trial that had the most.
    """

    score_ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    without_evidence: dict[str, int] = field(default_factory=dict)
    probe_losses: dict[str, float] = field(default_factory=dict)
    curve: list[dict[str, Any]] = field(default_factory=list)
    passes: dict[str, float] = field(default_factory=lambda: {"forward": 0.0, "backward": 0.0})
    reached: set[str] = field(default_factory=set)
    row_fisher: dict[str, list[float]] = field(default_factory=dict)
    accumulator_bytes: int = 0

    def copy(self) -> Diagnostics:
        found = Diagnostics()
        found.take(copy.deepcopy(self.to_notes()))
        return found

    def count(self, kind: str, passes: float) -> None:
        self.passes[kind] += passes

    def to_notes(self) -> dict[str, Any]:
        """JSON values from which `take` makes the same again."""
        return {**asdict(self), "reached": sorted(self.reached)}

    def take(self, notes: Mapping[str, Any]) -> None:
        for name, value in notes.items():
            setattr(self, name, value)
        self.reached = set(self.reached)
        self.score_ranges = {name: (low, high) for name, (low, high) in self.score_ranges.items()}
