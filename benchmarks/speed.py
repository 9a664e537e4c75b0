"""What pruning costs, against the passes it cannot do without, in one process on the same batches.

The yardstick is two bare passes: forward and backward with only the target matrices requiring gradients, which is what
a training step spends before its optimizer. Bare passes and probes take turns, and the medians are compared, so that a
noisy machine disturbs both alike. Then the stages after the probes are timed on the same statistics.

usage: python benchmarks/speed.py --model DIR [--rounds 3] [--batches 1] [--batch-size 4]
"""

from __future__ import annotations

import argparse
import json
import statistics as stats
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, PreTrainedModel

from gradprobe_hf import GradProbeConfig
from gradprobe_hf.data.batches import Batches
from gradprobe_hf.data.windows import load_batches
from gradprobe_hf.decisions.decision import FISHER_TERMS, candidate_score, keys_of, path_score
from gradprobe_hf.model.loading import load_model
from gradprobe_hf.model.loss import summed_loss
from gradprobe_hf.model.targets import Target, find_targets
from gradprobe_hf.probe.engine import run_probe
from gradprobe_hf.probe.statistics import Statistics
from gradprobe_hf.report.build import peak_memory, versions
from gradprobe_hf.run.apply import applied
from gradprobe_hf.selection.select import select_masks

RESULTS = Path(__file__).parent / "results"


def seconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def bare_pass(model: PreTrainedModel, targets: Sequence[Target], batches: Batches) -> None:
    """Forward and backward, gradients of the targets only, accumulated as autograd does."""
    wanted = {target.name for target in targets}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in wanted)
    for batch in batches:
        summed_loss(model, batch)[0].backward()
    for parameter in model.parameters():
        parameter.grad = None


def measure(
    model: PreTrainedModel, targets: Sequence[Target], batches: Batches, fisher: str, rounds: int
) -> dict[str, Any]:
    config = GradProbeConfig(fisher=fisher)  # type: ignore[arg-type]  # argparse has checked it
    times: dict[str, list[float]] = {
        name: [] for name in ("bare pass", "probe 0", "probe 1", "candidates", "selection", "apply")
    }
    total = sum(target.numel for target in targets)
    bare_pass(model, targets, Batches(batches.items[:1], "", 0, 0, ""))  # warm up
    for _ in range(rounds):
        times["bare pass"].append(seconds(lambda: bare_pass(model, targets, batches)))
        found = Statistics(targets, FISHER_TERMS[config.fisher], model)
        probe = partial(run_probe, model, targets, batches, found, progress=False)
        times["probe 0"].append(seconds(probe))
        score = partial(candidate_score, statistics=found, config=config)
        masks: dict[str, torch.Tensor] = {}
        times["candidates"].append(seconds(lambda: masks.update(select_masks(targets, keys_of(model, score), 0.5))))  # noqa: B023
        found.probe = 1
        times["probe 1"].append(seconds(lambda: probe(shrunk=masks, factor=0.1)))  # noqa: B023
        times["bare pass"].append(seconds(lambda: bare_pass(model, targets, batches)))
        final = partial(path_score, statistics=found, fisher=config.fisher)
        times["selection"].append(seconds(lambda: masks.update(select_masks(targets, keys_of(model, final), 0.5))))  # noqa: B023
        assert sum(int(mask.sum()) for mask in masks.values()) == round(0.5 * total), "the budget is exact"
        times["apply"].append(seconds(lambda: apply_and_undo(model, targets, masks)))  # noqa: B023
    medians = {name: stats.median(values) for name, values in times.items()}
    ratio = (medians["probe 0"] + medians["probe 1"]) / (2 * medians["bare pass"])
    after = medians["candidates"] + medians["selection"] + medians["apply"]
    return {
        "fisher": fisher,
        "target_weights": total,
        "accumulator_bytes": found.nbytes,
        "seconds": {name: [round(value, 2) for value in values] for name, values in times.items()},
        "medians": {name: round(value, 2) for name, value in medians.items()},
        "two_probes_over_two_bare_passes": round(ratio, 3),
        "after_the_probes_seconds": round(after, 2),
    }


def apply_and_undo(model: PreTrainedModel, targets: Sequence[Target], masks: dict[str, torch.Tensor]) -> None:
    with applied(model, targets, masks, keep=False):
        pass


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("fisher", "bare pass", "probe 0", "probe 1", "2 probes / 2 bare", "after the probes", "accumulators")
    for row in rows:
        medians = row["medians"]
        table.add_row(
            row["fisher"],
            *(f"{medians[name]:.1f} s" for name in ("bare pass", "probe 0", "probe 1")),
            f"{row['two_probes_over_two_bare_passes']:.3f}",
            f"{row['after_the_probes_seconds']:.1f} s",
            f"{row['accumulator_bytes'] / 1e6:.0f} MB",
        )
    Console(soft_wrap=True).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--fisher", nargs="+", default=["blend", "sequence", "token", "factored"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--output", type=Path, default=RESULTS / "speed.json")
    ask = parser.parse_args()
    model = load_model(ask.model, dtype=torch.bfloat16).eval()
    batches = load_batches(
        "pydoc",
        part="calibration",
        model=model,
        processing_class=AutoTokenizer.from_pretrained(ask.model),
        samples=ask.batches * ask.batch_size,
        sequence_length=ask.sequence_length,
        batch_size=ask.batch_size,
        seed=0,
    )
    targets = find_targets(model)
    rows = [measure(model, targets, batches, fisher, ask.rounds) for fisher in ask.fisher]
    settings = {
        "model": Path(ask.model).name,
        "batches": f"{ask.batches} x {ask.batch_size} x {ask.sequence_length}, bfloat16",
        "rounds": ask.rounds,
        "threads": torch.get_num_threads(),
    }
    values = {"settings": settings, "rows": rows, "memory": peak_memory(), "versions": versions()}
    ask.output.parent.mkdir(parents=True, exist_ok=True)
    ask.output.write_text(json.dumps(values, indent=2) + "\n")
    show(rows)


if __name__ == "__main__":
    main()
