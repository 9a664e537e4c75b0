"""The table of `gradprobe bench`: a line for each measurement, a column for each model, its ratios beside it.

Where all models are wider than the terminal, there are several tables, each with the first model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from gradprobe_hf.bench.result import BenchResult, BenchRow, Timing
from gradprobe_hf.checkpoint.file_sizes import INSTALL
from gradprobe_hf.cli.output import console, table_of

_Shown = Callable[[Any], str]


def print_bench(found: BenchResult) -> None:
    out = console()
    for table in _tables(found, out):
        out.print(table)
    dtypes = ", ".join(dict.fromkeys(row.dtype for row in found.rows))
    out.print(
        f"{found.device}, {found.threads} threads, {dtypes}; medians of {found.repeats} rounds in which the models "
        "take turns, quartiles in brackets"
        + ("; x: times the first model's, the median over the rounds" if len(found.rows) > 1 else ""),
        style="dim",
    )
    if any(row.zstd_bytes is None and row.file_bytes is not None for row in found.rows):
        out.print(f"the size under zstd was not measured: {INSTALL}", style="dim")


def _tables(found: BenchResult, out: Console) -> list[Table]:
    """As few as fit, each with the first model; at least one other is in each."""
    others = range(1, len(found.rows))
    tables = [_table(found, [0])]
    unbounded = out.options.update(max_width=10_000)
    for count in range(len(others), 0, -1):
        tables = [_table(found, [0, *others[start : start + count]]) for start in range(0, len(others), count)]
        if all(Measurement.get(out, unbounded, table).maximum <= out.width for table in tables):
            break
    return tables


def _table(found: BenchResult, numbers: list[int]) -> Table:
    """Of some of the models."""
    labels = _labels([row.model for row in found.rows])
    first, *others = (labels[number] for number in numbers)
    table = table_of("", first, *(cell for label in others for cell in (label, "x")))
    for name, (title, shown) in _lines(found).items():
        if any(getattr(row, name) is not None for row in found.rows):
            table.add_row(title, *_cells([found.rows[number] for number in numbers], name, shown))
    return table


def _lines(found: BenchResult) -> dict[str, tuple[str, _Shown]]:
    return {
        "parameters": ("parameters", lambda value: f"{value:,}"),
        "file_bytes": ("file, MB", _megabytes),
        "zstd_bytes": ("file under zstd, MB", _megabytes),
        "hub_bytes": ("file as the Hub transfers it, MB", _megabytes),
        "peak_memory_bytes": ("peak memory, MB", _megabytes),
        "prefill_seconds": (f"{_reading(found)}, ms", _milliseconds),
        "first_token_seconds": ("time to first token, ms", _milliseconds),
        "tokens_per_second": ("tokens per second", _spread),
    }


def _reading(found: BenchResult) -> str:
    return "forward pass" if found.prompt_length is None else f"prefill of {found.prompt_length} tokens"


def _cells(rows: list[BenchRow], name: str, shown: _Shown) -> Iterator[str]:
    for number, row in enumerate(rows):
        value, ratio = getattr(row, name), row.ratios.get(name)
        yield "-" if value is None else shown(value)
        if number:
            yield "-" if ratio is None else f"{ratio:.2f}"


def _megabytes(value: int) -> str:
    return f"{value / 1e6:,.1f}"


def _milliseconds(timing: Timing) -> str:
    return _spread(timing, 1000)


def _spread(timing: Timing, scale: float = 1) -> str:
    low, high = (f"{scale * value:,.1f}" for value in timing.quartiles)
    return f"{scale * timing.median:,.1f} [{low}, {high}]"


def _labels(names: list[str]) -> list[str]:
    """Of paths the last part, where that tells them apart.

    >>> _labels(["my/runs/dense", "my/runs/smaller"]), _labels(["my/a/model", "my/b/model"])
    (['dense', 'smaller'], ['my/a/model', 'my/b/model'])
    """
    short = [Path(name).name for name in names]
    return short if len(set(short)) == len(set(names)) else names
