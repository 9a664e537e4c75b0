"""The report: what happened, as plain data that serialises to JSON and that the card and the plots are made from."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from gradprobe_hf.data.text.text_options import OWN_TEXT, PYDOC
from gradprobe_hf.report.original import DENSE, Original, original_of

REPORT_NAME = "gradprobe_report.json"
SPARSE = 0.05  # zeros of a model's weights with which somebody has pruned it


@dataclass(frozen=True)
class MatrixRow:
    """One matrix after the decision.

    Attributes:
        name, block, role, shape: which matrix, `[out, in]`.
        weights: elements.
        budget: what an equal share of the sparsity would take from it.
        pruned: what went.
        zeros_before: weights that were zero already.
        zeros_after: weights that are zero now.
        score_min, score_max: range of the scores that ordered its weights last (threshold decision: as candidates).
        no_evidence: candidates given back because no probe saw a gradient (threshold decision).
    """

    name: str
    block: str
    role: str
    shape: tuple[int, int]
    weights: int
    budget: int
    pruned: int
    zeros_before: int
    zeros_after: int
    score_min: float | None = None
    score_max: float | None = None
    no_evidence: int = 0

    @property
    def sparsity(self) -> float:
        return self.zeros_after / self.weights


@dataclass(frozen=True)
class LeftOut:
    """A matrix that was asked for and is as it was, outside of the budget: the calibration does not reach it."""

    name: str
    block: str
    role: str
    weights: int


@dataclass(frozen=True)
class Group:
    """Matrices taken together: a block, or a role over all blocks."""

    label: str
    weights: int
    zeros: int

    @property
    def sparsity(self) -> float:
        return self.zeros / self.weights


@dataclass(frozen=True)
class Report:
    """What happened in one run.

    Attributes:
        model: name, class, sizes; whether what was measured is a `loss_in_nats`; the Auto classes that load its
            `own_code`, where it brings any; the `adapter` that was folded into it (and the model that is of,
            `adapter_of`, if that was before an earlier pruning), the quantised type it was `stored_as`, or the plain
            one it was `converted_from`, and, if it had been pruned before, the sparsity that it was `pruned_to`
            (`once_pruned_to`, if its zeros are weights again), the n:m `pattern` of its zeros, and how much of each
            `structure` had gone.
        config: as plain data.
        matrices: one row each.
        unreached: matrices that were asked for and left out.
        calibration, evaluation: source, protocol and fingerprint of the texts; dense and pruned measurements, and the
            `divergence` of one from the other, where they predict tokens.
        selection: what chose the sparsity with `max_metric_drop`: the text (another half of what `evaluation` was drawn
            from) or the user's own metric, its value there, and the limit; by `sketch` the text is known again.
        recovery: how the kept weights were trained afterwards: its steps, text, options and teacher, and what was
            measured before; None: they were not. `evaluation` is then of the model as it was left.
        probes: mean calibration loss of each probe, in nats.
        passes: forward and backward passes over the calibration data, in whole ones.
        refinement: of each block that was trained the mean relative squared error of its outputs on the windows held
            out, `before` and `after`, the `epochs` it took, and the one `kept`.
        structure: what goes whole, where anything does: `removed`, structure -> how many, and `blocks` by name; the
            values of the configuration and the number of `parameters` before and after; the `candidates` where the
            shape was chosen for a budget, that which was first, and the `dense_loss` on what they were measured on; and
            its `latency`, where that was the budget.
        speed: with `measure_speed` what `BenchResult.to_dict` has: the dense model, the one that is left, and the other
            candidates; of the last two with random weights.
        files: bytes of the weights on the disk, under `zstd`, and as the `hub` transfers them (None: not measured),
            once they are written; and as many as the dense ones have in the type that they were loaded in, `dense`,
            `dense_zstd` and `dense_hub` (None of a model that was not loaded by its name, or is stored in another
            type, too).
        curve: sparsity, metric and its limit at each attempt of a search.
        timings: seconds per stage.
        memory: bytes.
        execution: how it was run and why so; no result depends on it.
    """

    model: dict[str, Any]
    config: dict[str, Any]
    matrices: list[MatrixRow]
    unreached: list[LeftOut] = field(default_factory=list)
    calibration: dict[str, Any] | None = None
    evaluation: dict[str, Any] | None = None
    selection: dict[str, Any] | None = None
    recovery: dict[str, Any] | None = None
    probes: dict[str, float] = field(default_factory=dict)
    passes: dict[str, float] = field(default_factory=dict)
    refinement: dict[str, dict[str, float]] = field(default_factory=dict)
    structure: dict[str, Any] | None = None
    speed: dict[str, Any] | None = None
    files: dict[str, int | None] | None = None
    curve: list[dict[str, Any]] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    execution: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def weights(self) -> int:
        return sum(row.weights for row in self.matrices)

    @property
    def zeros(self) -> int:
        return sum(row.zeros_after for row in self.matrices)

    @property
    def sparsity(self) -> float:
        """The true share of zeros in the target matrices."""
        return self.zeros / self.weights

    @property
    def peak(self) -> str:
        """The highest memory of the process, and what a GPU had allocated, where there is one."""
        host, gpu = self.memory["peak_resident_bytes"], self.memory.get("peak_cuda_bytes", 0)
        return f"{host / 1e9:.2f} GB" + (f", on the GPU {gpu / 1e9:.2f} GB" if gpu else "")

    @property
    def in_nats(self) -> bool:
        """Whether a loss is of a probability: a squared error is not, and of a loss of the user's own nobody knows."""
        return bool(self.model.get("loss_in_nats", True))  # not in reports of before

    @property
    def recovered_towards(self) -> dict[str, Any] | None:
        """The teacher of a recovery, where it is another model than the one that was pruned; else None."""
        teacher: dict[str, Any] | None = (self.recovery or {}).get("teacher")  # not in reports of before
        if teacher is None:
            return None
        same = all(teacher[what] == self.model[what] for what in ("name", "parameters"))
        # What was pruned twice in memory has the name of the dense model.
        lost = sum(row.zeros_before for row in self.matrices) >= SPARSE * self.weights
        return None if same and (teacher.get("is_sparse", True) or not lost) else teacher

    @property
    def is_recovered(self) -> bool:
        """Whether a recovery has changed the weights: where no step of it helped they are as they were."""
        return self.recovery is not None and self.recovery["best_step"] > 0

    @property
    def is_calibrated_by_default(self) -> bool:
        """Whether nobody has said what to calibrate on, or has asked for what would have been taken."""
        source = str((self.calibration or {}).get("source", ""))
        return source.startswith((OWN_TEXT, f"{PYDOC} ("))

    @property
    def made_of(self) -> Original:
        """The model that was pruned: dense, or pruned before."""
        return original_of(self.model)

    @property
    def beside(self) -> Original:
        """The model that all that was measured is beside."""
        return DENSE if self.recovered_towards else self.made_of

    @property
    def sizes_beside(self) -> tuple[int, dict[str, Any] | None]:
        """Of the model that all that was measured is beside: its parameters, and its values of what the configuration
        says of the shape where a structure went; None: of those nothing is known."""
        assert self.structure is not None, "whole structures went"
        if (teacher := self.recovered_towards) is not None:
            return int(teacher["parameters"]), None
        return int(self.structure["parameters"]["before"]), self.structure["before"]

    def counted(self, row: MatrixRow) -> int:
        """What a reader is shown of a matrix: its zeros; of one that lost units what went, for a weight that stays is
        in the file, and may be zero as well."""
        return row.zeros_after if self.structure is None else row.pruned

    def by(self, attribute: str) -> list[Group]:
        """Totals per `"block"` or per `"role"`, in the model's order."""
        return grouped((getattr(row, attribute), row.weights, row.zeros_after) for row in self.matrices)

    def to_dict(self) -> dict[str, Any]:
        """JSON types; what is not finite becomes null."""
        summary = {
            "sparsity": self.sparsity,
            "weights": self.weights,
            "zeros": self.zeros,
            "pruned": sum(row.pruned for row in self.matrices),
            "zeros_before": sum(row.zeros_before for row in self.matrices),
        }
        rows = [{**asdict(row), "sparsity": row.sparsity} for row in self.matrices]
        return finite(without_examples({**asdict(self), **summary, "matrices": rows}))

    @classmethod
    def load(cls, directory: str | Path) -> Report:
        """That of a checkpoint folder.

        Raises:
            ValueError: it is damaged.
            OSError: there is none.
        """
        path = Path(directory) / REPORT_NAME
        text = path.read_text(encoding="utf-8")
        try:
            values = json.loads(text)
            known = {one.name: values[one.name] for one in fields(cls) if one.name in values}
            of_row = {one.name for one in fields(MatrixRow)}
            rows = [{name: value for name, value in row.items() if name in of_row} for row in known["matrices"]]
            known["matrices"] = [MatrixRow(**{**row, "shape": tuple(row["shape"])}) for row in rows]
            known["unreached"] = [LeftOut(**one) for one in known.get("unreached", [])]
            return cls(**known)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}); fetch it again.") from error

    def save(self, directory: str | Path) -> None:
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False)
        (Path(directory) / REPORT_NAME).write_text(text + "\n", encoding="utf-8")


def grouped(rows: Iterable[tuple[str, int, int]]) -> list[Group]:
    """Totals of `(label, weights, zeros)` per label, in the order in which labels first appear."""
    totals: dict[str, list[int]] = {}
    for label, weights, zeros in rows:
        total = totals.setdefault(label or "outside the blocks", [0, 0])
        total[0] += weights
        total[1] += zeros
    return [Group(label, weights, zeros) for label, (weights, zeros) in totals.items()]


def without_examples(value: Any) -> Any:
    """The same value without an example of any text that is not on the Hub: reports and cards are published."""
    if isinstance(value, dict):
        hidden = ("example",) if "fingerprint" in value and value.get("dataset_id") is None else ()
        return {name: without_examples(inner) for name, inner in value.items() if name not in hidden}
    if isinstance(value, (list, tuple)):
        return [without_examples(inner) for inner in value]
    return value


def finite(value: Any) -> Any:
    """The same value with every NaN and infinity replaced by None: JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return value
