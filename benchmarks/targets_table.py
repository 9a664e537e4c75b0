"""SparseGPT a quarter of the way to the dense model's outputs, beside the main table: results -> Markdown."""

from __future__ import annotations

from typing import Any

from benchmarks.quality_tables import (
    REFERENCE,
    Cells,
    cells_of,
    column_title,
    columns_of,
    commits_of,
    geometric_mean,
    mean_of,
)

QUARTER, BEST = "sparsegpt, dense_target 0.25", "one probe + admm"


def targets_table(results: dict[str, Any], main: dict[str, Any]) -> str:
    """Geometric means over the draws that SparseGPT at 0.25 has, and of the ratios of a draw.

    Args:
        results: cells of SparseGPT at 0.25.
        main: those of the main table.

    Raises:
        ValueError: the two are of other models, texts or windows.
    """
    if results["settings"] != main["settings"]:
        raise ValueError(f"two tables of other settings: {results['settings']} and {main['settings']}")
    quarter, texts = cells_of(results), list(results["dense"])
    columns = columns_of(quarter)
    cells = quarter | _of_the_draws(cells_of(main), quarter, columns)
    lines = [f"| {' / '.join(texts)} | {' | '.join(map(column_title, columns))} |", "|---|" + "---:|" * len(columns)]
    for method in (REFERENCE, QUARTER, BEST):
        shown = (" / ".join(f"{mean_of(cells[method, column], text):.2f}" for text in texts) for column in columns)
        lines.append(f"| {method} | {' | '.join(shown)} |")
    for title, other in (("the last over the first", REFERENCE), ("the last over the second", QUARTER)):
        shown = (" / ".join(f"{_ratio(cells[BEST, c], cells[other, c], text):.2f}" for text in texts) for c in columns)
        lines.append(f"| {title} | {' | '.join(shown)} |")
    draws = max(len(rows) for rows in quarter.values())
    note = (
        f"{draws} draw{'s' * (draws > 1)} of the calibration windows; `sparsegpt` and `one probe + admm` are the same "
        "draw's cells of the table above. "
        f"Made by `make bench-c4-targets`, at {', '.join(commits_of(results))}."
    )
    return "\n".join([*lines, "", note])


def _of_the_draws(main: Cells, quarter: Cells, columns: list[str]) -> Cells:
    """The main table's cells of the same draws, in their order."""
    found: Cells = {}
    for column in columns:
        for method in (REFERENCE, BEST):
            by_seed = {row["seed"]: row for row in main[method, column]}
            found[method, column] = [by_seed[row["seed"]] for row in quarter[QUARTER, column]]
            if [row["calibration"] for row in found[method, column]] != [
                row["calibration"] for row in quarter[QUARTER, column]
            ]:
                raise ValueError(f"cells of {column} with other calibration windows")
    return found


def _ratio(rows: list[dict[str, Any]], others: list[dict[str, Any]], text: str) -> float:
    """The geometric mean over the draws, which both have in one order."""
    pairs = zip(rows, others, strict=True)
    return geometric_mean([row["perplexity"][text] / other["perplexity"][text] for row, other in pairs])
