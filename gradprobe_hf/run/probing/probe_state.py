"""The probe state: which probe of a run is under way, and where, as it is saved in a snapshot and read again."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradprobe_hf.probe.engine import Tally
from gradprobe_hf.probe.statistics import Statistics
from gradprobe_hf.run.snapshots import Parts, Snapshot, Snapshots, Step
from gradprobe_hf.selection.packed_masks import PackedMasks


@dataclass(frozen=True)
class ProbeStage:
    """One probe of a run.

    Attributes:
        pair: the number of its probe pair; a run makes one pair after the other.
        is_second: whether it is the one with the candidates shrunk; otherwise it is the one of the model as served.
    """

    pair: int
    is_second: bool = False

    @classmethod
    def of_number(cls, number: int) -> ProbeStage:
        return cls(pair=number // 2, is_second=number % 2 == 1)

    @property
    def number(self) -> int:
        """As snapshots and reports count the probes of a run: two a pair, whether or not the second is made."""
        return 2 * self.pair + self.is_second

    @property
    def name(self) -> str:
        return f"probe {self.number}"

    @property
    def step(self) -> Step:
        return Step.of("probe", self.number)


def begun_in(snapshots: Snapshots | None) -> ProbeStage | None:
    """The probe that an earlier run was killed in, or after, the decision behind it still open. A collective."""
    latest = snapshots.latest() if snapshots else None
    return None if latest is None or latest.stage != "probe" else ProbeStage.of_number(latest.number)


@dataclass
class ProbeState:
    """Where a run is while it probes.

    Attributes:
        stage: which probe of the run is under way, or finished with the decision after it still open.
        statistics: every set of statistics by its role: "first", and "second" of a probe that keeps its own.
        served: the masks of what is pruned already.
        candidates: the masks that the second probe of a pair shrinks, or that were proposed for it.
        tally: the losses of its batches so far.
        diagnostics: JSON values of the steps before.
    """

    stage: ProbeStage
    statistics: dict[str, Statistics]
    served: PackedMasks
    candidates: PackedMasks | None = None
    tally: Tally = field(default_factory=Tally)
    diagnostics: dict[str, Any] = field(default_factory=dict)

    @property
    def measured(self) -> Statistics:
        """What this probe adds to: the last of the statistics."""
        return list(self.statistics.values())[-1]

    def values(self) -> dict[str, Any]:
        return {
            "losses": [float(loss).hex() for loss in self.tally.losses],
            "terms": [int(terms) for terms in self.tally.terms],
            "diagnostics": self.diagnostics,
            "statistics": {role: statistics.state()[0] for role, statistics in self.statistics.items()},
            "columns": {
                name: masks.all_columns
                for name, masks in (("served", self.served), ("candidates", self.candidates))
                if masks is not None
            },
        }

    def parts(self) -> Parts:
        yield "served", self.served.all_packed
        yield "candidates", self.candidates.all_packed if self.candidates is not None else {}
        for role, statistics in self.statistics.items():
            for index, tensors in enumerate(statistics.state()[1]):
                yield f"{role}-{index}", tensors

    def load(self, snapshot: Snapshot) -> None:
        """Become what was saved of this probe."""
        values = snapshot.values
        for loss, terms in zip(values["losses"], values["terms"], strict=True):
            self.tally.add(torch.tensor(float.fromhex(loss), dtype=torch.float64), torch.tensor(terms))
        self.diagnostics = values["diagnostics"]
        for role, statistics in self.statistics.items():
            statistics.load_state(values["statistics"][role], partial(_matrix_part, snapshot, role))
        self.served, self.candidates = known_masks(snapshot)


def _matrix_part(snapshot: Snapshot, role: str, index: int) -> dict[str, Tensor]:
    return snapshot.part(f"{role}-{index}")


def known_masks(snapshot: Snapshot) -> tuple[PackedMasks, PackedMasks | None]:
    """What was pruned already when a probe began, and the candidates that were known then."""
    columns = snapshot.values["columns"]
    served, candidates = (
        PackedMasks.from_packed(snapshot.part(name), columns[name]) if name in columns else None
        for name in ("served", "candidates")
    )
    return served or PackedMasks(), candidates
