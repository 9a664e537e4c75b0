"""The picture of loss against speed, of the dense model and shapes of it. Args: speed, as in `speed.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gradprobe_hf.report.colors import DENSE, INK, MUTED, PRUNED
from gradprobe_hf.report.report import Report
from gradprobe_hf.report.speed import times_as_fast
from gradprobe_hf.structures.table import shape_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Point = tuple[str, float, float]  # name, times as fast as the dense model, loss


def tried_shapes(report: Report) -> list[Point]:
    """The model that was pruned and the shapes that were tried for a budget, the one that was taken first."""
    assert report.speed is not None, "asked for where there is one"
    assert report.structure is not None, "it has shapes"
    dense, *rows = report.speed["rows"]
    losses = {shape_words(one["removed"]): one["loss"] for one in report.structure["candidates"]}
    shown = [(dense, report.structure["dense_loss"]), *((row, losses[row["model"]]) for row in rows)]
    names = {"dense": report.made_of.column}
    return [
        (names.get(row["model"], row["model"]), times_as_fast(report.speed, row), loss)
        for row, loss in shown
        if loss is not None
    ]


def compared_shapes(
    rows: Sequence[Mapping[str, Any]], dense: Mapping[str, Any], speed: Mapping[str, Any], key: str
) -> list[Point]:
    """The dense model and the rows of a comparison, the best of them first; zeros are as fast as the dense model."""
    faster = {row["model"]: times_as_fast(speed, row) for row in speed["rows"]}
    drawn = [row for row in rows if row[key] is not None]  # an infinite one is nowhere
    found = [(row["method"], faster[shape_words(row["removed"]) or "dense"], row[key]) for row in drawn]
    return [("dense", 1.0, dense[key]), *sorted(found, key=lambda point: point[2])]


def speed_figure(points: Sequence[Point], measured: str) -> Figure:
    """Loss against speed: down and to the right is better.

    Args:
        points: name, times as fast as the dense model, and loss; the dense model first, then what is marked.
        measured: what the loss is.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.2 + 0.2 * len(points)), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, speed, loss) in enumerate(points):
        if not math.isfinite(loss):
            continue
        color, label = {0: INK, 1: PRUNED}.get(number, DENSE), f"{number or ''} {name}".strip()
        axes.scatter([speed], [loss], color=color, s=36, zorder=2, label=label)
        # Names are long, and points near one another: below, and here a number.
        axes.annotate(str(number or ""), (speed, loss), xytext=(6, 3), textcoords="offset points", fontsize=8)
    figure.legend(loc="outside lower left", fontsize=8, frameon=False)
    axes.margins(x=0.12, y=0.12)
    axes.set_title("Loss against speed, down and right is better", loc="left", color=INK, fontsize=11)
    axes.set_xlabel(f"speed of a text, {points[0][0]} = 1", color=MUTED, fontsize=8)
    axes.set_ylabel(measured, color=MUTED, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
