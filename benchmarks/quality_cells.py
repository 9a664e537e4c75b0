"""The cells of `quality.py`, and the file that keeps them."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
MADE_BY = ("gradprobe_hf", "benchmarks/rivals.py", "benchmarks/quality_worker.py")  # the code that decides a cell


@dataclass(frozen=True)
class Cell:
    """What a method made of the model in one column, in a process of its own.

    Attributes:
        column: a sparsity, or n:m.
        perplexity: by text; `kl`, in nats per token, and `agreement`, the share of tokens whose most likely next token
            is the same, are from the dense model's predictions.
        losses: by text, the mean loss of every window, in nats per token.
        seconds: of the method, without loading and evaluation.
        peak_bytes: of resident memory up to its end.
        passes: forward and backward, over the calibration text.
        calibration: fingerprint of the text; `options` of the configuration that differ from its defaults.
        commit: the code it was made by; None of cells from before that was noted, which were made in one process.
    """

    method: str
    seed: int
    column: str
    zeros: int
    weights: int
    perplexity: dict[str, float]
    seconds: float
    peak_bytes: int | None
    passes: dict[str, float]
    kl: dict[str, float] = field(default_factory=dict)
    agreement: dict[str, float] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)
    calibration: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    commit: str | None = None

    @property
    def key(self) -> tuple[str, int, str]:
        return self.method, self.seed, self.column

    @property
    def sparsity(self) -> float:
        return self.zeros / self.weights


@dataclass(frozen=True)
class Dense:
    """The model as it is. Attributes: by text `perplexity`, and the mean loss of every window, `losses`."""

    perplexity: dict[str, float]
    losses: dict[str, list[float]] = field(default_factory=dict)


class CellFile:
    """All cells of one model and protocol, written whenever there is one more.

    Several runs may fill one file side by side: each keeps what the others have written.

    Args:
        commit: of the cells to come.
        fresh: forget the cells of earlier runs.
        mixed: keep cells of other commits beside those to come; the tables then say so.

    Raises:
        SystemExit: the file has cells of another commit, and nobody said that these may stay.
    """

    def __init__(self, path: Path, commit: str, fresh: bool = False, mixed: bool = False) -> None:
        saved = json.loads(path.read_text()) if path.exists() and not fresh else {}
        self.path, self.commit = path, commit
        self.settings: dict[str, Any] | None = saved.get("settings")
        self.mixed: bool = saved.get("mixed", False) or mixed
        self.dense = Dense(saved["dense"], saved.get("dense_losses", {})) if "dense" in saved else None
        self.versions: dict[str, str] = saved.get("versions", {})
        self.cells = {cell.key: cell for cell in (Cell(**row) for row in saved.get("rows", ()))}
        others = sorted({str(cell.commit) for cell in self.cells.values()} - {commit})
        if others and not self.mixed:
            raise SystemExit(
                f"{path} has cells of other code ({', '.join(others)}, not {commit}): --fresh forgets them, --mixed "
                "keeps them beside the new ones, and another --output leaves them alone."
            )

    def begin(self, settings: dict[str, Any], dense: Dense) -> None:
        """Note what all cells have in common."""
        self.settings, self.dense = settings, dense
        self._write()

    def add(self, cell: Cell, versions: dict[str, str]) -> None:
        self.versions |= versions
        with locked(self.path.parent):
            saved = json.loads(self.path.read_text())["rows"] if self.path.exists() else []
            known = {one.key: one for one in (Cell(**row) for row in saved)}
            self.cells = known | self.cells | {cell.key: cell}
            self._write()

    def to_dict(self) -> dict[str, Any]:
        dense = self.dense or Dense({})
        return {
            "settings": self.settings,
            "dense": dense.perplexity,
            "dense_losses": dense.losses,
            "mixed": self.mixed,
            "rows": [asdict(cell) for cell in self.cells.values()],
            "versions": self.versions,
        }

    def _write(self) -> None:
        """One line for each cell; the file is whole at any moment."""
        found = self.to_dict()
        rows = ",\n".join(f"    {json.dumps(row)}" for row in found.pop("rows"))
        head = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in found.items())
        write_whole(self.path, f'{{\n{head},\n  "rows": [\n{rows}\n  ]\n}}\n')


def write_whole(path: Path, text: str) -> None:
    """Write a file that is whole at any moment: whoever is killed meanwhile loses nothing that was in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Wait for others who write there."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def code_commit(*more: str) -> str:
    """The last commit that changed the code that decides a cell, with a + where it has changed since.

    Args:
        more: files of a benchmark that decide its own cells beside `MADE_BY`.
    """
    made_by = (*MADE_BY, *more)

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", ROOT, *words], check=True, capture_output=True, text=True).stdout.strip()

    try:
        return git("log", "-1", "--format=%h", "--", *made_by) + "+" * bool(
            git("status", "--porcelain", "--", *made_by)
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"  # a copy without its history
