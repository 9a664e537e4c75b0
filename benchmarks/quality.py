"""Perplexity of a model pruned in several ways to the same exact sparsity.

Every row is one `prune_pretrained` on the same loaded model, whose weights stay as they are; its masks are then scored
by the package's perplexity on one fixed set of windows. Rows already in the result file are not run again; pass --fresh
when the method has changed.

`--accumulators` is a table of its own: what keeping the statistics in fewer bytes does to the result.

usage: python benchmarks/quality.py --model DIR [--calibration SPEC] [--evaluation SPEC] [--sparsity 0.5 0.6]
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from gradprobe_hf import GradProbeConfig, PruneResult, prune_pretrained
from gradprobe_hf.accounting import versions
from gradprobe_hf.calibration import Batches, load_batches
from gradprobe_hf.evaluation import measure
from gradprobe_hf.probe import serving

RESULTS = Path(__file__).parent / "results"

# Wanda is first: it rounds its budget in every row, so the others are asked for exactly the zeros that it made.
# Magnitude is compared within rows too, where it does better than over a matrix or the whole model.
ACCUMULATORS: dict[str, dict[str, Any]] = {
    "path, float32": {},
    "path, int8": {"accumulator_dtype": "int8"},
}
METHODS: dict[str, dict[str, Any]] = {
    "wanda": {"strategy": "wanda", "decision": "none"},
    "magnitude": {"strategy": "magnitude", "decision": "none", "scope": "row"},
    "one probe": {"strategy": "fisher", "decision": "none"},
    "two probes (path)": {},
}


@dataclass(frozen=True)
class Row:
    """One cell of the table: what a method made of the model at one sparsity."""

    method: str
    seed: int
    sparsity: float
    zeros: int
    weights: int
    perplexity: float
    seconds: float


def prune(model: PreTrainedModel, tokenizer: Any, options: dict[str, Any], ask: argparse.Namespace) -> PruneResult:
    config = GradProbeConfig(
        **options, num_samples=ask.num_samples, sequence_length=ask.sequence_length, batch_size=ask.batch_size
    )
    return prune_pretrained(
        model, config, calibration=ask.calibration, evaluation=False, processing_class=tokenizer, apply=False
    )


def measured_row(model: PreTrainedModel, method: str, sparsity: float, result: PruneResult, held_out: Batches) -> Row:
    with serving(model, result.targets, result.masks):
        found = measure(model, held_out, label=method)
    report = result.report
    assert found.perplexity is not None, "a causal language model has a perplexity"
    seconds = sum(report.timings.values())
    return Row(method, result.config.seed, sparsity, report.zeros, report.weights, found.perplexity, round(seconds, 1))


def show(settings: dict[str, Any], dense: float, rows: list[Row], names: list[str]) -> None:
    table = Table("method", "sparsity", "seed", "zeros", "perplexity", "/ first", "seconds", title=f"dense {dense:.4f}")
    first: dict[tuple[float, int], float] = {}
    for row in sorted(rows, key=lambda row: (row.sparsity, row.seed, names.index(row.method))):
        ratio = row.perplexity / first.setdefault((row.sparsity, row.seed), row.perplexity)
        table.add_row(
            row.method,
            f"{row.sparsity:.0%}",
            str(row.seed),
            f"{row.zeros:,}",
            f"{row.perplexity:,.2f}",
            f"{ratio:.3f}",
            f"{row.seconds:.0f}",
        )
    Console(soft_wrap=True).print(table, json.dumps(settings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--calibration", default="Salesforce/wikitext:wikitext-2-raw-v1:validation")
    parser.add_argument("--evaluation", default="Salesforce/wikitext:wikitext-2-raw-v1:test")
    parser.add_argument("--sparsity", type=float, nargs="+", help="default: 0.5 and 0.6 (accumulators: 0.6)")
    parser.add_argument("--seed", type=int, nargs="+", help="of the calibration windows (default: 0)")
    parser.add_argument("--num-samples", type=int, default=64)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--evaluation-samples", type=int, default=60)
    parser.add_argument("--accumulators", action="store_true", help="float32 and int8 statistics")
    parser.add_argument("--output", type=Path, help="default: quality.json (or accumulators.json) in results")
    parser.add_argument("--fresh", action="store_true", help="forget the rows of earlier runs")
    ask = parser.parse_args()
    ask.output = ask.output or RESULTS / ("accumulators.json" if ask.accumulators else "quality.json")
    ask.sparsity = ask.sparsity or ([0.6] if ask.accumulators else [0.5, 0.6])
    ask.seed = ask.seed or [0]
    methods = ACCUMULATORS if ask.accumulators else METHODS

    model = AutoModelForCausalLM.from_pretrained(ask.model, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(ask.model)
    held_out = load_batches(
        ask.evaluation,
        part="evaluation",
        model=model,
        processing_class=tokenizer,
        samples=ask.evaluation_samples,
        sequence_length=ask.sequence_length,
        batch_size=ask.batch_size,
        seed=0,
    )
    settings = {
        "model": Path(ask.model).name,
        "dtype": "bfloat16",
        "calibration": f"{ask.num_samples} x {ask.sequence_length} of {Path(ask.calibration).name}",
        "evaluation": f"{ask.evaluation_samples} x {ask.sequence_length} of {Path(ask.evaluation).name}",
        "evaluation_fingerprint": held_out.fingerprint,
    }
    saved = json.loads(ask.output.read_text()) if ask.output.exists() and not ask.fresh else {}
    if saved.get("settings") != settings:
        saved = {"settings": settings, "dense": measure(model, held_out, label="dense").perplexity, "rows": []}
    rows = [Row(**row) for row in saved["rows"]]
    done = {(row.method, row.sparsity, row.seed) for row in rows}
    for sparsity, seed, method in itertools.product(ask.sparsity, ask.seed, methods):
        if (method, sparsity, seed) not in done:
            matched = next((row.zeros / row.weights for row in rows if row.sparsity == sparsity), sparsity)
            result = prune(model, tokenizer, {**methods[method], "sparsity": matched, "seed": seed}, ask)
            rows.append(measured_row(model, method, sparsity, result, held_out))
            ask.output.parent.mkdir(parents=True, exist_ok=True)
            values = {**saved, "rows": [asdict(row) for row in rows], "versions": versions()}
            ask.output.write_text(json.dumps(values, indent=2) + "\n")
    show(settings, saved["dense"], rows, list(methods))


if __name__ == "__main__":
    main()
