"""Options of whole structures: damping that is chosen on held-out batches, and gates that are measured anew in rounds.

    make bench-structure-options      # the model of 15M, TinyStories; benchmarks/results/structure_options.json

Rows that the file has are not made again.

usage: python -m benchmarks.structure_options --model DIR --calibration SPEC --evaluation SPEC [--rows NAME ...]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.resumed_rows import made_rows, row_parser, texts_of, windows_of
from gradprobe_hf import GradProbeConfig, prune_pretrained

RESULTS = Path(__file__).parent / "results"
ROWS: dict[str, dict[str, Any]] = {
    f"ffn 256, {windows} windows, damping {damping}": {
        "structure": {"ffn": 256},
        "importance": "obs",
        "num_samples": windows,
        "damping": damping,
    }
    for windows in (8, 32)
    for damping in (0.01, 0.1, "auto")
}
ROWS |= {
    f"{structure} {count}, fisher in {rounds}": {
        "structure": {structure: count},
        "importance": "fisher",
        "structure_rounds": rounds,
        "damping": 0.01,
    }
    for structure, count in (("ffn", 256), ("kv_groups", 2))
    for rounds in (1, 4)
}


def row(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """The perplexity of one configuration."""
    config = GradProbeConfig(**windows_of(args) | ROWS[name])
    start = time.perf_counter()
    result = prune_pretrained(args.model, config, **texts_of(args), apply=False, dtype="float32", progress=False)
    measured = result.report.evaluation
    assert measured is not None, "there is a text"
    return {
        "row": name,
        "perplexity": measured["pruned"]["perplexity"],
        "dense": measured["dense"]["perplexity"],
        "kl": measured["divergence"]["kl"],
        "passes": result.report.passes,
        "seconds": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    args = row_parser(__doc__, list(ROWS), RESULTS / "structure_options.json").parse_args()
    table = Table("row", "perplexity", "KL from dense (nats)", "passes")
    for made in made_rows(args, row)["rows"]:
        passes = ", ".join(f"{count:g} {kind}" for kind, count in made["passes"].items())
        table.add_row(made["row"], f"{made['perplexity']:.2f}", f"{made['kl']:.3f}", passes)
    Console(soft_wrap=True, markup=False).print(table)


if __name__ == "__main__":
    main()
