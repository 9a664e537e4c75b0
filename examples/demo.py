"""Prune a real model to 50%, calibrated on its own text, and show what that cost on another. `make demo` runs this.

usage: python examples/demo.py --model DIR --output DIR
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from gradprobe_hf import GradProbeConfig, PruneResult, prune_pretrained
from gradprobe_hf.model.loading import load_model, load_processing_class

PROMPT = "The Earth goes around the Sun, and the Moon"


def sentence(model: Any, tokenizer: Any) -> str:
    inputs = tokenizer(PROMPT, return_tensors="pt")
    written = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    return str(tokenizer.decode(written[0], skip_special_tokens=True)).replace("\n", " ")


def show(result: PruneResult, seconds: float, before: str, after: str, output: str) -> None:
    report = result.report
    assert report.evaluation is not None, "the demo measures"
    table = Table("", "dense", "pruned", title=f"{report.model['class']}, {report.model['parameters']:,} parameters")
    table.add_row("perplexity", *(f"{report.evaluation[name]['perplexity']:.2f}" for name in ("dense", "pruned")))
    table.add_row(
        "zeros", f"{sum(r.zeros_before for r in report.matrices):,}", f"{report.zeros:,} of {report.weights:,}"
    )
    table.add_row(
        "sparsity", f"{sum(r.zeros_before for r in report.matrices) / report.weights:.4%}", f"{report.sparsity:.4%}"
    )
    table.add_row("writes", before, after)
    console = Console(soft_wrap=True, markup=False)
    console.print(table)
    console.print(f"perplexity on {report.evaluation['source']}; {report.evaluation['protocol']}", style="dim")
    console.print(f"{seconds:.0f} seconds, {report.memory['peak_resident_bytes'] / 1e9:.2f} GB peak memory")
    console.print(f"checkpoint {output}\nmodel card {output}/README.md\npictures   {output}/assets")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--num-samples", type=int, default=32)
    parser.add_argument("--sequence-length", type=int, default=512)
    args = parser.parse_args()
    model = load_model(args.model, dtype=torch.bfloat16).eval()
    tokenizer = load_processing_class(model)
    before = sentence(model, tokenizer)
    config = GradProbeConfig(
        sparsity=0.5, num_samples=args.num_samples, sequence_length=args.sequence_length, evaluation_samples=20
    )
    start = time.perf_counter()
    result = prune_pretrained(model, config, processing_class=tokenizer, output_dir=args.output, overwrite=True)
    seconds = time.perf_counter() - start
    show(result, seconds, before, sentence(result.model, tokenizer), args.output)


if __name__ == "__main__":
    main()
