"""Prune a real model twice, calibrated on its own text: half of its weights to zero, and a quarter of it away.

What each cost is measured on another text, and how large and how fast they are beside the dense model. `make demo` runs
this.

usage: python examples/demo.py --model DIR --output DIR
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from gradprobe_hf import GradProbeConfig, PruneResult, bench_pretrained, prune_pretrained
from gradprobe_hf.bench.result import BenchResult, BenchRow, Timing
from gradprobe_hf.checkpoint.write import check_destination
from gradprobe_hf.data.windows import WindowSpec, load_batches
from gradprobe_hf.model.loading.load import load_model
from gradprobe_hf.model.loading.placement import accelerator
from gradprobe_hf.model.loading.processing import load_processing_class
from gradprobe_hf.report.report import Report

PROMPT = "The Earth goes around the Sun, and the Moon"


def sentence(model: Any, tokenizer: Any) -> str:
    inputs = tokenizer(PROMPT, return_tensors="pt").to(model.device)
    written = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    return str(tokenizer.decode(written[0], skip_special_tokens=True)).replace("\n", " ")


def show(results: dict[str, PruneResult], bench: BenchResult | None) -> None:
    """A column for the dense model and one for each result; the rows of the bench are in the same order."""
    first, *_ = reports = [result.report for result in results.values()]
    assert first.evaluation is not None, "the demo measures"
    table = Table("", "dense", *results, title=first.model["class"])
    measured = [first.evaluation["dense"], *(report.evaluation["pruned"] for report in reports if report.evaluation)]
    zeros = sum(row.zeros_before for row in first.matrices)
    table.add_row("perplexity", *(f"{one['perplexity']:.2f}" for one in measured))
    table.add_row("parameters", *(f"{count:,}" for count in _parameters(reports)))
    table.add_row("sparsity", f"{zeros / first.weights:.4%}", f"{first.sparsity:.4%}", "")
    if bench:
        for title, shown in _measured_sizes(bench).items():
            table.add_row(title, *map(shown, bench.rows))
    console = Console(soft_wrap=True, markup=False)
    console.print(table)
    console.print(f"perplexity on {first.evaluation['source']}; {first.evaluation['protocol']}", style="dim")
    if bench:
        console.print(f"speeds: medians of {bench.repeats} rounds in which the three take turns", style="dim")


def written(results: dict[str, PruneResult], bench: BenchResult | None, seconds: float) -> dict[str, Any]:
    """The same as JSON types."""
    reports = [result.report for result in results.values()]
    first = reports[0]
    assert first.evaluation is not None, "the demo measures"
    measured = [first.evaluation["dense"], *(report.evaluation["pruned"] for report in reports if report.evaluation)]
    names = ("dense", *results)
    rows = [
        {"name": name, "perplexity": one["perplexity"], "parameters": count}
        for name, one, count in zip(names, measured, _parameters(reports), strict=True)
    ]
    return {
        "model": first.model["name"],
        "zeros": first.sparsity,
        # Without the sketch, by which the text is known again: 512 numbers.
        "calibration": {name: value for name, value in (first.calibration or {}).items() if name != "sketch"},
        "evaluation": {name: first.evaluation[name] for name in ("source", "protocol")},
        "rows": rows,
        "bench": None if bench is None else {**bench.to_dict(), "models": list(names)},
        "seconds": round(seconds),
        "versions": first.versions,
    }


def _parameters(reports: Iterable[Report]) -> list[int]:
    """Of the dense model, and of each run's: zeros are parameters as any other."""
    structures = [report.structure for report in reports]
    dense = next(one["parameters"]["before"] for one in structures if one is not None)
    return [dense, *(dense if one is None else one["parameters"]["after"] for one in structures)]


def _measured_sizes(bench: BenchResult) -> dict[str, Callable[[BenchRow], str]]:
    """Lines of the table, and what each says of a model."""
    lines: dict[str, Callable[[BenchRow], str]] = {"file, MB": lambda row: f"{(row.file_bytes or 0) / 1e6:.1f}"}
    if bench.rows[0].zstd_bytes:
        lines["file under zstd, MB"] = lambda row: f"{(row.zstd_bytes or 0) / 1e6:.1f}"
    lines[f"reads {bench.prompt_length} tokens, ms"] = lambda row: _median(row.prefill_seconds, 1000)
    lines["writes tokens per second"] = lambda row: _median(row.tokens_per_second)
    return lines


def _median(timing: Timing | None, scale: float = 1) -> str:
    return "-" if timing is None else f"{scale * timing.median:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", required=True, help="of the zeros; beside it OUTPUT-smaller and OUTPUT-dense")
    parser.add_argument("--num-samples", type=int, default=32)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--channels", type=int, default=640, help="that go of each FFN; SmolLM2-135M has 1,536")
    parser.add_argument("--repeats", type=int, default=5, help="rounds in which speed is measured; 0: it is not")
    parser.add_argument("--json", type=Path, help="write all of it to this file, too")
    parser.add_argument("--overwrite", action="store_true", help="replace the checkpoints of an earlier run")
    args = parser.parse_args()
    outputs = {"half zero": args.output, "smaller": f"{args.output}-smaller"}
    try:  # before a model writes text for minutes
        for folder in (*outputs.values(), f"{args.output}-dense"):
            check_destination(folder, args.model, args.overwrite)
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    model = load_model(args.model, dtype=torch.bfloat16).eval().to(accelerator())  # where the others will be
    there = getattr(model.config, "intermediate_size", None)  # some families call it otherwise
    if there is not None and not 0 < args.channels < there:
        sys.exit(f"--channels {args.channels}: of {there} one at least has to go and to stay.")
    tokenizer = load_processing_class(model)
    sentences, results = [sentence(model, tokenizer)], {}
    windows = WindowSpec(args.num_samples, args.sequence_length, batch_size=4)
    text = load_batches("self", windows, part="calibration", model=model, processing_class=tokenizer)
    faces: dict[str, dict[str, Any]] = {
        "half zero": {"sparsity": 0.5},
        "smaller": {"structure": {"ffn": args.channels}, "measure_speed": args.repeats > 0},  # for its card
    }
    for name, options in faces.items():
        config = GradProbeConfig(
            **options, num_samples=args.num_samples, sequence_length=args.sequence_length, evaluation_samples=20
        )
        results[name] = prune_pretrained(
            args.model,
            config,
            calibration=text,
            evaluation="pydoc",
            processing_class=tokenizer,
            dtype=torch.bfloat16,
            output_dir=outputs[name],
            overwrite=args.overwrite,
        )
        sentences.append(sentence(results[name].model, tokenizer))
    peak = max(result.report.memory["peak_resident_bytes"] for result in results.values())
    bench = None
    if args.repeats:
        model.save_pretrained(f"{args.output}-dense")  # a file with the others' bytes per number, to be beside theirs
        names = [f"{args.output}-dense", *outputs.values()]
        bench = bench_pretrained(names, repeats=args.repeats, dtype="bfloat16")
    show(results, bench)
    for name, text_of_it in zip(("dense", *outputs), sentences, strict=True):
        print(f"{name}: {text_of_it}")
    seconds = time.perf_counter() - start
    if args.json is not None:
        args.json.write_text(json.dumps(written(results, bench, seconds), indent=1) + "\n", encoding="utf-8")
    print(f"{seconds:.0f} seconds, {peak / 1e9:.2f} GB peak memory")
    for name, output in outputs.items():
        print(f"{name}: checkpoint {output}, model card {output}/README.md, pictures {output}/assets")


if __name__ == "__main__":
    main()
