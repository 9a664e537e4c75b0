"""The pictures of a report: where the zeros are, and what they cost. Drawn without touching pyplot's global state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gradprobe_hf.report.report import Report

# Imported where it draws: a run without pictures does not pay for it.
if TYPE_CHECKING:
    from matplotlib.figure import Figure

DENSE, PRUNED, INK, MUTED = "#9aa5b1", "#2f6f9f", "#1f2933", "#616e7c"


def save_plots(report: Report, directory: Path) -> list[Path]:
    """Write the PNG files that the card shows; returns their paths."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    directory.mkdir(parents=True, exist_ok=True)
    figures = {"sparsity.png": sparsity_figure(report)}
    if has_perplexities(report):
        figures["perplexity.png"] = perplexity_figure(report)
    paths = []
    for name, figure in figures.items():
        FigureCanvasAgg(figure)
        figure.savefig(directory / name, dpi=144)
        paths.append(directory / name)
    return paths


def has_perplexities(report: Report) -> bool:
    """Whether both perplexities were measured and can be drawn: an infinite one cannot."""
    measured = report.evaluation or {}
    values = [measured.get(name, {}).get("perplexity") for name in ("dense", "pruned")]
    return all(value is not None and math.isfinite(value) for value in values)


def sparsity_figure(report: Report) -> Figure:
    """A map of the sparsity: blocks from left to right, kinds of matrix from top to bottom."""
    blocks = list(dict.fromkeys(row.block for row in report.matrices))
    roles = list(dict.fromkeys(row.role for row in report.matrices))
    zeros, weights = np.zeros((2, len(roles), len(blocks)))
    for row in report.matrices:  # the experts of one kind share a cell
        cell = roles.index(row.role), blocks.index(row.block)
        zeros[cell] += row.zeros_after
        weights[cell] += row.weights
    grid = np.divide(zeros, weights, out=np.full_like(zeros, np.nan), where=weights > 0)
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(max(5.0, 0.24 * len(blocks) + 3.2), max(2.6, 0.32 * len(roles) + 1.5)), layout="constrained"
    )
    axes = figure.add_subplot()
    image = axes.imshow(grid, aspect="auto", cmap="Blues", vmin=0, vmax=1)
    axes.set_yticks(range(len(roles)), roles, fontsize=8)
    every = max(1, len(blocks) // 10)
    labels = [block.rsplit(".", 1)[-1] if block else "-" for block in blocks]
    axes.set_xticks(range(0, len(blocks), every), labels[::every], fontsize=8)
    axes.set_xlabel("block", color=MUTED)
    axes.set_title(f"Zeros in every matrix, {report.sparsity:.1%} in all", loc="left", color=INK, fontsize=11)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=axes, format=lambda x, _: f"{x:.0%}")
    bar.outline.set_visible(False)
    return figure


def perplexity_figure(report: Report) -> Figure:
    """Perplexity before and after, with what it was measured on."""
    assert report.evaluation is not None
    values = [report.evaluation[name]["perplexity"] for name in ("dense", "pruned")]
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0, 2.2), layout="constrained")
    axes = figure.add_subplot()
    bars = axes.barh(["dense", f"{report.sparsity:.0%} sparse"], values, color=[DENSE, PRUNED], height=0.6)
    axes.bar_label(bars, [f"{value:,.2f}" for value in values], padding=4, color=INK)
    axes.invert_yaxis()
    axes.set_xlim(0, max(values) * 1.18)
    axes.set_title("Perplexity, lower is better", loc="left", color=INK, fontsize=11)
    axes.set_xlabel(f"on {report.evaluation['source']}", color=MUTED, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def save_comparison(rows: Sequence[Mapping[str, Any]], dense: Mapping[str, Any], source: str, directory: Path) -> Path:
    """Write `comparison.png`; returns its path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = comparison_figure(rows, dense, source)
    FigureCanvasAgg(figure)
    path = directory / "comparison.png"
    figure.savefig(path, dpi=144)
    return path


def comparison_figure(rows: Sequence[Mapping[str, Any]], dense: Mapping[str, Any], source: str) -> Figure:
    """What each configuration left of the model, the best of them marked; on a logarithmic axis where they are far
    apart."""
    from matplotlib.figure import Figure

    key = "loss" if dense["perplexity"] is None else "perplexity"
    shown = [row for row in rows if row[key] is not None and math.isfinite(row[key])]
    values = [row[key] for row in shown]
    best = min(values, default=0.0)
    figure = Figure(figsize=(6.4, 0.42 * len(shown) + 1.3), layout="constrained")
    axes = figure.add_subplot()
    colors = [PRUNED if value == best else DENSE for value in values]
    bars = axes.barh([f"{row['method']}, {row['sparsity']:.0%}" for row in shown], values, color=colors, height=0.62)
    axes.bar_label(bars, [f"{value:,.2f}" for value in values], padding=4, color=INK, fontsize=9)
    axes.axvline(dense[key], color=INK, linewidth=1, linestyle=":")
    axes.annotate(
        f"dense {dense[key]:,.2f}",
        (dense[key], 0),
        xycoords=("data", "axes fraction"),
        xytext=(4, 3),
        textcoords="offset points",
        color=INK,
        fontsize=8,
    )
    axes.invert_yaxis()
    if values and max(values) > 10 * best:
        axes.set_xscale("log")
        axes.set_xlim(dense[key] * 0.8, max(values) * 2.2)
    else:
        axes.set_xlim(0, max(values, default=1.0) * 1.15)
    axes.set_title(f"{key.capitalize()}, lower is better", loc="left", color=INK, fontsize=11)
    axes.set_xlabel(f"on {source}", color=MUTED, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
