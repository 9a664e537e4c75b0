"""The cells of `quality.py`, and the file that keeps them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradprobe_hf.report.build import versions


@dataclass(frozen=True)
class Cell:
    """What a method made of the model in one column.

    Attributes:
        column: a sparsity, or n:m.
        perplexity: by text.
        seconds: that the method takes alone, without the evaluation.
        peak_bytes: of resident memory meanwhile, with the shared first probe; None where the system does not tell.
        passes: forward and backward, over the calibration text.
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

    @property
    def key(self) -> tuple[str, int, str]:
        return self.method, self.seed, self.column

    @property
    def sparsity(self) -> float:
        return self.zeros / self.weights


class CellFile:
    """All cells of one model and protocol, written whenever there is one more.

    Args:
        settings: the model and the protocol.
        fresh: forget the cells of earlier runs.

    Raises:
        SystemExit: the file has cells of other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any], fresh: bool = False) -> None:
        saved = json.loads(path.read_text()) if path.exists() and not fresh else {}
        if saved.get("settings", settings) != settings:
            raise SystemExit(
                f"{path} has cells of other settings ({saved['settings']}, not {settings}): --fresh forgets them, and "
                "another --output keeps them."
            )
        self.path, self.settings = path, settings
        self.dense: dict[str, float] = saved.get("dense", {})
        self.versions: dict[str, str] = saved.get("versions", {}) | versions()
        self.cells = {cell.key: cell for cell in (Cell(**row) for row in saved.get("rows", ()))}

    def add(self, cell: Cell) -> Cell:
        self.cells[cell.key] = cell
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.to_dict(), indent=2) + "\n")
        return cell

    def to_dict(self) -> dict[str, Any]:
        rows = [asdict(cell) for cell in self.cells.values()]
        return {"settings": self.settings, "dense": self.dense, "rows": rows, "versions": self.versions}
