"""The table of `structured_quality.py`: perplexity and divergence of smaller models of the same size."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.quality_tables import Cells, cells_of, commits_of, mean_of


def structured_table(results: dict[str, Any]) -> str:
    """A row for each method: perplexity and KL on each text, geometric and plain means over the draws; best in bold."""
    cells = cells_of(results)
    columns = sorted({column for _, column in cells}, key=float)
    methods = list(dict.fromkeys(method for method, _ in cells))
    lines = []
    for text, dense in results["dense"].items():
        titles = " | ".join(_title(cells, column) for column in columns)
        lines += [f"| {text}: perplexity, KL from dense | {titles} |", "|---|" + "---:|" * len(columns)]
        lines.append(f"| dense | {' | '.join([f'{dense:.2f}'] * len(columns))} |")
        best = {
            (column, trained): min(
                (
                    mean_of(found, text)
                    for (name, c), found in cells.items()
                    if c == column and _trained(name) == trained
                ),
                default=float("nan"),
            )
            for column in columns
            for trained in (False, True)
        }
        for method in sorted(methods, key=_trained):
            shown = [_cell(cells.get((method, c), []), text, best[c, _trained(method)]) for c in columns]
            lines.append(f"| {method} | {' | '.join(shown)} |")
        lines.append("")
    settings = results["settings"]
    texts = ", ".join(f"{about['text']} of {name}" for name, about in settings["evaluation"].items())
    lines.append(
        f"{settings['model']}, {settings['dtype']}; calibrated on {settings['calibration']}, measured on {texts}; "
        f"{_drawn(cells)}. Best in bold, trained rows apart.{_notes(methods, cells)} "
        f"`make bench-{_target(results)}`, at {', '.join(commits_of(results))}."
    )
    return "\n".join(lines)


def defaults_table(results: dict[str, Any]) -> str:
    """Perplexity of one column: a row for each method, a column for each text; the best in bold."""
    cells, texts, settings = cells_of(results), results["dense"], results["settings"]
    best = {text: min(mean_of(rows, text) for rows in cells.values()) for text in texts}
    lines = [f"| | {' | '.join(texts)} |", "|---|" + "---:|" * len(texts)]
    lines.append(f"| dense | {' | '.join(f'{dense:.2f}' for dense in texts.values())} |")
    for (method, _), rows in cells.items():
        found = {text: mean_of(rows, text) for text in texts}
        shown = [f"**{value:.2f}**" if value == best[text] else f"{value:.2f}" for text, value in found.items()]
        lines.append(f"| {method} | {' | '.join(shown)} |")
    measured = ", ".join(f"{about['text']} of {name}" for name, about in settings["evaluation"].items())
    note = (
        f"{settings['model']}, {settings['dtype']}; calibrated on {settings['calibration']}, measured on {measured}; "
        f"{_drawn(cells)}.{_samples(cells)} `make bench-{_target(results)}`, at {', '.join(commits_of(results))}."
    )
    return "\n".join([*lines, "", note])


def _drawn(cells: Cells) -> str:
    """How many draws the calibration windows had."""
    counts = {len(rows) for rows in cells.values()}
    if counts == {1}:
        return "one draw of the calibration windows"
    most = f"{max(counts)}" if len(counts) == 1 else f"up to {max(counts)}"
    return f"{most} draws of the calibration windows, in brackets the largest perplexity over the smallest"


def _samples(cells: Cells) -> str:
    """How often the model's own text was sampled: rows of other machines, and other versions, have other text."""
    found = {row["calibration"] for (name, _), rows in cells.items() if "own text" in name for row in rows}
    return f" Its own text was sampled {len(found)} times for these rows." if len(found) > 1 else ""


def _notes(methods: list[str], cells: Cells) -> str:
    """What the names of rows stand for, where there are such."""
    notes, own = "", any("half own text" in name for name in methods)
    if own:
        notes += " Half own text: every second calibration window is of text that the model writes." + _samples(cells)
    steps = {row["options"]["recovery_steps"] for (name, _), rows in cells.items() if _trained(name) for row in rows}
    if steps:
        taken = " or ".join(map(str, sorted(steps)))
        notes += f" Recovered: trained for {taken} steps of 8 windows towards the dense model, on the calibration text"
        notes += (", without any of the model's own unless the row says so" if own else "") + f"{_rates(cells)}."
    return notes


def _rates(cells: Cells) -> str:
    """The learning rates that were tried, of rows that note them."""
    found = [row["options"].get("held_out_kl", {}) for rows in cells.values() for row in rows]
    most = max((len(rates) for rates in found), default=0)
    return ", with the best of several learning rates by windows held out of it" if most > 1 else ""


def _title(cells: Cells, column: str) -> str:
    """The share that goes, as it came to: of the rows that have the column's parameters, not fewer."""
    rows = [row for (_, c), found in cells.items() if c == column for row in found]
    return f"-{min(row['zeros'] / row['weights'] for row in rows):.1%} of the blocks"


def _trained(method: str) -> bool:
    return ", recovered" in method


def _cell(rows: list[dict[str, Any]], text: str, best: float) -> str:
    if not rows:
        return ""
    perplexity = mean_of(rows, text)
    values = [row["perplexity"][text] for row in rows]
    kl = statistics.fmean(row["kl"][text] for row in rows)
    spread = f" ({max(values) / min(values):.2f})" if len(rows) > 1 else ""
    number = f"{perplexity:.2f}" if perplexity < 1000 else f"{perplexity:,.0f}"
    number = f"**{number}**" if perplexity == best else number
    return f"{number}{spread}, {kl:.2f}"


def _target(results: dict[str, Any]) -> str:
    return str(results["made_by"]).replace("_", "-")
