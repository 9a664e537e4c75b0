"""Prune a model, fine-tune it on text with its zeros kept, and print what pruning cost and what training gave back.

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

from gradprobe_hf import GradProbeConfig, prune_pretrained
from gradprobe_hf.data.windows import load_batches
from gradprobe_hf.evaluation.perplexity import measure
from gradprobe_hf.model.loading import load_model, load_processing_class
from gradprobe_hf.report.build import versions
from gradprobe_hf.training import SparsityCallback


def fine_tuned(model: Any, rows: list[dict[str, Any]], masks: SparsityCallback, ask: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder,
            max_steps=ask.steps,
            per_device_train_batch_size=ask.batch_size,
            learning_rate=ask.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=ask.steps // 20,
            weight_decay=0.01,
            bf16=True,
            use_cpu=not torch.accelerator.is_available(),
            save_strategy="no",
            logging_steps=max(1, ask.steps // 10),
            report_to="none",
            seed=0,
        )
        Trainer(model, options, train_dataset=rows, callbacks=[masks]).train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", default="Salesforce/wikitext:wikitext-2-raw-v1:validation")
    parser.add_argument("--evaluation", default="Salesforce/wikitext:wikitext-2-raw-v1:test")
    parser.add_argument("--sparsity", type=float, default=0.6)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--num-samples", type=int, default=64, help="windows that the probes look at")
    parser.add_argument("--evaluation-samples", type=int, default=60)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--output", type=Path, help="where the recovered checkpoint is saved")
    parser.add_argument("--json", type=Path, help="where the figures are written")
    ask = parser.parse_args()

    model = load_model(ask.model, dtype=torch.float32).eval()
    tokenizer = load_processing_class(model)

    def windows(source: str, part: Any, count: int) -> Any:
        return load_batches(
            source,
            part=part,
            model=model,
            processing_class=tokenizer,
            samples=count,
            sequence_length=ask.sequence_length,
            batch_size=1,
            seed=0,
        )

    held_out = windows(ask.evaluation, "evaluation", ask.evaluation_samples).in_batches_of(ask.batch_size)
    text = windows(ask.text, "calibration", ask.steps * ask.batch_size)
    rows = [{"input_ids": row["input_ids"][0], "labels": row["input_ids"][0]} for row in text]

    config = GradProbeConfig(
        sparsity=ask.sparsity, num_samples=ask.num_samples, sequence_length=ask.sequence_length, seed=0
    )
    result = prune_pretrained(model, config, calibration=ask.text, evaluation=held_out, processing_class=tokenizer)
    assert result.report.evaluation is not None, "it was measured"
    figures = [result.report.evaluation[name]["perplexity"] for name in ("dense", "pruned")]
    masks = SparsityCallback(result)
    start = time.perf_counter()
    fine_tuned(model, rows, masks, ask)
    seconds = time.perf_counter() - start
    figures.append(measure(model, held_out, label="recovered").perplexity)
    zeros = sum(int((target.matrix(model) == 0).sum()) for target in result.targets)

    table = Table("", "dense", "pruned", "recovered", title=f"{Path(ask.model).name}, {ask.sparsity:.0%} pruned")
    table.add_row("perplexity", *(f"{value:.2f}" for value in figures))
    table.add_row(
        "zeros",
        "",
        f"{result.report.zeros:,}",
        f"{zeros:,} of {result.report.weights:,} ({zeros / result.report.weights:.4%})",
    )
    console = Console(soft_wrap=True)
    console.print(table)
    console.print(f"{ask.steps} steps of {ask.batch_size} x {ask.sequence_length} tokens in {seconds:.0f} seconds")
    if ask.output:
        model.save_pretrained(ask.output)
        tokenizer.save_pretrained(ask.output)
    if ask.json:
        values = {
            "model": Path(ask.model).name,
            "sparsity": zeros / result.report.weights,
            "perplexity": dict(zip(("dense", "pruned", "recovered"), figures, strict=True)),
            "tokens": ask.steps * ask.batch_size * ask.sequence_length,
            "steps": ask.steps,
            "seconds": round(seconds, 1),
            "evaluation": held_out.describe()["protocol"],
            "versions": versions(),
        }
        ask.json.write_text(json.dumps(values, indent=2) + "\n")


if __name__ == "__main__":
    main()
