"""The table of `quality.py --texts`: what other calibration text comes to."""

from __future__ import annotations

from typing import Any

from benchmarks.quality_rows import TEXTS
from benchmarks.quality_tables import cells_of, column_title, columns_of, mean_of


def texts_table(results: dict[str, Any]) -> str:
    """Perplexity by column and calibration text: geometric means over the draws, and each draw."""
    cells, settings = cells_of(results), results["settings"]
    texts = [text for text in TEXTS if any(method == text for method, _ in cells)]
    lines = []
    for name, dense in results["dense"].items():
        lines += [f"| {name} (dense {dense:.2f}) | {' | '.join(texts)} |", "|---|" + "---:|" * len(texts)]
        for column in columns_of(cells):
            lines.append(
                f"| {column_title(column)} | {' | '.join(_shown(cells.get((t, column)), name) for t in texts)} |"
            )
        lines.append("")
    length = settings["calibration"].split(" of ")[0].split(" x ")[1]
    measured = ", ".join(f"{found['text']} of {name}" for name, found in settings["evaluation"].items())
    draws = len({row["seed"] for row in results["rows"]})
    brackets = "; in brackets each draw of the windows" if draws > 1 else ""
    note = (
        f"{settings['model']}, {settings['dtype']}; two probes; windows of {length} tokens; evaluation "
        f"{measured}{brackets}. Made by `make bench-{results['made_by']}`."
    )
    return "\n".join([*lines, note])


def _shown(rows: list[dict[str, Any]] | None, text: str) -> str:
    if not rows:
        return ""
    draws = [row["perplexity"][text] for row in rows]
    each = f" ({', '.join(f'{value:.2f}' for value in draws)})" if len(draws) > 1 else ""
    return f"{mean_of(rows, text):.2f}{each}"
