"""Diagnostics: what a run learns besides its masks, for the report and for a run that goes on from a snapshot."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Diagnostics:
    """What is known besides the masks; every probe pair of a run adds to it.

    Attributes:
        score_ranges: lowest and highest score of each matrix, of the scores that ordered it last.
        without_evidence: candidates of each matrix given back because no probe saw a gradient (threshold rule).
        probe_losses: mean calibration loss of each probe, in nats.
        curve: sparsity, metric and its limit at each attempt of a search with `max_metric_drop`.
        passes: forward and backward passes over the calibration data, in whole ones; what checkpointing computes again
            does not count.
        reached: matrices that a probe has seen a gradient of (or a forward pass an input).
        row_fisher: of each matrix, the mean Fisher information of the weights of a row, where a weight update reads it.
        blocks_without: blocks that go whole, in their order, and the calibration loss (nats) without them so far.
        shapes: those that meet a budget, the one that was chosen first: what is `removed`, the `parameters` and `bytes`
            that are left, the calibration loss (nats) that was `estimated`, and the `loss` of those that were tried;
            for a budget of latency the share of the dense model's that the table says.
        dense_loss: of the dense model, where those were tried.
        latency: of the shape that was chosen for such a budget: the share that the `table` says, seconds of the `dense`
            model and of one of the `smaller` shape, their `ratio`, and what was timed.
        accumulator_bytes: size of the statistics `[out, in]` of the probe pair that had the most.
    """

    score_ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    without_evidence: dict[str, int] = field(default_factory=dict)
    probe_losses: dict[str, float] = field(default_factory=dict)
    curve: list[dict[str, Any]] = field(default_factory=list)
    passes: dict[str, float] = field(default_factory=lambda: {"forward": 0.0, "backward": 0.0})
    reached: set[str] = field(default_factory=set)
    row_fisher: dict[str, list[float]] = field(default_factory=dict)
    blocks_without: list[dict[str, Any]] = field(default_factory=list)
    shapes: list[dict[str, Any]] = field(default_factory=list)
    dense_loss: float | None = None
    latency: dict[str, Any] | None = None
    accumulator_bytes: int = 0

    def copy(self) -> Diagnostics:
        found = Diagnostics()
        found.load(copy.deepcopy(self.to_dict()))
        return found

    def count(self, kind: str, passes: float) -> None:
        self.passes[kind] += passes

    def to_dict(self) -> dict[str, Any]:
        """JSON values from which `load` makes the same again."""
        return {**asdict(self), "reached": sorted(self.reached)}

    def load(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)
        self.reached = set(self.reached)
        self.score_ranges = {name: (low, high) for name, (low, high) in self.score_ranges.items()}
