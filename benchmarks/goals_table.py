"""What was aimed at with trained blocks and recovery, beside what came: results -> Markdown."""

from __future__ import annotations

from typing import Any

from benchmarks.quality_tables import REFERENCE, cells_of, column_title

# Ratios to SparseGPT's perplexity on WikiText-2 and on pydoc, set before anything of this was built.
BLOCKS = {"0.5": (0.76, 0.66), "0.6": (0.54, 0.33), "0.7": (0.34, 0.16), "2:4": (0.66, 0.66), "4:8": (0.72, 0.75)}
BOTH = {"0.5": (0.70, 0.62), "0.6": (0.46, 0.28), "0.7": (0.27, 0.13), "2:4": (0.55, 0.58), "4:8": (0.62, 0.66)}
ROWS = (  # what a row shows: a goal, or a method of the benchmark
    ("goal: one probe + admm + blocks", BLOCKS),
    ("one probe + admm + blocks", "one probe + admm + blocks"),
    ("goal: + blocks + recovery, at most 2M tokens", BOTH),
    ("one probe + admm + recovery, 0.41M tokens", "one probe + admm + recovery"),
    ("one probe + admm + blocks + recovery, 0.41M tokens", "one probe + admm + blocks + recovery"),
    ("one probe + admm + blocks + recovery, 2M tokens", "one probe + admm + blocks + recovery, 488 steps"),
)


def goals_table(results: dict[str, Any]) -> str:
    """Ratios with three digits: some goals are missed, or met, by less than a hundredth."""
    cells, texts = cells_of(results), list(results["dense"])
    lines = [
        f"| ratio to SparseGPT, {' / '.join(texts)} | {' | '.join(map(column_title, BLOCKS))} |",
        "|---|" + "---:|" * len(BLOCKS),
    ]
    for title, row in ROWS:
        shown = []
        for column in BLOCKS:
            if isinstance(row, dict):
                shown.append(" / ".join(f"{goal:.2f}" for goal in row[column]))
                continue
            own, other = ({cell["seed"]: cell for cell in cells.get((name, column), [])} for name in (row, REFERENCE))
            pairs = [(own[seed], other[seed]) for seed in own if seed in other]
            ratios = [f"{mine['perplexity'][t] / theirs['perplexity'][t]:.3f}" for mine, theirs in pairs for t in texts]
            shown.append(" / ".join(ratios))
        lines.append(f"| {title} | {' | '.join(shown)} |")
    return "\n".join(lines)
