"""Draw docs/quality.png, the picture of the method page, from the results calibrated on C4.

The picture carries a digest of what it shows, so that `--check` can tell whether it is of these results.

usage: python -m benchmarks.picture [--check]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator
from PIL import Image

from benchmarks.quality_tables import SHOWN_COLUMNS, cells_of, column_title, mean_of
from benchmarks.readme_table import results_of
from gradprobe_hf.report.colors import INK, MUTED

PICTURE = Path(__file__).parent.parent / "docs" / "quality.png"
DIGEST = "Source"  # a keyword that PNG's specification defines
# method -> colour, marker: what is published in grey, what this package decides in blue, with new weights in orange
STYLES = {
    "wanda": ("#b8c0c8", "v"),
    "sparsegpt": ("#616e7c", "s"),
    "sparsegpt + admm": ("#7a5195", "D"),
    "two probes": ("#2f6f9f", "o"),
    "one probe + admm": ("#dd6b20", "o"),
}
TICKS = (15, 20, 30, 40, 60, 80, 120, 160, 240, 320, 480, 640)


def shown(results: dict[str, Any]) -> dict[str, Any]:
    """The values in the picture, those of the table: text -> method -> column -> perplexity; and the dense model's."""
    cells = cells_of(results)
    return {
        text: {
            "dense": dense,
            "methods": {
                method: {c: mean_of(cells[method, c], text) for c in SHOWN_COLUMNS if (method, c) in cells}
                for method in STYLES
                if any((method, column) in cells for column in SHOWN_COLUMNS)
            },
        }
        for text, dense in results["dense"].items()
    }


def digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def figure(values: dict[str, Any]) -> Figure:
    """A panel for each text: columns from left to right, perplexity on a logarithmic axis."""
    made = Figure(figsize=(9.0, 3.9), layout="constrained")
    panels = made.subplots(1, len(values), squeeze=False)[0]
    columns = [c for c in SHOWN_COLUMNS if any(c in m for v in values.values() for m in v["methods"].values())]
    for axes, (text, found) in zip(panels, values.items(), strict=True):
        for method, perplexities in found["methods"].items():
            color, marker = STYLES[method]
            places = [columns.index(column) for column in perplexities]
            axes.plot(places, list(perplexities.values()), marker, color=color, markersize=7, label=method)
            for kind in (False, True):  # a line joins sparsities, and patterns, but not one with the other
                joined = [place for place in places if (":" in columns[place]) == kind]
                axes.plot(joined, [perplexities[columns[place]] for place in joined], color=color, linewidth=1.2)
        axes.axhline(found["dense"], color=INK, linewidth=1, linestyle=":")
        axes.annotate(f"dense {found['dense']:.1f}", (len(columns) - 1, found["dense"]), xytext=(20, 4),
                      textcoords="offset points", ha="right", color=INK, fontsize=8)  # fmt: skip
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(FixedLocator(TICKS))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:.0f}")
        axes.set_xticks(range(len(columns)), [column_title(column) for column in columns])
        axes.set_xlim(-0.4, len(columns) - 0.6)
        axes.set_title(text, loc="left", color=INK, fontsize=11)
        axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
        axes.tick_params(colors=MUTED, length=0)
        axes.spines[:].set_visible(False)
    panels[0].set_ylabel("perplexity, lower is better", color=MUTED)
    handles, labels = panels[0].get_legend_handles_labels()
    made.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    results = results_of(("c4",))
    assert results is not None, "it is in the repository"
    values = shown(results)
    if not parser.parse_args().check:
        made = figure(values)
        FigureCanvasAgg(made)
        made.savefig(PICTURE, dpi=144, metadata={DIGEST: digest(values)})
    elif Image.open(PICTURE).info.get(DIGEST) != digest(values):
        sys.exit(f"docs/{PICTURE.name} is not what benchmarks/results say; run `make table`")


if __name__ == "__main__":
    main()
