"""The tables of what `quality.py` measured: results -> Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.quality import AS_SPARSE, METHODS, PEERS, RULE, VARIANTS, geometric_mean

QUALITY_COLUMNS = ("0.5", "0.6", "0.7", "2:4", "4:8")
HEADLINE = (  # the rows of the README
    "wanda",
    "llm-compressor, wanda",
    "sparsegpt",
    "llm-compressor, sparsegpt",
    "sparsegpt, dense_target=0.5",
    "two probes",
    "two probes + obs",
)


def headline_table(results: dict[str, Any]) -> str:
    """The rows that a reader of the README compares."""
    return quality_table(results, HEADLINE)


def quality_table(results: dict[str, Any], methods: Iterable[str] = ()) -> str:
    """Perplexities on each text, and their ratios to SparseGPT's: geometric means over the seeds.

    Args:
        methods: the rows; default: all that have the sparsity of their column.
    """
    cells = _cells(results)
    columns = [column for column in QUALITY_COLUMNS if ("sparsegpt", column) in cells]
    titles = " | ".join(column_title(column) for column in columns)
    lines = []
    for text, dense in results["dense"].items():
        lines += [f"| {text}: perplexity (ratio to SparseGPT) | {titles} |", "|---|" + "---:|" * len(columns)]
        lines.append(f"| dense | {' | '.join([format(dense, '.2f')] * len(columns))} |")
        rows = [method for method in methods or _methods(cells) if any((method, column) in cells for column in columns)]
        found = {
            (method, column): _geometric_mean(cells[method, column], text)
            for method in rows
            for column in columns
            if (method, column) in cells
        }
        best = {column: min(value for (_, c), value in found.items() if c == column) for column in columns}
        for method in rows:
            shown = [_quality_cell(found, method, column, best[column]) for column in columns]
            lines.append(f"| {method} | {' | '.join(shown)} |")
        lines.append("")
    return "\n".join([*lines, _protocol(results)])


def stories_table(results: dict[str, Any]) -> str:
    """Means of several draws, and how far these lie apart: the largest over the smallest."""
    cells = _cells(results)
    columns = [column for column in QUALITY_COLUMNS if ("sparsegpt", column) in cells]
    (text, dense), *_ = results["dense"].items()
    lines = [
        f"| {text}: perplexity (largest / smallest draw) | {' | '.join(map(column_title, columns))} |",
        "|---|" + "---:|" * len(columns),
        f"| dense | {' | '.join([format(dense, '.2f')] * len(columns))} |",
    ]
    means = {key: _geometric_mean(found, text) for key, found in cells.items()}
    best = {c: min(means[method, c] for method in _methods(cells) if (method, c) in means) for c in columns}
    for method in _methods(cells):
        shown = []
        for column in columns:
            values = [row["perplexity"][text] for row in cells.get((method, column), [])]
            cell = f"{means[method, column]:,.2f} ({max(values) / min(values):.3f})" if values else ""
            shown.append(f"**{cell}**" if values and means[method, column] == best[column] else cell)
        lines.append(f"| {method} | {' | '.join(shown)} |")
    return "\n".join([*lines, "", _protocol(results, "bench-stories")])


def rule_table(results: dict[str, Any]) -> str:
    """The published rule at the sparsity that it comes to, and the others at that sparsity."""
    cells = _cells(results)
    texts = list(results["dense"])
    lines = [f"| candidates | it prunes | | {' | '.join(texts)} |", "|---:|---:|---|" + "---:|" * len(texts)]
    for column in QUALITY_COLUMNS:
        for method in (RULE, *(method for method, c in cells if method.endswith(AS_SPARSE) and c == column)):
            for row in cells.get((method, column), []):
                asked, came = (column_title(column), row["zeros"] / row["weights"]) if method == RULE else ("", None)
                values = " | ".join(f"{row['perplexity'][text]:,.2f}" for text in texts)
                reached = f"{came:.2%}" if came is not None else ""
                lines.append(f"| {asked} | {reached} | {method.removesuffix(AS_SPARSE)} | {values} |")
    return "\n".join([*lines, "", _protocol(results, alike=False)])


def price_table(results: dict[str, Any]) -> str:
    """What the methods take: at 60%, and in groups where they are for groups."""
    cells = _cells(results)
    lines = [
        "| method | passes forward, backward | seconds at 60% | seconds at 2:4 | peak memory |",
        "|---|---|---:|---:|---:|",
    ]
    for method in _methods(cells):
        rows = {column: cells[method, column][0] for column in ("0.6", "2:4") if (method, column) in cells}
        if not rows:
            continue
        first = next(iter(rows.values()))
        passes = f"{first['passes']['forward']:g}, {first['passes']['backward']:g}" if first["passes"] else ""
        seconds = [f"{rows[column]['seconds']:.0f}" if column in rows else "" for column in ("0.6", "2:4")]
        peak = max(row["peak_bytes"] or 0 for row in rows.values())
        lines.append(f"| {method} | {passes} | {' | '.join(seconds)} | {peak / 1e6:,.0f} MB |")
    note = (
        "Passes over the calibration text. The memory is the whole process's, with what the rows share: the model and "
        "the statistics of the first probe. Made by `make bench-quality`, on a machine with 2 cores."
    )
    return "\n".join([*lines, "", note])


def variants_table(results: dict[str, Any]) -> str:
    """Ways to decide that differ from the default in one option, on every text."""
    cells = _cells(results)
    columns = [column for column in QUALITY_COLUMNS if any(c == column for _, c in cells)]
    texts = list(results["dense"])
    lines = [f"| {' / '.join(texts)} | {' | '.join(map(column_title, columns))} |", "|---|" + "---:|" * len(columns)]
    for method in _methods(cells):
        shown = []
        for column in columns:
            found = cells.get((method, column), [])
            shown.append(" / ".join(f"{_geometric_mean(found, text):,.2f}" for text in texts) if found else "")
        lines.append(f"| {method} | {' | '.join(shown)} |")
    return "\n".join([*lines, "", _protocol(results, "bench-variants")])


def column_title(column: str) -> str:
    return column if ":" in column else f"{float(column):.0%}"


def _cells(results: dict[str, Any]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The rows by method and column, one for each seed."""
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in results["rows"]:
        cells.setdefault((row["method"], row["column"]), []).append(row)
    return cells


def _methods(cells: Iterable[tuple[str, str]]) -> list[str]:
    """Those that have the sparsity of their column, in the benchmark's order."""
    found = {method for method, _ in cells if method != RULE and not method.endswith(AS_SPARSE)}
    known = [*METHODS, *PEERS, *VARIANTS]
    return sorted(found, key=known.index)


def _geometric_mean(rows: list[dict[str, Any]], text: str) -> float:
    return geometric_mean([row["perplexity"][text] for row in rows])


def _protocol(results: dict[str, Any], made_by: str = "bench-quality", *, alike: bool = True) -> str:
    """Args: alike: whether the columns have one number of zeros each."""
    settings = results["settings"]
    measured = ", ".join(f"{found['text']} of {name}" for name, found in settings["evaluation"].items())
    seeds = len({row["seed"] for row in results["rows"]})
    draws = f", {seeds} draws" if seeds > 1 else ""
    return (
        f"{settings['model']}, {settings['dtype']}; calibration {settings['calibration']}{draws}; evaluation "
        f"{measured}{'; every column has one number of zeros' if alike else ''}. Made by `make {made_by}`."
    )


def _quality_cell(found: dict[tuple[str, str], float], method: str, column: str, best: float) -> str:
    if (method, column) not in found:
        return ""
    value = found[method, column]
    shown = f"{value:,.2f} ({value / found['sparsegpt', column]:.2f})"
    return f"**{shown}**" if value == best else shown
