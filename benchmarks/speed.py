"""What pruning costs, against the passes it cannot do without, in one process on the same batches.

The yardstick is two bare passes: forward and backward with only the target matrices requiring gradients, which is what
a training step spends before its optimizer. Bare passes and probes take turns, and the medians are compared, so that a
noisy machine disturbs both alike. Then the stages after the probes are timed on the same statistics.

    make bench-speed        # SmolLM2-135M, into results/speed.json

usage: python -m benchmarks.speed --model DIR [--fisher blend ...] [--rounds 3] [--batches 1] [--batch-size 4]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from gradprobe_hf import GradProbeConfig
from gradprobe_hf.data.batches import Batches
from gradprobe_hf.data.windows import WindowSpec, load_batches
from gradprobe_hf.estimation.peak import peak_memory
from gradprobe_hf.model.loading.load import load_model
from gradprobe_hf.model.passes.loss import summed_loss
from gradprobe_hf.model.passes.upcast import upcast_products
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.report.build import versions
from gradprobe_hf.run.apply import applied
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.run.diagnostics import Diagnostics
from gradprobe_hf.run.probing.probe_pair import ProbePair
from gradprobe_hf.scores.fisher import FISHER_ESTIMATES

RESULTS = Path(__file__).parent / "results"
SPARSITY = 0.5
STAGES = ("bare pass", "probe 0", "candidates", "probe 1", "selection", "apply")


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what the action returns."""
    start = time.perf_counter()
    made = action()
    return time.perf_counter() - start, made


def bare_pass(context: RunContext, batches: Batches) -> None:
    """Forward and backward, gradients of the targets only, accumulated as autograd does."""
    model, wanted = context.model, {target.parameter for target in context.targets}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in wanted)
    for batch in batches:
        summed_loss(model, batch)[0].backward()
    for parameter in model.parameters():
        parameter.grad = None


def apply_and_undo(context: RunContext, masks: Any) -> None:
    with applied(context.model, context.targets, masks, keep=False):
        pass


def one_round(context: RunContext) -> tuple[dict[str, list[float]], int]:
    """Seconds of each stage, and bytes of the accumulators; a bare pass before the probes, and one between them."""
    pair = ProbePair(context, context.targets, Diagnostics())
    seconds: dict[str, list[float]] = {stage: [] for stage in STAGES}

    def run(stage: str, action: Callable[[], Any]) -> Any:
        took, made = timed(action)
        seconds[stage].append(took)
        return made

    run("bare pass", lambda: bare_pass(context, context.calibration))
    run("probe 0", pair.probe_as_served)
    candidates = run("candidates", lambda: pair.propose(SPARSITY))
    run("probe 1", lambda: pair.probe_shrunk(candidates))
    run("bare pass", lambda: bare_pass(context, context.calibration))
    masks = run("selection", lambda: pair.masks_at(SPARSITY))
    total = sum(target.numel for target in context.targets)
    assert sum(int(mask.sum()) for mask in masks.values()) == round(SPARSITY * total), "the budget is exact"
    run("apply", lambda: apply_and_undo(context, masks))
    return seconds, pair.diagnostics.accumulator_bytes


def measured(context: RunContext, rounds: int) -> dict[str, Any]:
    """The row of one Fisher estimate."""
    first = context.calibration.items[:1]
    bare_pass(context, Batches(first, "", 0, 0, ""))  # warm up
    times: dict[str, list[float]] = {stage: [] for stage in STAGES}
    accumulator_bytes = 0
    for _ in range(rounds):
        seconds, accumulator_bytes = one_round(context)
        for stage, values in seconds.items():
            times[stage] += values
    medians = {stage: statistics.median(values) for stage, values in times.items()}
    ratio = (medians["probe 0"] + medians["probe 1"]) / (2 * medians["bare pass"])
    after = medians["candidates"] + medians["selection"] + medians["apply"]
    return {
        "fisher": context.config.fisher,
        "target_weights": sum(target.numel for target in context.targets),
        "accumulator_bytes": accumulator_bytes,
        "seconds": {stage: [round(value, 2) for value in values] for stage, values in times.items()},
        "medians": {stage: round(value, 2) for stage, value in medians.items()},
        "two_probes_over_two_bare_passes": round(ratio, 3),
        "after_the_probes_seconds": round(after, 2),
    }


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
    parser.add_argument("--fisher", nargs="+", default=list(FISHER_ESTIMATES), choices=list(FISHER_ESTIMATES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--output", type=Path, default=RESULTS / "speed.json")
    args = parser.parse_args()
    model = load_model(args.model, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    batches = load_batches(
        "pydoc",
        WindowSpec(args.batches * args.batch_size, args.sequence_length, args.batch_size),
        part="calibration",
        model=model,
        processing_class=tokenizer,
    )
    targets = find_targets(model)
    rows = []
    for fisher in args.fisher:
        config = GradProbeConfig(sparsity=SPARSITY, probes=2, fisher=fisher)
        context = RunContext(model, tokenizer, targets, config, batches, Batches.none(), progress=False)
        with upcast_products(model):  # as a run does
            rows.append(measured(context, args.rounds))
    settings = {
        "model": Path(args.model).name,
        "batches": f"{args.batches} x {args.batch_size} x {args.sequence_length}, bfloat16",
        "rounds": args.rounds,
        "threads": torch.get_num_threads(),
    }
    values = {"settings": settings, "rows": rows, "memory": peak_memory(), "versions": versions()}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(values, indent=2) + "\n")
    show(rows)


if __name__ == "__main__":
    main()
