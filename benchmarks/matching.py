"""Block matching with other settings than its own, on a text that nothing is reported on.

    make bench-matching        # the model of 15M, TinyStories; benchmarks/results/matching.json

Each row is a whole run of one probe, ADMM and block matching; rows that the file has are not made again.

usage: python -m benchmarks.matching --model DIR --calibration SPEC --evaluation SPEC [--rows NAME ...]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from torch import Tensor

from benchmarks.resumed_rows import made_rows, row_parser, texts_of, windows_of
from gradprobe_hf import GradProbeConfig, prune_pretrained
from gradprobe_hf.model.targets import Target, block_vectors
from gradprobe_hf.reconstruction import reconstruct
from gradprobe_hf.reconstruction.block_matching import Matched, Matching, match_block
from gradprobe_hf.updates.refinement import REFINEMENTS

RESULTS = Path(__file__).parent / "results"
OWN = REFINEMENTS["blocks"]
SETTINGS: dict[str, dict[str, Any]] = {
    "own": {},
    "rate 0.0025": {"rate": OWN.rate / 4},
    "rate 0.005": {"rate": OWN.rate / 2},
    "rate 0.02": {"rate": OWN.rate * 2},
    "8 windows a step": {"windows": 8},
    "2 windows a step": {"windows": 2},
    "outputs as pruned so far": {"dense_target": 0.0},
    "outputs of the dense model": {"dense_target": 1.0},
    "4 epochs": {"epochs": 4},
    "16 epochs": {"epochs": 16},
}
NONE, TWICE, OWN_TEXT = "no block matching", "twice the windows", "as many windows of its own text besides"
PARTS = "attention, then MLP"


def one_after_the_other(
    task: Matching, values: Mapping[str, Tensor], masks: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor], Matched]:
    """As `match_block`, in two trainings: attention while the MLP is still dense, and the MLP behind that attention."""
    parts: list[list[Target]] = [[], []]
    for target in task.matrices:
        parts["mlp" in target.role].append(target)
    new, new_vectors, how = dict[str, Tensor](), dict[str, Tensor](), list[Matched]()
    with ExitStack() as undo:
        for part in parts:
            names = [target.name for target in part]
            found, vectors, matched = match_block(
                replace(task, matrices=part),
                {name: values[name] for name in names},
                {name: masks[name] for name in names},
            )
            how.append(matched)
            new, new_vectors = new | found, new_vectors | vectors
            for target in (*part, *block_vectors(task.model, task.block)):
                if (value := found.get(target.name, vectors.get(target.name))) is not None:
                    matrix = target.matrix(task.model).detach()
                    undo.callback(matrix.copy_, matrix.clone())
                    matrix.copy_(value)
    first, last = how
    return new, new_vectors, Matched(first.before, last.after, first.epochs + last.epochs, last.kept)


def row(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Perplexity of one setting, and what it took."""
    settings = replace(OWN, **SETTINGS.get(name, {}))
    REFINEMENTS["blocks"] = settings
    windows, texts = windows_of(args), texts_of(args)
    if name in (TWICE, OWN_TEXT):
        windows["num_samples"] *= 2
    config = GradProbeConfig(
        sparsity=args.sparsity,
        probes=1,
        update="admm",
        refinement="none" if name == NONE else "blocks",
        **windows,
    )
    start = time.perf_counter()
    with TemporaryDirectory() as folder:
        if name == OWN_TEXT:  # a mixture is of names
            file = Path(folder) / "text.txt"
            file.write_text("".join(texts["calibration"]), encoding="utf-8")
            texts["calibration"] = {str(file): 1, "self": 1}
        with patch.object(reconstruct, "match_block", one_after_the_other if name == PARTS else match_block):
            result = prune_pretrained(args.model, config, **texts, apply=False, dtype="float32", progress=False)
    measured, found = result.report.evaluation, result.report.refinement.values()
    assert measured is not None, "there is a text"
    return {
        "row": name,
        "settings": {} if name == NONE else {key: asdict(settings)[key] for key in ("rate", "epochs", "windows")},
        "perplexity": measured["pruned"]["perplexity"],
        "dense": measured["dense"]["perplexity"],
        "kl": measured["divergence"]["kl"],
        "epochs": sum(block["epochs"] for block in found) / max(1, len(found)),
        "held_out": [sum(block[when] for block in found) / max(1, len(found)) for when in ("before", "after")],
        "seconds": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    parser = row_parser(__doc__, [NONE, *SETTINGS, TWICE, OWN_TEXT, PARTS], RESULTS / "matching.json")
    parser.add_argument("--sparsity", type=float, default=0.6)
    print(matching_table(made_rows(parser.parse_args(), row)))


def matching_table(results: dict[str, Any]) -> str:
    """Perplexity, divergence and error of each row."""
    rows, settings = results["rows"], results["settings"]
    lines = [
        "| | perplexity | KL | error on windows held out | epochs made |",
        "|---|---:|---:|---:|---:|",
    ]
    for made in rows:
        before, after = made["held_out"]
        error = f"{before:.4f} → {after:.4f}" if after else ""
        cells = (
            "as it is" if made["row"] == "own" else made["row"],
            f"{made['perplexity']:.2f}",
            f"{made['kl']:.3f}",
            error,
            f"{made['epochs']:.1f}" if error else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    note = (
        f"{settings['model']} in float32, {settings['sparsity']:.0%}, one probe and ADMM; calibration "
        f"{settings['num_samples']} x {settings['sequence_length']} of {settings['calibration']}, evaluation "
        f"{settings['evaluation_samples']} x {settings['sequence_length']} of {settings['evaluation']}, 1 draw; dense "
        f"{rows[0]['dense']:.2f}. Made by `make bench-matching`."
    )
    return "\n".join([*lines, "", note])


if __name__ == "__main__":
    main()
