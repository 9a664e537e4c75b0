"""Pruning while a model trains: what each saliency makes of the same run, and what the callbacks cost.

`compare` trains one small model from scratch on bytes of real text, again and again: the same seed, batches, schedule
and learning rate, with another way to prune each time. It refuses to tabulate runs that differ in anything else. Runs
that are already in the result file are not made again.

`cost` trains a real model for some steps with each callback, and without, in turns: the share of a step that it takes,
and the memory of its masks. With --compile the model is compiled by torch.compile, and its graphs are counted.

usage: python benchmarks/training.py compare --text FILE
       python benchmarks/training.py cost --model DIR [--compile]
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
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

from gradprobe_hf.model.loading import load_model
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.report.build import peak_memory, versions
from gradprobe_hf.training import (
    SelectiveUpdateCallback,
    SparsityCallback,
    SpikeAwareClip,
    StatePruningCallback,
    StepCallback,
    attached,
)
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
EVERY = 50  # steps between two updates, of which the cost is told


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


def train(ask: argparse.Namespace, text: Text, seed: int, saliency: Saliency | None, sparsity: float) -> dict[str, Any]:
    """One run from scratch; `conditions` is everything that two runs of one table must share."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**MODEL))
    optimizer = torch.optim.AdamW(model.parameters(), lr=ask.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, ask.learning_rate, total_steps=ask.steps, pct_start=0.1)
    pruning = {"begin_step": int(PRUNED_FROM * ask.steps), "end_step": int(PRUNED_TO * ask.steps), "every": ask.every}
    start = time.perf_counter()
    with ExitStack() as stack:
        callback = StatePruningCallback(sparsity, saliency, **pruning) if saliency else None
        if callback:
            stack.enter_context(attached(callback, model, optimizer))
        for rows in itertools.islice(text.batches(seed, ask.batch_size), ask.steps):
            model(input_ids=rows, labels=rows).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    targets = find_targets(model)
    with torch.no_grad():
        losses = [float(model(input_ids=rows, labels=rows).loss) for rows in text.held_out(ask.batch_size)]
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
            "steps": ask.steps,
            "tokens": ask.steps * ask.batch_size * text.length,
            "window": text.length,
            "learning_rate": ask.learning_rate,
            "optimizer": "AdamW, weight decay 0.01, one cycle, clipped at 1",
            "pruning": {**pruning, "schedule": "cubic", "scope": "global"},
            "threads": torch.get_num_threads(),
            "versions": versions(),
        },
    }


def compare(ask: argparse.Namespace, kept: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run after run, those that are kept already left out; yields what is to be kept."""
    text = Text(ask.text, ask.window)
    runs = kept.setdefault("runs", [])
    done = {(run["method"], run["sparsity"], run["seed"]) for run in runs}
    wanted: list[tuple[Saliency | None, float]] = [(None, 0.0)]
    wanted += [(saliency, sparsity) for sparsity in ask.sparsity for saliency in SALIENCIES]
    for seed, (saliency, sparsity) in itertools.product(ask.seed, wanted):
        if (saliency or "dense", sparsity, seed) not in done:
            runs.append(train(ask, text, seed, saliency, sparsity))
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


def cost(ask: argparse.Namespace) -> list[dict[str, Any]]:
    """Steps of fine-tuning with and without each callback, in turns, so that a noisy machine disturbs both alike.

    The tokens are random: what a step costs does not depend on them. A callback that works every so many steps is timed
    by itself, and its share is of the steps in between.
    """
    torch.set_float32_matmul_precision("high")
    model = load_model(ask.model, dtype=torch.float32)
    model.train()
    trained = torch.compile(model) if ask.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(model.config.vocab_size, (ask.batch_size, ask.window), generator=generator)

    def step(callback: StepCallback | None = None) -> float:
        start = time.perf_counter()
        if callback:
            callback.open()
        trained(input_ids=rows, labels=rows, use_cache=False).loss.backward()
        if callback:
            callback.close()
            callback.step += 1
            callback.before_step()
        optimizer.step()
        if callback:
            callback.after_step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    step()  # compiles, and fills the optimizer's state
    state = StatePruningCallback(
        0.5, begin_step=1, end_step=10**6, every=10**6, initial_sparsity=0.5, schedule="linear"
    )
    state.start(model, optimizer)
    step(state)  # prunes half of the weights
    state.finish()
    found = []
    for callback in (SparsityCallback("from-zeros"), SelectiveUpdateCallback(fraction=0.5), SpikeAwareClip(warmup=1)):
        callback.start(model, optimizer, step=2)
        times = [(step(), step(callback)) for _ in range(ask.rounds)]
        callback.finish()
        without, with_it = (statistics.median(column) for column in zip(*times, strict=True))
        found.append({"callback": type(callback).__name__, "share": with_it / without - 1, "step_seconds": without})
        if isinstance(callback, SparsityCallback) and callback.keeper:
            weights = sum(target.numel for target in callback.keeper.targets.values())
            found[-1]["bytes_per_weight"] = callback.keeper.nbytes / weights
    bare = statistics.median(row["step_seconds"] for row in found)
    updates = [time_of(state.update) for _ in range(ask.rounds)]
    found.append(
        {
            "callback": f"StatePruningCallback(every={EVERY})",
            "share": statistics.median(updates) / (EVERY * bare),
            "step_seconds": bare,
            "update_seconds": statistics.median(updates),
        }
    )
    shared = {
        "compiled": ask.compile,
        "model": Path(ask.model).name,
        "batch": f"{ask.batch_size} x {ask.window}",
        "tokens_per_second": ask.batch_size * ask.window / bare,
        "graphs": counters["stats"]["unique_graphs"] if ask.compile else None,
        "peak_bytes": peak_memory()["peak_resident_bytes"],
        "threads": torch.get_num_threads(),
    }
    return [{**row, **shared} for row in found]


def time_of(action: Any) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def show_cost(rows: list[dict[str, Any]]) -> None:
    table = Table("callback", "compiled", "share of a step", "bare step", "tokens/s", "graphs", "peak memory")
    for row in rows:
        table.add_row(
            row["callback"],
            "yes" if row["compiled"] else "no",
            f"{row['share']:.1%}",
            f"{row['step_seconds']:.2f} s",
            f"{row['tokens_per_second']:.0f}",
            str(row["graphs"] or ""),
            f"{row['peak_bytes'] / 1e9:.2f} GB",
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
    ask = parser.parse_args()
    if (ask.text if ask.what == "compare" else ask.model) is None:
        parser.error("compare needs --text, and cost needs --model")
    kept = json.loads(ask.output.read_text()) if ask.output.exists() else {}
    if ask.what == "compare":
        if ask.fresh:
            kept["runs"] = []
        for values in compare(ask, kept):
            save(values, ask.output)
        show_comparison(kept["runs"])
        return
    rows = cost(ask)
    key = (rows[0]["model"], rows[0]["compiled"])
    kept["cost"] = [row for row in kept.get("cost", []) if (row["model"], row["compiled"]) != key] + rows
    save(kept, ask.output)
    show_cost(kept["cost"])


def save(values: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**values, "versions": versions()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
