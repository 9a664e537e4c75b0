"""SparseGPT a quarter of the way to the dense model's outputs, beside the main table: results -> Markdown."""

from __future__ import annotations

from typing import Any

from benchmarks.quality_tables import REFERENCE, cells_of, column_title, columns_of, commits_of, geometric_mean, mean_of

QUARTER, BEST = "sparsegpt, dense_target 0.25", "one probe + admm"


def targets_table(results: dict[str, Any], main: dict[str, Any]) -> str:
    """Geometric means over draws, and of the ratios of a draw.

    Args:
        results: cells of SparseGPT at 0.25.
        main: those of the main table, on the same windows of both kinds.

    Raises:
        ValueError: they are of other models or texts.
    """
    if results["settings"] != main["settings"]:
        raise ValueError(f"two tables of other settings: {results['settings']} and {main['settings']}")
    cells, texts = {**cells_of(main), **cells_of(results)}, list(results["dense"])
    columns = columns_of(cells_of(results))
    lines = [f"| {' / '.join(texts)} | {' | '.join(map(column_title, columns))} |", "|---|" + "---:|" * len(columns)]
    for method in (REFERENCE, QUARTER, BEST):
        shown = (" / ".join(f"{mean_of(cells[method, column], text):.2f}" for text in texts) for column in columns)
        lines.append(f"| {method} | {' | '.join(shown)} |")
    for title, method, other in (
        ("ratio of the last to the first", BEST, REFERENCE),
        ("ratio of the last to the second", BEST, QUARTER),
    ):
        shown = (
            " / ".join(f"{_ratio(cells[method, c], cells[other, c], text):.2f}" for text in texts) for c in columns
        )
        lines.append(f"| {title} | {' | '.join(shown)} |")
    draws = len(cells[QUARTER, columns[0]])
    note = (
        f"{draws} draws of the calibration windows; the first and the last row are those above. Made by "
        f"`make bench-c4-targets`, at {', '.join(commits_of(results))}."
    )
    return "\n".join([*lines, "", note])


def _ratio(rows: list[dict[str, Any]], others: list[dict[str, Any]], text: str) -> float:
    """The geometric mean over the draws that both have."""
    known = {row["seed"]: row for row in others}
    pairs = [(row, known[row["seed"]]) for row in rows if row["seed"] in known]
    if any(row["calibration"] != other["calibration"] for row, other in pairs):
        raise ValueError("cells of one draw with other calibration windows")
    return geometric_mean([row["perplexity"][text] / other["perplexity"][text] for row, other in pairs])
