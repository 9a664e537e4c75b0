"""What the training callbacks cost: the share of a step that each takes, and the memory of its masks."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._dynamo.utils import counters

from gradprobe_hf.estimation.peak import peak_memory
from gradprobe_hf.model.loading.load import load_model
from gradprobe_hf.training import (
    SelectiveUpdateCallback,
    SparsityCallback,
    SpikeAwareClip,
    StatePruningCallback,
    StepCallback,
)

EVERY = 50  # steps between two updates of the mask whose cost is measured


@dataclass(frozen=True)
class Fitting:
    """One model that is fine-tuned on one batch of random tokens: what a step costs does not depend on them.

    Attributes:
        trained: the model, or what torch.compile made of it.
    """

    model: Any
    trained: Any
    optimizer: torch.optim.Optimizer
    rows: Tensor

    def step(self, callback: StepCallback | None = None) -> float:
        """Seconds of one step, with a callback or without."""
        start = time.perf_counter()
        if callback:
            callback.add_hooks()
        self.trained(input_ids=self.rows, labels=self.rows, use_cache=False).loss.backward()
        if callback:
            callback.remove_hooks()
            callback.step += 1
            callback.before_step()
        self.optimizer.step()
        if callback:
            callback.after_step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start


def cost(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Steps of fine-tuning with and without each callback, in turns, so that a noisy machine disturbs both alike.

    A callback that works every so many steps is timed by itself, and its share is of the steps in between.
    """
    torch.set_float32_matmul_precision("high")
    model = load_model(args.model, dtype=torch.float32)
    model.train()
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(model.config.vocab_size, (args.batch_size, args.window), generator=generator)
    trained = torch.compile(model) if args.compile else model
    fitting = Fitting(model, trained, torch.optim.AdamW(model.parameters(), lr=1e-5), rows)
    fitting.step()  # compiles, and fills the optimizer's state
    state = pruned_by_state(fitting)
    every_step = (SparsityCallback("from-zeros"), SelectiveUpdateCallback(fraction=0.5), SpikeAwareClip(warmup=1))
    found = [cost_of(callback, fitting, args.rounds) for callback in every_step]
    bare = statistics.median(row["step_seconds"] for row in found)
    update = statistics.median(seconds_of(state.update) for _ in range(args.rounds))
    found.append(
        {
            "callback": f"StatePruningCallback(every={EVERY})",
            "share": update / (EVERY * bare),
            "step_seconds": bare,
            "update_seconds": update,
        }
    )
    shared = {
        "compiled": args.compile,
        "model": Path(args.model).name,
        "batch": f"{args.batch_size} x {args.window}",
        "tokens_per_second": args.batch_size * args.window / bare,
        "graphs": counters["stats"]["unique_graphs"] if args.compile else None,
        "peak_bytes": peak_memory()["peak_resident_bytes"],
        "threads": torch.get_num_threads(),
    }
    return [{**row, **shared} for row in found]


def pruned_by_state(fitting: Fitting) -> StatePruningCallback:
    """A callback that has pruned half of the weights, and whose updates can be timed by themselves."""
    callback = StatePruningCallback(
        0.5, begin_step=1, end_step=10**6, every=10**6, initial_sparsity=0.5, schedule="linear"
    )
    callback.start(fitting.model, fitting.optimizer)
    fitting.step(callback)
    callback.finish()
    return callback


def cost_of(callback: StepCallback, fitting: Fitting, rounds: int) -> dict[str, Any]:
    """The row of a callback that works at every step."""
    callback.start(fitting.model, fitting.optimizer, step=2)
    times = [(fitting.step(), fitting.step(callback)) for _ in range(rounds)]
    callback.finish()
    without, with_it = (statistics.median(column) for column in zip(*times, strict=True))
    row = {"callback": type(callback).__name__, "share": with_it / without - 1, "step_seconds": without}
    if isinstance(callback, SparsityCallback) and callback.keeper:
        weights = sum(target.numel for target in callback.keeper.targets.values())
        row["bytes_per_weight"] = callback.keeper.nbytes / weights
    return row


def seconds_of(action: Callable[[], Any]) -> float:
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
