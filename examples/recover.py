"""Prune a model, fine-tune it with its zeros kept, and print the perplexity that pruning cost and training regained.

    make bench-recovery        # SmolLM2-135M, into benchmarks/results/recovery.json

usage: python examples/recover.py --model MODEL [--text SPEC] [--evaluation SPEC] [--sparsity 0.6] [--steps 300]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import Trainer, TrainingArguments

from gradprobe_hf import GradProbeConfig, PruneResult, prune_pretrained
from gradprobe_hf.data.windows import WindowSpec, load_batches
from gradprobe_hf.evaluation.perplexity import measure
from gradprobe_hf.model.loading import load_model, load_processing_class
from gradprobe_hf.probe.engine import Workload
from gradprobe_hf.report.build import versions
from gradprobe_hf.training import SparsityCallback


def fine_tuned(model: Any, rows: list[dict[str, Any]], masks: SparsityCallback, args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch_size,
            learning_rate=args.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=args.steps // 20,
            weight_decay=0.01,
            bf16=True,
            use_cpu=not torch.accelerator.is_available(),
            save_strategy="no",
            logging_steps=max(1, args.steps // 10),
            report_to="none",
            seed=0,
        )
        Trainer(model, options, train_dataset=rows, callbacks=[masks]).train()


def run(args: argparse.Namespace) -> None:
    model = load_model(args.model, dtype=torch.float32).eval()
    tokenizer = load_processing_class(model)

    def windows(source: str, part: Any, count: int) -> Any:
        return load_batches(
            source,
            WindowSpec(count, args.sequence_length, batch_size=1),
            part=part,
            model=model,
            processing_class=tokenizer,
        )

    held_out = windows(args.evaluation, "evaluation", args.evaluation_samples).in_batches_of(args.batch_size)
    text = windows(args.text, "calibration", args.steps * args.batch_size)
    rows = [{"input_ids": row["input_ids"][0], "labels": row["input_ids"][0]} for row in text]
    config = GradProbeConfig(
        sparsity=args.sparsity,
        preset="balanced",
        num_samples=args.num_samples,
        sequence_length=args.sequence_length,
        seed=0,
    )
    result = prune_pretrained(model, config, calibration=args.text, evaluation=held_out, processing_class=tokenizer)
    assert result.report.evaluation is not None, "it was measured"
    perplexity = {name: result.report.evaluation[name]["perplexity"] for name in ("dense", "pruned")}

    start = time.perf_counter()
    fine_tuned(model, rows, SparsityCallback(result), args)
    seconds = time.perf_counter() - start
    perplexity["recovered"] = measure(Workload(model, held_out), "evaluation (recovered)").perplexity
    zeros = sum(int((target.matrix(model) == 0).sum()) for target in result.targets)
    if args.output:
        model.save_pretrained(args.output)
        tokenizer.save_pretrained(args.output)
    figures = {
        "model": Path(args.model).name,
        "sparsity": zeros / result.report.weights,
        "perplexity": perplexity,
        "tokens": args.steps * args.batch_size * args.sequence_length,
        "steps": args.steps,
        "seconds": round(seconds, 1),
        "evaluation": held_out.describe()["protocol"],
        "versions": versions(),
    }
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    show(figures, result, zeros)


def show(figures: dict[str, Any], result: PruneResult, zeros: int) -> None:
    report = result.report
    table = Table("", *figures["perplexity"], title=f"{figures['model']}, {report.config['sparsity']:.0%} pruned")
    table.add_row("perplexity", *(f"{value:.2f}" for value in figures["perplexity"].values()))
    table.add_row("zeros", "", f"{report.zeros:,}", f"{zeros:,} of {report.weights:,} ({zeros / report.weights:.4%})")
    console = Console(soft_wrap=True)
    console.print(table)
    console.print(f"{figures['steps']} steps, {figures['tokens']:,} tokens, in {figures['seconds']:.0f} seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", default="Salesforce/wikitext:wikitext-2-raw-v1:validation")
    parser.add_argument("--evaluation", default="Salesforce/wikitext:wikitext-2-raw-v1:test")
    parser.add_argument("--sparsity", type=float, default=0.6)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--num-samples", type=int, default=64, help="windows to probe on")
    parser.add_argument("--evaluation-samples", type=int, default=60)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--output", type=Path, help="where the recovered checkpoint is saved")
    parser.add_argument("--json", type=Path, help="where the figures are written")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
