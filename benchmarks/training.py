"""Pruning while a model trains: what each saliency makes of the same run, and what the callbacks cost.

`compare` trains one small model from scratch on bytes of real text, again and again: the same seed, batches, schedule
and learning rate, with another way to prune each time. It refuses to tabulate runs that differ in anything else. Runs
that are already in the result file are not made again.

`cost` trains a real model for some steps with each callback, and without, in turns (see `training_cost.py`). With
--compile the model is compiled by torch.compile, and its graphs are counted.

    make bench-training        # both, into results/training.json

usage: python -m benchmarks.training compare --text FILE
       python -m benchmarks.training cost --model DIR [--compile]
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.quality_cells import write_whole
from benchmarks.training_cost import cost, show_cost
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.report.build import versions
from gradprobe_hf.training import StatePruningCallback, attached
from gradprobe_hf.training.saliency import SALIENCIES, Saliency

RESULTS = Path(__file__).parent / "results"
MODEL = {
    "vocab_size": 256,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
TRAINED = 0.9  # of the text; the rest is for the evaluation
PRUNED_FROM, PRUNED_TO = 0.2, 0.7  # of the steps


class Text:
    """The bytes of a file, in windows."""

    def __init__(self, path: Path, length: int) -> None:
        data = path.read_bytes()
        cut = int(len(data) * TRAINED)
        self.train, self.rest = (
            torch.frombuffer(bytearray(part), dtype=torch.uint8).long() for part in (data[:cut], data[cut:])
        )
        self.length = length
        self.fingerprint = hashlib.sha256(data).hexdigest()

    def batches(self, seed: int, size: int) -> Iterator[Tensor]:
        """Windows of the first part, drawn anew for each step."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(self.train) - self.length, (size,), generator=generator)
            yield torch.stack([self.train[start : start + self.length] for start in starts.tolist()])

    def held_out(self, size: int, windows: int = 256) -> Iterator[Tensor]:
        rows = self.rest[: len(self.rest) // self.length * self.length].view(-1, self.length)
        yield from rows[:windows].split(size)


def train(
    args: argparse.Namespace, text: Text, seed: int, saliency: Saliency | None, sparsity: float
) -> dict[str, Any]:
    """One run from scratch; `conditions` is everything that two runs of one table must share."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**MODEL))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.learning_rate, total_steps=args.steps, pct_start=0.1)
    pruning = {
        "begin_step": int(PRUNED_FROM * args.steps),
        "end_step": int(PRUNED_TO * args.steps),
        "every": args.every,
    }
    start = time.perf_counter()
    with ExitStack() as stack:
        callback = StatePruningCallback(sparsity, saliency, **pruning) if saliency else None
        if callback:
            stack.enter_context(attached(callback, model, optimizer))
        for rows in itertools.islice(text.batches(seed, args.batch_size), args.steps):
            model(input_ids=rows, labels=rows).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    targets = find_targets(model)
    with torch.no_grad():
        losses = [float(model(input_ids=rows, labels=rows).loss) for rows in text.held_out(args.batch_size)]
    return {
        "method": saliency or "dense",
        "sparsity": sparsity if saliency else 0.0,
        "seed": seed,
        "bits_per_byte": statistics.fmean(losses) / math.log(2),
        "zeros": sum(int((target.matrix(model) == 0).sum()) for target in targets),
        "weights": sum(target.numel for target in targets),
        "seconds": round(time.perf_counter() - start, 1),
        "conditions": {
            "model": MODEL,
            "parameters": model.num_parameters(),
            "text": text.fingerprint,
            "steps": args.steps,
            "tokens": args.steps * args.batch_size * text.length,
            "window": text.length,
            "learning_rate": args.learning_rate,
            "optimizer": "AdamW, weight decay 0.01, one cycle, clipped at 1",
            "pruning": {**pruning, "schedule": "cubic", "scope": "global"},
            "threads": torch.get_num_threads(),
            "versions": versions(),
        },
    }


def compare(args: argparse.Namespace, kept: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run after run, those that are kept already left out; yields what is to be kept."""
    text = Text(args.text, args.window)
    runs = kept.setdefault("runs", [])
    done = {(run["method"], run["sparsity"], run["seed"]) for run in runs}
    wanted: list[tuple[Saliency | None, float]] = [(None, 0.0)]
    wanted += [(saliency, sparsity) for sparsity in args.sparsity for saliency in SALIENCIES]
    for seed, (saliency, sparsity) in itertools.product(args.seed, wanted):
        if (saliency or "dense", sparsity, seed) not in done:
            runs.append(train(args, text, seed, saliency, sparsity))
            print(json.dumps({key: value for key, value in runs[-1].items() if key != "conditions"}), flush=True)
            yield kept


def check_alike(runs: list[dict[str, Any]]) -> None:
    """Raise ValueError for runs that differ in more than their method, sparsity and seed, or that missed it."""
    first = runs[0]["conditions"]
    for run in runs:
        for name, value in run["conditions"].items():
            if value != first[name]:
                raise ValueError(
                    f"{run['method']}, seed {run['seed']}: {name} is {value}, and {first[name]} in the first run. Such "
                    "runs do not belong in one table; make them again with --fresh."
                )
        if run["method"] != "dense" and run["zeros"] != round(run["sparsity"] * run["weights"]):
            raise ValueError(
                f"{run['method']}, seed {run['seed']}: {run['zeros']} zeros are not {run['sparsity']:.0%}."
            )
    seeds = {frozenset(r["seed"] for r in runs if (r["method"], r["sparsity"]) == key) for key in _methods(runs)}
    if len(seeds) != 1:
        raise ValueError("some methods have seeds that others lack; let the benchmark run to its end.")


def _methods(runs: list[dict[str, Any]]) -> list[tuple[str, float]]:
    return list(dict.fromkeys((run["method"], run["sparsity"]) for run in runs))


def show_comparison(runs: list[dict[str, Any]]) -> None:
    check_alike(runs)
    table = Table("method", "sparsity", "bits per byte", "spread over seeds")
    for method, sparsity in _methods(runs):
        found = [run for run in runs if (run["method"], run["sparsity"]) == (method, sparsity)]
        bits = [run["bits_per_byte"] for run in found]
        table.add_row(
            method,
            f"{sparsity:.0%}",
            f"{statistics.fmean(bits):.4f}",
            f"{max(bits) - min(bits):.4f}",
        )
    Console(soft_wrap=True).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("compare", "cost"))
    parser.add_argument("--output", type=Path, default=RESULTS / "training.json")
    parser.add_argument("--fresh", action="store_true", help="forget what the result file has")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--window", type=int, default=64, help="tokens of a row")
    comparing = parser.add_argument_group("compare")
    comparing.add_argument("--text", type=Path, help="a file whose bytes are learned")
    comparing.add_argument("--steps", type=int, default=400)
    comparing.add_argument("--learning-rate", type=float, default=3e-3)
    comparing.add_argument("--every", type=int, default=20, help="steps between two updates of the mask")
    comparing.add_argument("--sparsity", type=float, nargs="+", default=[0.5, 0.9])
    comparing.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2])
    costing = parser.add_argument_group("cost")
    costing.add_argument("--model", help="a checkpoint to fine-tune")
    costing.add_argument("--rounds", type=int, default=5)
    costing.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    if (args.text if args.what == "compare" else args.model) is None:
        parser.error("compare needs --text, and cost needs --model")
    kept = json.loads(args.output.read_text()) if args.output.exists() else {}
    if args.what == "compare":
        if args.fresh:
            kept["runs"] = []
        for values in compare(args, kept):
            save(values, args.output)
        show_comparison(kept["runs"])
        return
    rows = cost(args)
    key = (rows[0]["model"], rows[0]["compiled"])
    kept["cost"] = [row for row in kept.get("cost", []) if (row["model"], row["compiled"]) != key] + rows
    save(kept, args.output)
    show_cost(kept["cost"])


def save(values: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({**values, "versions": versions()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
