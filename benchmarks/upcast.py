"""Passes in bfloat16 on this CPU, as torch computes them and with products in float32, beside a model in float32.

    make bench-upcast        # SmolLM2-135M, into results/upcast.json

All three have the same weights. How far bfloat16 is from float32 is measured first, on a few short windows. Then a
round has each pass once of all of them, in turns. On a CPU that has units for bfloat16 the first two are alike. Last, a
few rows by a small and by a large weight, in the loop and by a float32 copy: why few rows are left to the loop.

usage: python -m benchmarks.upcast --model DIR [--rounds 3] [--batch-size 2] [--sequence-length 256]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from gradprobe_hf.bench.result import Timing
from gradprobe_hf.data.batches import Batches
from gradprobe_hf.data.windows import WindowSpec, load_batches
from gradprobe_hf.model.loading.load import load_model
from gradprobe_hf.model.loading.processing import load_processing_class
from gradprobe_hf.model.passes.loss import summed_loss
from gradprobe_hf.model.passes.upcast import needs_upcast, upcast_products
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.report.build import versions

COMPARED_ON = 5, 128  # windows, tokens
FEW, FEW_ROUNDS = (1, 2, 4, 8, 16, 32), 11
RESULTS = Path(__file__).parent / "results"
NATIVE, UPCAST, FLOAT32 = ("bfloat16", "bfloat16, products in float32", "float32")
FORWARD, BACKWARD = PASSES = ("forward", "backward")


class Subject:
    """A model, and how it computes."""

    def __init__(self, way: str, model: PreTrainedModel) -> None:
        self.way, self.model = way, model

    def seconds(self, batch: Mapping[str, Tensor]) -> dict[str, float]:
        """Of each pass over the same tokens."""
        with upcast_products(self.model) if self.way == UPCAST else nullcontext():
            forward, (loss, _) = timed(lambda: summed_loss(self.model, batch))
            backward, _ = timed(loss.backward)
        self.model.zero_grad(set_to_none=True)
        return {FORWARD: forward, BACKWARD: backward}

    def results(self, batch: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
        """The logits of a batch, and the gradients of its loss."""
        with upcast_products(self.model) if self.way == UPCAST else nullcontext():
            with torch.no_grad():
                logits = self.model(**batch).logits
            summed_loss(self.model, batch)[0].backward()
        gradients = [one.grad.float() for one in self.model.parameters() if one.grad is not None]
        self.model.zero_grad(set_to_none=True)
        return {"logits": [logits.float()], "gradients": gradients}


def few_rows(weight: Tensor) -> list[dict[str, Any]]:
    """Milliseconds of few rows by a weight `[out, in]` in bfloat16, of each round."""
    found = []
    for count in FEW:
        rows = torch.randn(count, weight.shape[1], dtype=weight.dtype)
        ways = {"loop": partial(F.linear, rows, weight), "copy": partial(by_copy, rows, weight)}
        taken = [{name: 1000 * timed(way)[0] for name, way in ways.items()} for _ in range(FEW_ROUNDS)]
        found.append({"rows": count} | {name: [round(one[name], 3) for one in taken] for name in ways})
    return found


def by_copy(rows: Tensor, weight: Tensor) -> Tensor:
    return F.linear(rows.float(), weight.float()).to(weight.dtype)


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what the action returns."""
    start = time.perf_counter()
    made = action()
    return time.perf_counter() - start, made


def distance(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The norm of the difference over that of what is exact."""
    apart = sum(float((one - other).square().sum()) for one, other in zip(found, exact, strict=True))
    return float((apart / sum(float(one.square().sum()) for one in exact)) ** 0.5)


def measured(
    subjects: Sequence[Subject], batch: Mapping[str, Tensor], windows: Batches, rounds: int
) -> list[dict[str, Any]]:
    """A row for each subject; the last is what is exact. Args: windows: that results are compared on."""
    rows: list[dict[str, Any]] = [
        {"way": subject.way, "seconds": {name: [] for name in PASSES}, "from_float32": {}} for subject in subjects
    ]
    for window in windows:
        exact = subjects[-1].results(window)
        for row, subject in zip(rows[:-1], subjects[:-1], strict=True):
            for name, found in subject.results(window).items():
                row["from_float32"].setdefault(name, []).append(round(distance(found, exact[name]), 5))
    for _ in range(rounds):
        for row, subject in zip(rows, subjects, strict=True):
            for name, seconds in subject.seconds(batch).items():
                row["seconds"][name].append(round(seconds, 3))
    return rows


def upcast_table(results: Mapping[str, Any]) -> str:
    """A row for each way to compute; seconds are medians."""
    lines = [
        f"| | {' | '.join(PASSES)} | logits from float32 | gradients from float32 |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in results["rows"]:
        seconds = " | ".join(f"{_median(row, name):.2f} s" for name in PASSES)
        lines.append(f"| {row['way']} | {seconds} | {_apart(row, 'logits')} | {_apart(row, 'gradients')} |")
    settings = results["settings"]
    note = (
        f"{settings['model']}, {settings['batch']} tokens of pydoc, {settings['threads']} CPU threads, "
        f"{settings['cpu']}; medians of {settings['rounds']} rounds. From float32: the norm of the difference "
        f"over that of what float32 computes, the mean of {settings['windows']}. Made by `make bench-upcast`."
    )
    return "\n".join([*lines, "", note, "", *_few_rows_table(results["few_rows"])])


def _few_rows_table(results: Mapping[str, Any]) -> list[str]:
    """Medians: in the loop, and by a copy."""
    lines = [f"| rows | {' | '.join(str(count) for count in FEW)} |", f"|---|{'---:|' * len(FEW)}"]
    for shape, found in results.items():
        cells = [f"{statistics.median(one['loop']):.2f} / {statistics.median(one['copy']):.2f}" for one in found]
        lines.append(f"| {shape} | {' | '.join(cells)} |")
    return [*lines, "", f"Milliseconds in the loop / by a float32 copy of the weight, medians of {FEW_ROUNDS} rounds."]


def _median(row: Mapping[str, Any], name: str) -> float:
    return Timing.of(row["seconds"][name]).median


def _apart(row: Mapping[str, Any], what: str) -> str:
    return "" if row["way"] == FLOAT32 else f"{statistics.mean(row['from_float32'][what]):.2%}"


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("", *PASSES, "logits from float32", "gradients from float32")
    for row in rows:
        seconds = [f"{_median(row, name):.2f} s" for name in PASSES]
        table.add_row(row["way"], *seconds, _apart(row, "logits"), _apart(row, "gradients"))
    Console(soft_wrap=True).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--output", type=Path, default=RESULTS / "upcast.json")
    args = parser.parse_args()
    model = load_model(args.model, dtype=torch.bfloat16).eval()
    wide = load_model(args.model, dtype=torch.bfloat16).eval().float()  # the same numbers
    tokenizer = load_processing_class(model)

    def batches(samples: int, length: int, size: int) -> Batches:
        spec = WindowSpec(samples, length, size)
        return load_batches("pydoc", spec, part="calibration", model=model, processing_class=tokenizer)

    batch = batches(args.batch_size, args.sequence_length, args.batch_size).items[0]
    subjects = [Subject(NATIVE, model), Subject(UPCAST, model), Subject(FLOAT32, wide)]
    rows = measured(subjects, batch, batches(*COMPARED_ON, 1), args.rounds)
    settings = {
        "model": Path(args.model).name,
        "batch": f"{args.batch_size} x {args.sequence_length}",
        "rounds": args.rounds,
        "windows": "{} windows of {} tokens".format(*COMPARED_ON),
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "needs_upcast": needs_upcast(torch.bfloat16),
    }
    weights = [model.get_parameter(find_targets(model)[-1].parameter), model.get_output_embeddings().weight]
    few = {"{:,} x {:,}".format(*one.shape): few_rows(one.detach()) for one in weights}
    values = {"settings": settings, "rows": rows, "few_rows": few, "versions": versions()}
    args.output.write_text(json.dumps(values, indent=1) + "\n")
    show(rows)


if __name__ == "__main__":
    main()
