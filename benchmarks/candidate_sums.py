"""Whether a second probe should keep sums of the candidates alone, row-compressed: bytes, time, and what would change.

usage: python -m benchmarks.candidate_sums --model MODEL --calibration TEXT

Only a rule that reads nothing else of its second probe can do that to the same bits: `rule="threshold"`. What
`rule="budget"` would lose is how much of what goes was no candidate. Seconds are those that the processor worked.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradprobe_hf import GradProbeConfig, prune_pretrained
from gradprobe_hf.probe.accumulation.accumulators import BYTES_PER_WEIGHT

RESULT = Path(__file__).parent / "results" / "candidate_sums.json"
SHAPE, TOKENS, SPARSITY = (1536, 576), 512, 0.5
ROUNDS = 15


def no_candidates(model: str, calibration: str, sparsity: float) -> float:
    """Of the weights that two probes and a budget remove, the share that the first probe alone would keep."""
    masks = [_masks(model, calibration, sparsity, probes) for probes in (1, 2)]
    gone = sum(int(one.sum()) for one in masks[1].values())
    return sum(int((one & ~masks[0][name]).sum()) for name, one in masks[1].items()) / gone


def _masks(model: str, calibration: str, sparsity: float, probes: int) -> dict[str, Tensor]:
    config = GradProbeConfig(
        sparsity=sparsity, score="fisher", probes=probes, update="none", num_samples=16, sequence_length=256
    )
    found = prune_pretrained(model, config, calibration=calibration, evaluation=False, apply=False, progress=False)
    return {name: found.masks[name] for name in found.masks}


def fold_seconds() -> dict[str, list[float]]:
    """Of one batch in one matrix, in turns: its gradient; the largest so far in full; the same of candidates alone."""
    torch.manual_seed(0)
    inputs, gradients = torch.randn(TOKENS, SHAPE[1]), torch.randn(TOKENS, SHAPE[0])
    candidates = torch.rand(SHAPE) < SPARSITY
    found = gradients.T @ inputs
    full, kept = torch.zeros(SHAPE), torch.zeros(int(candidates.sum()))
    work: dict[str, Callable[[], Any]] = {
        "gradient": lambda: gradients.T @ inputs,
        "full": lambda: torch.maximum(full, found.abs(), out=full),
        "candidates": lambda: torch.maximum(kept, found[candidates].abs_(), out=kept),
    }
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(ROUNDS):
        for name, one in work.items():
            start = time.process_time()
            one()
            seconds[name].append(time.process_time() - start)
    assert torch.equal(full[candidates], kept)
    return seconds


def bytes_per_weight(sparsity: float) -> dict[str, dict[str, float]]:
    """Of both probes' sums and the packed candidates, which are there anyhow."""
    mask = 1 / 8
    return {
        kind: {"full": 2 * each + mask, "candidates": each + each * sparsity + mask}
        for kind, each in BYTES_PER_WEIGHT.items()
    }


def candidate_sums_table(results: dict[str, Any]) -> str:
    """For the page."""
    lines = ["| sums | bytes per weight, both probes in full | the second of candidates alone |", "|---|---:|---:|"]
    for kind, row in results["bytes_per_weight"].items():
        lines.append(f"| `{kind}` | {row['full']:.2f} | {row['candidates']:.2f} |")
    middle = {name: statistics.median(values) for name, values in results["seconds"].items()}
    lost = ", ".join(f"{share:.1%} at {float(sparsity):.0%}" for sparsity, share in results["no_candidates"].items())
    note = (
        f'`rule="threshold"` with {results["sparsity"]:.0%} candidates. To add a batch takes '
        f"{middle['candidates'] / middle['full']:.1f} times as long ({middle['full'] / middle['gradient']:.0%} of the "
        f"gradient's own product in full, {middle['candidates'] / middle['gradient']:.0%} of candidates alone; a "
        f"matrix of {results['shape'][0]} x {results['shape'][1]}, {results['tokens']} tokens, one thread). Under the "
        f'default, rule="budget", weights go that were no candidates: {lost} of those that go ({results["model"]}). '
        "Made by `make bench-candidates`."
    )
    return "\n".join([*lines, "", note])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--calibration", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {
        "model": Path(options.model).name,
        "sparsity": SPARSITY,
        "shape": SHAPE,
        "tokens": TOKENS,
        "bytes_per_weight": bytes_per_weight(SPARSITY),
        "seconds": fold_seconds(),
        "no_candidates": {
            str(sparsity): no_candidates(options.model, options.calibration, sparsity) for sparsity in (0.5, 0.7)
        },
    }
    RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
