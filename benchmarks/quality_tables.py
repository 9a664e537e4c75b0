"""The tables of what `quality.py` measured: results -> Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from benchmarks.quality_rows import ACCUMULATORS, AS_SPARSE, COLUMNS, METHODS, PEERS, RULE, RULE_ROWS, VARIANTS
from gradprobe_hf.evaluation.divergence import ratio_interval

Cells = dict[tuple[str, str], list[dict[str, Any]]]
REFERENCE = "sparsegpt"
SHOWN_COLUMNS = sorted(COLUMNS, key=lambda column: (":" in column, column))
UNNOTED = "one before they were noted"  # the commit of a cell in a file that is older than that
THOUSANDS = 1e3
BROKEN = 1e5  # a vocabulary is not much larger: a perplexity beyond it is worse than guessing
NEGLIGIBLE = 1e-4  # of the weights: two rows of so nearly the same sparsity are compared
ROUNDED = 5e-3  # of the weights: a sparsity that is farther from its column's is no rounding of it
# What the presets are in the benchmark: the method without a pattern, and the one with an n:m pattern.
PRESETS = {
    "fast": ("one probe", "sparsegpt"),
    "balanced": ("two probes", "sparsegpt + admm"),
    "best": ("one probe + admm", "one probe + admm"),
}
HEADLINE = {  # the rows of the README under the dense model's
    "SparseGPT": ("sparsegpt", "sparsegpt"),
    "SparseGPT + ADMM": ("sparsegpt + admm", "sparsegpt + admm"),
    '`preset="balanced"`': PRESETS["balanced"],
    '`preset="best"`': PRESETS["best"],
}
HEADLINE_COLUMNS = ("0.5", "0.6", "0.7", "2:4")
PRICED_COLUMNS = ("0.6", "2:4")  # of the tables of seconds and memory
CALIBRATED_ON = {  # results -> what calibrating on their text means for what is measured
    "c4": "neither text calibrates",
    "wikitext": "its validation split; WikiText-2 is its test split here",
}


def whole_columns(results: dict[str, Any]) -> list[str]:
    """Those in which all of the README's rows are made."""
    made = {(row["method"], row["column"]) for row in results["rows"]}
    rows = HEADLINE.values()
    return [c for c in SHOWN_COLUMNS if all((methods[":" in c], c) in made for methods in rows)]


def has_headline(results: dict[str, Any]) -> bool:
    """Whether every cell of the README's table is made."""
    return set(whole_columns(results)) >= set(HEADLINE_COLUMNS)


def headline_table(results: dict[str, Any]) -> str:
    """Every text in each cell."""
    results = even(results, {method for methods in HEADLINE.values() for method in methods})
    cells, texts = cells_of(results), list(results["dense"])
    dense = " / ".join(_shown(results["dense"][text]) for text in texts)
    lines = [
        f"| perplexity on {' / '.join(texts)} | {' | '.join(map(column_title, HEADLINE_COLUMNS))} |",
        "|---|" + "---:|" * len(HEADLINE_COLUMNS),
        f"| dense | {' | '.join([dense] * len(HEADLINE_COLUMNS))} |",
    ]
    for label, methods in HEADLINE.items():
        found = [cells[methods[":" in column], column] for column in HEADLINE_COLUMNS]
        shown = [" / ".join(_shown(mean_of(rows, text)) for text in texts) for rows in found]
        lines.append(f"| {label} | {' | '.join(shown)} |")
    settings = results["settings"]
    note = (
        f"{settings['model']}, {_made_in(settings)}; calibrated on {settings['calibration']} "
        f"({CALIBRATED_ON[results['made_by']]}), {_draws(results)}{_mixture(results)}. Made by {_command(results)}."
    )
    return "\n".join([*lines, "", note])


def presets_table(results: dict[str, Any], other: dict[str, Any] | None = None) -> str:
    """What each preset takes and what it comes to, at 60% and at 2:4.

    Args:
        other: the same calibrated on another text: a column of its perplexities, as far as they are made.
    """
    cells, texts = cells_of(results), list(results["dense"])
    other = None if other is None else even(other, {method for methods in PRESETS.values() for method in methods})
    beside = {} if other is None else cells_of(other)
    lines = [
        f"| | preset | passes forward, backward | seconds | peak memory | {' / '.join(texts)} |",
        "|---|---|---|---:|---:|---:|",
    ]
    if other is not None:
        lines = [f"{lines[0]} calibrated on {_text_of(other)} |", f"{lines[1]}---:|"]
    for column in PRICED_COLUMNS:
        for preset, methods in {"SparseGPT": ("sparsegpt", "sparsegpt"), **PRESETS}.items():
            key = methods[":" in column], column
            row = cells[key][0]
            values = [
                column_title(column),
                f"`{preset}`" if preset in PRESETS else preset,
                f"{row['passes']['forward']:g}, {row['passes']['backward']:g}",
                f"{row['seconds']:.0f}",
                f"{row['peak_bytes'] / 1e6:,.0f} MB",
                " / ".join(_shown(mean_of(cells[key], text)) for text in texts),
            ]
            if other is not None:
                found = beside.get(key)
                values.append(" / ".join(_shown(mean_of(found, text)) for text in texts) if found else "")
            lines.append(f"| {' | '.join(values)} |")
    note = f"{_setting(results)}, on a machine with 2 cores{_mixture(results)}. Made by {_command(results)}"
    if other is not None:
        on = other["settings"]["calibration"]
        note += f"; the last column is calibrated on {on}, {_draws(other)}, made by {_command(other)}{_mixture(other)}"
    return "\n".join([*lines, "", f"{note}."])


def calibrated_on_c4(results: dict[str, Any]) -> str:
    """A section of the results: what the README shows, with its ratios, intervals and divergences; whole columns."""
    columns = whole_columns(results)
    results = even({**results, "rows": [row for row in results["rows"] if row["column"] in columns]})
    said = (
        "The README's rows and others, calibrated on C4 as in the literature: nothing is calibrated on WikiText-2 or "
        "pydoc."
    )
    tables = [quality_table(results), intervals_table(results), divergence_table(results)]
    if len({row["seed"] for row in results["rows"]}) > 1:
        tables.append(draws_table(results))
    return "\n\n".join(["### Calibrated on C4", said, *tables])


def quality_table(results: dict[str, Any], methods: Iterable[str] = ()) -> str:
    """Perplexities on each text, and their ratios to SparseGPT's: geometric means over the draws.

    Args:
        methods: the rows; default: all that have the sparsity of their column.
    """
    cells = cells_of(results)
    columns = [column for column in SHOWN_COLUMNS if (REFERENCE, column) in cells]
    titles = " | ".join(column_title(column) for column in columns)
    lines = []
    for text, dense in results["dense"].items():
        lines += [f"| {text}: perplexity (ratio to SparseGPT) | {titles} |", "|---|" + "---:|" * len(columns)]
        lines.append(f"| dense | {' | '.join([format(dense, '.2f')] * len(columns))} |")
        rows = [method for method in methods or _methods(cells) if any((method, column) in cells for column in columns)]
        found = {
            (method, column): mean_of(cells[method, column], text)
            for method in rows
            for column in columns
            if (method, column) in cells
        }
        best = {column: min(value for (_, c), value in found.items() if c == column) for column in columns}
        for method in rows:
            shown = [_quality_cell(cells, text, method, column, best[column]) for column in columns]
            lines.append(f"| {method} | {' | '.join(shown)} |")
        lines.append("")
    return "\n".join([*lines, _protocol(results, cells, methods or _methods(cells))])


def intervals_table(results: dict[str, Any], methods: Sequence[str] = ()) -> str:
    """Ratios to SparseGPT's perplexity, with the interval that another draw of the evaluation windows might give."""
    cells = cells_of(results)
    columns = columns_of(cells)
    lines = []
    for text in results["dense"]:
        lines += [f"| {text}: ratio to SparseGPT [95%] | {' | '.join(map(column_title, columns))} |"]
        lines += ["|---|" + "---:|" * len(columns)]
        for method in methods or _methods(cells):
            if method != REFERENCE and any((method, column) in cells for column in columns):
                shown = [_ratio(cells, method, column, text) for column in columns]
                lines.append(f"| {method} | {' | '.join(shown)} |")
        lines.append("")
    note = (
        "In brackets 95% of the ratio by a paired bootstrap over the evaluation windows: methods are compared on the "
        "same windows. It does not cover other draws of the calibration windows. "
    )
    return "\n".join([*lines, note + _protocol(results, cells, methods or _methods(cells))])


def divergence_table(results: dict[str, Any], methods: Sequence[str] = ()) -> str:
    """How far the predictions are from the dense model's: means over the draws."""
    cells = cells_of(results)
    columns = columns_of(cells)
    lines = []
    for text in results["dense"]:
        lines += [f"| {text}: KL from dense, top-1 agreement | {' | '.join(map(column_title, columns))} |"]
        lines += ["|---|" + "---:|" * len(columns)]
        for method in methods or _methods(cells):
            if any((method, column) in cells for column in columns):
                shown = [_divergence(cells.get((method, column), []), text) for column in columns]
                lines.append(f"| {method} | {' | '.join(shown)} |")
        lines.append("")
    note = "KL in nats per token; agreement: the share of tokens whose most likely next token is the dense model's. "
    return "\n".join([*lines, note + _protocol(results, cells, methods or _methods(cells))])


def draws_table(results: dict[str, Any]) -> str:
    """How far draws of the calibration windows lie apart: perplexities, and their ratios to SparseGPT's."""
    cells = cells_of(results)
    columns = columns_of(cells)
    lines = []
    for text in results["dense"]:
        titles = " | ".join(column_title(column) for column in columns)
        lines += [f"| {text}: largest draw above the smallest (ratio to SparseGPT, by draw) | {titles} |"]
        lines.append("|---|" + "---:|" * len(columns))
        for method in _methods(cells):
            shown = (_apart(cells, method, column, text) for column in columns)
            lines.append(f"| {method} | {' | '.join(shown)} |")
        lines.append("")
    return "\n".join([*lines, _protocol(results, cells, _methods(cells))])


def _apart(cells: Cells, method: str, column: str, text: str) -> str:
    values = [row["perplexity"][text] for row in cells.get((method, column), [])]
    if len(values) < 2:
        return ""
    apart = f"{max(values) / min(values) - 1:.0%}"
    if method == REFERENCE:
        return apart
    ratios = [_mean_ratio([pair], text) for pair in _pairs(cells, method, column)]
    return f"{apart} ({_shown(min(ratios))} to {_shown(max(ratios))})"


def _ratio(cells: Cells, method: str, column: str, text: str) -> str:
    """The ratio to the reference, over the draws that both have."""
    pairs = _pairs(cells, method, column)
    if not pairs:
        return ""
    ratio = _mean_ratio(pairs, text)
    losses = [[row.get("losses", {}).get(text) for row in rows] for rows in zip(*pairs, strict=True)]
    if None in [*losses[0], *losses[1]]:
        return _shown(ratio)
    ours, theirs = (torch.tensor(each, dtype=torch.float64).mean(0) for each in losses)
    interval = ratio_interval(theirs, ours, torch.ones(len(ours), dtype=torch.float64))
    return _shown(ratio) + (f" [{_shown(interval[0])}, {_shown(interval[1])}]" if interval else "")


def _pairs(cells: Cells, method: str, column: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The rows of a method and of the reference, for the draws that both have."""
    own, other = ({row["seed"]: row for row in cells.get((name, column), [])} for name in (method, REFERENCE))
    return [(own[seed], other[seed]) for seed in sorted(own.keys() & other.keys())]


def _mean_ratio(pairs: Iterable[tuple[dict[str, Any], dict[str, Any]]], text: str) -> float:
    return geometric_mean([own["perplexity"][text] / other["perplexity"][text] for own, other in pairs])


def _divergence(rows: list[dict[str, Any]], text: str) -> str:
    if not rows or text not in rows[0].get("kl", {}):
        return ""
    kl, agreement = (statistics.fmean(row[name][text] for row in rows) for name in ("kl", "agreement"))
    return f"{kl:.2f}, {agreement:.0%}"


def spread_table(results: dict[str, Any]) -> str:
    """Means of several draws, and how far these lie apart, if there are several: the largest over the smallest."""
    cells = cells_of(results)
    columns = columns_of(cells)
    (text, dense), *_ = results["dense"].items()
    has_spread = any(len(found) > 1 for found in cells.values())
    lines = [
        f"| {text}: perplexity{' (largest / smallest draw)' * has_spread} | {' | '.join(map(column_title, columns))} |",
        "|---|" + "---:|" * len(columns),
        f"| dense | {' | '.join([format(dense, '.2f')] * len(columns))} |",
    ]
    means = {key: mean_of(found, text) for key, found in cells.items()}
    best = {c: min(means[method, c] for method in _methods(cells) if (method, c) in means) for c in columns}
    for method in _methods(cells):
        shown = []
        for column in columns:
            values = [row["perplexity"][text] for row in cells.get((method, column), [])]
            cell = _shown(means[method, column]) if values else ""
            cell += f" ({max(values) / min(values):.3f})" if len(values) > 1 else ""
            shown.append(f"**{cell}**" if values and means[method, column] == best[column] else cell)
        lines.append(f"| {method} | {' | '.join(shown)} |")
    return "\n".join([*lines, "", _protocol(results, cells, _methods(cells))])


def rule_table(results: dict[str, Any]) -> str:
    """The published rule at the sparsity that it comes to, and the others at that sparsity."""
    cells = cells_of(results)
    texts = list(results["dense"])
    lines = [f"| candidates | it prunes | | {' | '.join(texts)} |", "|---:|---:|---|" + "---:|" * len(texts)]
    for column in SHOWN_COLUMNS:
        for method in RULE_ROWS:
            for row in cells.get((method, column), []):
                asked, came = (column_title(column), row["zeros"] / row["weights"]) if method == RULE else ("", None)
                values = " | ".join(_shown(row["perplexity"][text]) for text in texts)
                reached = f"{came:.2%}" if came is not None else ""
                lines.append(f"| {asked} | {reached} | {method.removesuffix(AS_SPARSE)} | {values} |")
    return "\n".join([*lines, "", _protocol(results, cells, RULE_ROWS)])


def price_table(results: dict[str, Any]) -> str:
    """What the methods take: at 60%, and in groups where they are for groups."""
    cells = cells_of(results)
    lines = [
        "| method | passes forward, backward | seconds at 60% | seconds at 2:4 | peak memory |",
        "|---|---|---:|---:|---:|",
    ]
    for method in _methods(cells):
        rows = {column: cells[method, column][0] for column in PRICED_COLUMNS if (method, column) in cells}
        if not rows:
            continue
        first = next(iter(rows.values()))
        passes = f"{first['passes']['forward']:g}, {first['passes']['backward']:g}" if first["passes"] else ""
        seconds = [f"{rows[column]['seconds']:.0f}" if column in rows else "" for column in ("0.6", "2:4")]
        peak = max(row["peak_bytes"] or 0 for row in rows.values())
        lines.append(f"| {method} | {passes} | {' | '.join(seconds)} | {peak / 1e6:,.0f} MB |")
    whose = (
        "a process that makes this row alone" if _are_alone(results) else "the whole process, with what the rows share"
    )
    note = f"Passes over the calibration text. Memory of {whose}, the model among it; on a machine with 2 cores."
    return "\n".join([*lines, "", f"{note} Made by {_command(results)}."])


def variants_table(results: dict[str, Any]) -> str:
    """Ways to decide that differ from the default in one option, on every text."""
    cells = cells_of(results)
    columns = columns_of(cells)
    texts = list(results["dense"])
    lines = [f"| {' / '.join(texts)} | {' | '.join(map(column_title, columns))} |", "|---|" + "---:|" * len(columns)]
    for method in _methods(cells):
        shown = []
        for column in columns:
            found = cells.get((method, column), [])
            shown.append(" / ".join(_shown(mean_of(found, text)) for text in texts) if found else "")
        lines.append(f"| {method} | {' | '.join(shown)} |")
    return "\n".join([*lines, "", _protocol(results, cells, _methods(cells))])


def column_title(column: str) -> str:
    return column if ":" in column else f"{float(column):.0%}"


def columns_of(cells: Cells) -> list[str]:
    return [column for column in SHOWN_COLUMNS if any(c == column for _, c in cells)]


def cells_of(results: dict[str, Any]) -> Cells:
    """The rows by method and column, one for each seed.

    Raises:
        ValueError: several commits made them, and nobody said that they may stand in one table.
    """
    commits = commits_of(results)
    if len(commits) > 1 and not results.get("mixed"):
        raise ValueError(f"cells of several commits, {', '.join(commits)}: make them again with --fresh.")
    cells: Cells = {}
    for row in results["rows"]:
        cells.setdefault((row["method"], row["column"]), []).append(row)
    return cells


def even(results: dict[str, Any], methods: Iterable[str] = ()) -> dict[str, Any]:
    """The results with only those draws of each column that all of its rows have: means of others do not compare.

    Args:
        methods: whose rows are looked at; default: all.
    """
    wanted = set(methods) or {row["method"] for row in results["rows"]}
    seeds: dict[str, dict[str, set[int]]] = {}
    for row in results["rows"]:
        if row["method"] in wanted:
            seeds.setdefault(row["column"], {}).setdefault(row["method"], set()).add(row["seed"])
    common = {column: set.intersection(*found.values()) for column, found in seeds.items()}
    rows = [row for row in results["rows"] if row["seed"] in common.get(row["column"], {row["seed"]})]
    return {**results, "rows": rows}


def _methods(cells: Cells) -> list[str]:
    """Those that have the sparsity of their column, in the benchmark's order."""
    found = {method for method, _ in cells if method not in RULE_ROWS}
    known = [*METHODS, *PEERS, *VARIANTS, *ACCUMULATORS]
    return sorted(found, key=known.index)


def mean_of(rows: list[dict[str, Any]], text: str) -> float:
    """The geometric mean over the seeds."""
    return geometric_mean([row["perplexity"][text] for row in rows])


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def _protocol(results: dict[str, Any], cells: Cells, methods: Iterable[str]) -> str:
    """How it was measured, and how far apart the zeros are that these methods made of a column."""
    zeros: dict[tuple[str, int], list[float]] = {}
    theirs: dict[tuple[str, int], list[float]] = {}
    for method, column in cells:
        for row in cells[method, column] if method in methods else ():
            shares = theirs if method in PEERS else zeros
            shares.setdefault((column, row["seed"]), []).append(row["zeros"] / row["weights"])
    apart = max((max(found) - min(found) for found in zeros.values()), default=0.0)
    if apart < NEGLIGIBLE:
        alike = "; every column has one number of zeros"
        # One that was zero already may be kept, too.
        alike += f", to {max(apart, 1e-7):.5%} of the weights" if apart else ""
    else:
        alike = f"; numbers of zeros that are compared are up to {apart:.3%} of the weights apart"
    rounded = [
        f"{column_title(column)} is {_range(found)}"
        for (column, _), found in sorted(zeros.items())
        if ":" not in column and NEGLIGIBLE < abs(found[0] - float(column)) < ROUNDED
    ]
    if rounded:
        alike += f" (as many as Wanda, which rounds its budget in every row: {', '.join(dict.fromkeys(rounded))})"
    off = max((abs(one - zeros[key][0]) for key, found in theirs.items() for one in found if key in zeros), default=0.0)
    if off:
        alike += f"; llm-compressor's are up to {off:.2%} of the weights off"
    return f"{_setting(results)}{alike}{_mixture(results)}. Made by {_command(results)}."


def _command(results: dict[str, Any]) -> str:
    """What makes the results, and the code that made them: a target is called as its file is."""
    commits = commits_of(results)
    at = f" at {commits[0]}" if len(commits) == 1 and commits != [UNNOTED] else ""
    return f"`make bench-{results['made_by']}`{at}"


def _text_of(results: dict[str, Any]) -> str:
    """The calibration text's name, without the windows."""
    return str(results["settings"]["calibration"]).rpartition(" of ")[2]


def _are_alone(results: dict[str, Any]) -> bool:
    """Whether every cell was made in a process of its own: those are that note their commit, and the work of others."""
    return all(row.get("commit") or row["method"] in PEERS for row in results["rows"])


def _made_in(settings: Mapping[str, Any]) -> str:
    """
    >>> _made_in({"dtype": "bfloat16", "device": "NVIDIA H100 80GB HBM3"})
    'bfloat16 on one NVIDIA H100 80GB HBM3'
    """
    return settings["dtype"] + (f" on one {settings['device']}" if "device" in settings else "")


def commits_of(results: dict[str, Any]) -> list[str]:
    """Of the code that made the cells; files that are older than this note of it have cells without."""
    return sorted({row.get("commit") or UNNOTED for row in results["rows"]})


def _range(shares: Sequence[float]) -> str:
    """
    >>> _range([0.6006, 0.6006]), _range([0.70119, 0.70149])
    ('60.06%', '70.12 to 70.15%')
    """
    low, high = min(shares), max(shares)
    return f"{low:.2%}" if high - low < NEGLIGIBLE else f"{100 * low:.2f} to {high:.2%}"


def _mixture(results: dict[str, Any]) -> str:
    commits = commits_of(results)
    return f"; cells of several commits ({', '.join(commits)})" * (len(commits) > 1)


def _setting(results: dict[str, Any]) -> str:
    """The model, and the texts it was calibrated and measured on."""
    settings = results["settings"]
    measured = ", ".join(f"{found['text']} of {name}" for name, found in settings["evaluation"].items())
    return (
        f"{settings['model']}, {_made_in(settings)}; calibration {settings['calibration']}, {_draws(results)}; "
        f"evaluation {measured}"
    )


def _draws(results: dict[str, Any]) -> str:
    """How many draws of the calibration windows the rows are means of, where they do not all have the same."""
    found = cells_of(results)
    by_column = {column: {len(rows) for (_, c), rows in found.items() if c == column} for _, column in found}
    if all(len(counts) == 1 for counts in by_column.values()):
        return _draws_by_column({column: next(iter(counts)) for column, counts in by_column.items()})
    counts = {method: max(len(rows) for (name, _), rows in found.items() if name == method) for method, _ in found}
    most, several = max(counts.values()), [method for method, count in counts.items() if count > 1]
    if len(several) == len(counts):
        return f"up to {most} draws"
    return f"1 draw, {most} draws of {', '.join(several)}"


def _draws_by_column(counts: dict[str, int]) -> str:
    """How many draws most columns have, and which have others.

    >>> _draws_by_column({"0.5": 1, "0.6": 3, "2:4": 2})
    '1 draw (3 at 60%, 2 at 2:4)'
    >>> _draws_by_column({"0.5": 1, "0.6": 2, "2:4": 2})
    '2 draws (1 at 50%)'
    """
    numbers = sorted(counts.values())
    most = max(numbers, key=numbers.count)
    others = [column for column in SHOWN_COLUMNS if counts.get(column, most) != most]
    shown = ", ".join(f"{counts[column]} at {column_title(column)}" for column in others)
    return f"{most} draw{'s' * (most > 1)}" + f" ({shown})" * bool(others)


def _quality_cell(cells: Cells, text: str, method: str, column: str, best: float) -> str:
    if (method, column) not in cells:
        return ""
    value = mean_of(cells[method, column], text)
    shown = _shown(value)
    if value < BROKEN and (pairs := _pairs(cells, method, column)):
        shown += f" ({_shown(_mean_ratio(pairs, text))})"
    return f"**{shown}**" if value == best else shown


def _shown(value: float) -> str:
    """Two decimals; none of thousands, and of a model that is broken beyond them the order of magnitude.

    >>> [_shown(value) for value in (31.908, 3094.6, 68_994_933.6)]
    ['31.91', '3,095', '6.9e+07']
    """
    return f"{value:.2f}" if value < THOUSANDS else f"{value:,.0f}" if value < BROKEN else f"{value:.1e}"
