"""Whole structures: what is left of the perplexity, the parameters and the time of a pass.

    make bench-structured      # the model of 15M, TinyStories; benchmarks/results/structured.json

Each row is a whole run, saved, loaded again by transformers alone and timed beside the dense model; rows that the file
has are not made again.

usage: python -m benchmarks.structured --model DIR --calibration SPEC --evaluation SPEC [--rows NAME ...]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.resumed_rows import made_rows, row_parser, texts_of, windows_of
from gradprobe_hf import GradProbeConfig, prune_pretrained
from gradprobe_hf.structures.unit_scores import UNIT_SCORES

RESULTS = Path(__file__).parent / "results"
OBS = {"importance": "obs"}
ROWS: dict[str, dict[str, Any]] = {
    "ffn 1/3": {**OBS, "structure": {"ffn": 1 / 3}},
    "ffn 1/3, no update": {**OBS, "structure": {"ffn": 1 / 3}, "update": "none"},
    "ffn 1/3, block matching": {**OBS, "structure": {"ffn": 1 / 3}, "refinement": "blocks"},
    "kv_groups 2": {**OBS, "structure": {"kv_groups": 2}},
    "kv_groups 2, no update": {**OBS, "structure": {"kv_groups": 2}, "update": "none"},
    "blocks 1": {"structure": {"blocks": 1}},
    "blocks 1, no update": {"structure": {"blocks": 1}, "update": "none"},
    "ffn 1/3, blocks 1": {**OBS, "structure": {"ffn": 1 / 3, "blocks": 1}},
}
# The ways to tell which units go, each with and without an update; that of OBS has its rows above.
ROWS |= {
    f"{what}, {importance}{', no update' if update == 'none' else ''}": {
        "structure": structure,
        "importance": importance,
        "update": update,
    }
    for importance in UNIT_SCORES
    if importance != "obs"
    for what, structure in (("ffn 1/3", {"ffn": 1 / 3}), ("kv_groups 2", {"kv_groups": 2}))
    for update in ("least_squares", "none")
}
TOKENS, REPEATS = 256, 11  # of a timed pass, and how many of them


def row(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Perplexity, parameters and bytes of one structure, and the seconds of a pass beside the dense model's."""
    # One damping for all rows: they differ in nothing but what they are named after.
    config = GradProbeConfig(damping=0.01, **ROWS[name], **windows_of(args))
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "smaller"
        result = prune_pretrained(
            args.model, config, **texts_of(args), output_dir=made, dtype="float32", progress=False
        )
        seconds = time.perf_counter() - start
        size = sum(file.stat().st_size for file in made.glob("*.safetensors"))
        models = [AutoModelForCausalLM.from_pretrained(one, dtype="float32").eval() for one in (args.model, made)]
        passes = [pass_seconds(models) for _ in range(REPEATS)]
    report = result.report
    measured, structure = report.evaluation, report.structure
    assert measured is not None, "there is a text"
    assert structure is not None, "every row has one"
    return {
        "row": name,
        "perplexity": measured["pruned"]["perplexity"],
        "dense": measured["dense"]["perplexity"],
        "kl": measured["divergence"]["kl"],
        "shapes": structure["after"],
        "parameters": structure["parameters"],
        "bytes": size,
        "pass_seconds": [statistics.median(each) for each in zip(*passes, strict=True)],
        "seconds": round(seconds, 1),
    }


@torch.no_grad()
def pass_seconds(models: list[PreTrainedModel]) -> list[float]:
    """Of one pass of each, one after the other, so that what else the machine does meets all of them."""
    ids, found = torch.arange(TOKENS)[None], []
    for model in models:
        start = time.perf_counter()
        model(input_ids=ids, use_cache=False)
        found.append(time.perf_counter() - start)
    return found


def main() -> None:
    args = row_parser(__doc__, list(ROWS), RESULTS / "structured.json").parse_args()
    show(made_rows(args, row)["rows"])


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("", "perplexity", "dense", "KL", "parameters", "MB", "pass / dense", "seconds")
    for made in rows:
        dense, smaller = made["pass_seconds"]
        table.add_row(
            made["row"],
            f"{made['perplexity']:.2f}",
            f"{made['dense']:.2f}",
            f"{made['kl']:.3f}",
            f"{made['parameters']['after']:,}",
            f"{made['bytes'] / 1e6:.1f}",
            f"{smaller / dense:.2f}",
            f"{made['seconds']:.0f}",
        )
    Console(soft_wrap=True, markup=False).print(table)


if __name__ == "__main__":
    main()
