"""The pictures of a report: where the zeros are, and what they cost. Drawn without touching pyplot's global state."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gradprobe_hf.model.families import stack_of, tower_names
from gradprobe_hf.report.colors import ABSENT, DENSE, INK, MUTED, PRUNED
from gradprobe_hf.report.percent import percent
from gradprobe_hf.report.report import LeftOut, MatrixRow, Report
from gradprobe_hf.report.speed_figure import compared_shapes, speed_figure, tried_shapes

# Imported where it draws: a run without pictures does not pay for it.
if TYPE_CHECKING:
    from matplotlib.figure import Figure


@contextmanager
def _as_written() -> Iterator[None]:
    """What stands between two dollars is no formula: names of files and methods are the user's."""
    from matplotlib import rc_context

    with rc_context({"text.parse_math": False}):
        yield


@_as_written()
def save_plots(report: Report, directory: Path) -> list[Path]:
    """Write the PNG files that the card shows; returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    figures = {"sparsity.png": sparsity_figure(report)}
    if has_perplexities(report):
        figures["perplexity.png"] = perplexity_figure(report)
    if report.speed is not None and report.structure is not None and report.structure["candidates"]:
        measured = "loss on held-out calibration data" + ", nats" * report.in_nats
        figures["speed.png"] = speed_figure(tried_shapes(report), measured)
    return _save(figures, directory)


def _save(figures: Mapping[str, Figure], directory: Path) -> list[Path]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    for name, figure in figures.items():
        FigureCanvasAgg(figure)
        figure.savefig(directory / name, dpi=144)
    return [directory / name for name in figures]


def has_perplexities(report: Report) -> bool:
    """Whether both perplexities were measured and can be drawn: an infinite one cannot."""
    measured = report.evaluation or {}
    values = [measured.get(name, {}).get("perplexity") for name in ("dense", "pruned")]
    return all(value is not None and math.isfinite(value) for value in values)


@dataclass(frozen=True)
class SparsityGrid:
    """The cells of a map of the sparsity.

    Attributes:
        rows: kinds of matrix, of each tower of the model its own.
        columns: numbers of blocks in their tower, "-" for what lies outside of blocks.
        sparsity: `[rows, columns]`, a fraction; NaN where there is no target.
        left_out: bool `[rows, columns]`: a matrix is there that the calibration does not reach.
    """

    rows: list[str]
    columns: list[str]
    sparsity: np.ndarray
    left_out: np.ndarray


def sparsity_grid(report: Report) -> SparsityGrid:
    """Where each matrix stands on the map; the experts of one kind share a cell."""
    every: list[MatrixRow | LeftOut] = [*report.matrices, *report.unreached]
    towers = tower_names(list(dict.fromkeys(stack_of(one.block) for one in every if one.block))) | {"": ""}
    places = [
        (f"{towers[stack_of(one.block) if one.block else '']} {one.role}".strip(), one.block.rsplit(".", 1)[-1] or "-")
        for one in every
    ]
    rows = list(dict.fromkeys(row for row, _ in places))
    columns = sorted({column for _, column in places}, key=lambda name: (name == "-", len(name), name))
    zeros, weights, left_out = np.zeros((3, len(rows), len(columns)))
    for one, (row, column) in zip(every, places, strict=True):
        cell = rows.index(row), columns.index(column)
        if isinstance(one, LeftOut):
            left_out[cell] = True
            continue
        zeros[cell] += report.counted(one)
        weights[cell] += one.weights
    sparsity = np.divide(zeros, weights, out=np.full_like(zeros, np.nan), where=weights > 0)
    return SparsityGrid(rows, columns, sparsity, left_out.astype(bool))


def sparsity_figure(report: Report) -> Figure:
    """A map of the sparsity: blocks from left to right, kinds of matrix from top to bottom.

    A cell without a target is grey, one that was left out of the budget is hatched: neither looks like 0%.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    grid = sparsity_grid(report)
    figure = Figure(
        figsize=(max(5.0, 0.24 * len(grid.columns) + 3.2), max(2.6, 0.32 * len(grid.rows) + 1.5)), layout="constrained"
    )
    axes = figure.add_subplot()
    axes.set_facecolor(ABSENT)
    image = axes.imshow(grid.sparsity, aspect="auto", cmap="Blues", vmin=0, vmax=1)
    hatched: dict[str, Any] = {"facecolor": "white", "edgecolor": MUTED, "hatch": "////", "linewidth": 0}
    for row, column in np.argwhere(grid.left_out):
        axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, **hatched))
    axes.set_yticks(range(len(grid.rows)), grid.rows, fontsize=8)
    every = max(1, len(grid.columns) // 10)
    axes.set_xticks(range(0, len(grid.columns), every), grid.columns[::every], fontsize=8)
    axes.set_xlabel("block", color=MUTED)
    what = "Zeros in" if report.structure is None else "Gone of"
    share = sum(map(report.counted, report.matrices)) / report.weights
    of = "in all" if report.structure is None else "of their weights"
    axes.set_title(f"{what} every matrix, {share:.1%} {of}", loc="left", color=INK, fontsize=11)
    axes.spines[:].set_visible(False)
    keys = []
    if (np.isnan(grid.sparsity) & ~grid.left_out).any():
        keys.append(Patch(facecolor=ABSENT, label="no target"))
    if grid.left_out.any():
        keys.append(Patch(**hatched, label="not reached, left as it was"))
    if keys:
        figure.legend(handles=keys, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    bar = figure.colorbar(image, ax=axes, format=lambda x, _: f"{x:.0%}")
    bar.outline.set_visible(False)
    return figure


def perplexity_figure(report: Report) -> Figure:
    """Perplexity before and after, with what it was measured on."""
    assert report.evaluation is not None
    found = {name: report.evaluation[name]["perplexity"] for name in ("dense", "pruned")}
    bars_of = {report.beside.column: (found["dense"], DENSE)}
    pruned = f"{percent(report.sparsity)} sparse" if report.structure is None else "smaller"
    if (recovery := report.recovery) is None:
        bars_of[pruned] = (found["pruned"], PRUNED)
    else:
        if recovery["before"] is not None:
            bars_of[pruned] = (recovery["before"]["pruned"]["perplexity"], DENSE)
        bars_of[f"{pruned}, recovered"] = (found["pruned"], PRUNED)
    # A model that was recovered may have had none before.
    bars_of = {name: bar for name, bar in bars_of.items() if bar[0] is not None and math.isfinite(bar[0])}
    values = [value for value, _ in bars_of.values()]
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(5.0, 1.1 + 0.55 * len(values)), layout="constrained")
    axes = figure.add_subplot()
    bars = axes.barh([*bars_of], values, color=[color for _, color in bars_of.values()], height=0.6)
    axes.bar_label(bars, [f"{value:,.2f}" for value in values], padding=4, color=INK)
    axes.invert_yaxis()
    axes.set_xlim(0, max(values) * 1.18)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_title("Perplexity, lower is better", loc="left", color=INK, fontsize=11)
    axes.set_xlabel(f"on {report.evaluation['source']}", color=MUTED, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


@_as_written()
def save_comparison(
    rows: Sequence[Mapping[str, Any]],
    dense: Mapping[str, Any],
    source: str,
    directory: Path,
    speed: Mapping[str, Any] | None = None,
    original: str = "dense",
) -> list[Path]:
    """Write `comparison.png`, and `speed.png` where speed was measured; returns their paths.

    Args:
        original: what the model is called that was pruned.
    """
    figures = {"comparison.png": comparison_figure(rows, dense, source, original)}
    if speed is not None:
        key = _compared(dense)
        points = compared_shapes(rows, dense, speed, key)
        figures["speed.png"] = speed_figure([(original, *points[0][1:]), *points[1:]], f"{key} on {source}")
    return _save(figures, directory)


def _compared(dense: Mapping[str, Any]) -> str:
    """What a comparison is about."""
    return "loss" if dense["perplexity"] is None else "perplexity"


def _labelled(row: Mapping[str, Any]) -> str:
    """A row and how much of the blocks' weights it does without."""
    return f"{row['method']}, {percent(row['sparsity'])} {'gone' if row['removed'] else 'zero'}"


def comparison_figure(
    rows: Sequence[Mapping[str, Any]], dense: Mapping[str, Any], source: str, original: str = "dense"
) -> Figure:
    """What each configuration left of the model, the best of them marked; on a logarithmic axis where they are far
    apart."""
    from matplotlib.figure import Figure

    key = _compared(dense)
    shown = [row for row in rows if row[key] is not None and math.isfinite(row[key])]
    values = [row[key] for row in shown]
    best = min(values, default=0.0)
    figure = Figure(figsize=(6.4, 0.42 * len(shown) + 1.3), layout="constrained")
    axes = figure.add_subplot()
    colors = [PRUNED if value == best else DENSE for value in values]
    bars = axes.barh([*map(_labelled, shown)], values, color=colors, height=0.62)
    axes.bar_label(bars, [f"{value:,.2f}" for value in values], padding=4, color=INK, fontsize=9)
    axes.axvline(dense[key], color=INK, linewidth=1, linestyle=":")
    axes.annotate(
        f"{original} {dense[key]:,.2f}",
        (dense[key], 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, 3),
        textcoords="offset points",
        color=INK,
        fontsize=8,
        ha="center",
    )
    axes.invert_yaxis()
    if values and max(values) > 10 * best:
        axes.set_xscale("log")
        axes.set_xlim(dense[key] * 0.8, max(values) * 2.2)
    else:
        axes.set_xlim(0, max(values, default=1.0) * 1.15)
    axes.set_title(f"{key.capitalize()}, lower is better", loc="left", color=INK, fontsize=11, pad=16)
    axes.set_xlabel(f"on {source}", color=MUTED, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
