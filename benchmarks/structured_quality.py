"""Perplexity of a model made smaller in many ways to the same number of parameters, and how far from dense it is.

A row is a method (`structured_rows.py`), a column the share of the parameters of its blocks that goes. Each cell is
made in a process of its own and written at once, as those of `quality.py`: whatever was stopped goes on where it was,
and `--methods`, `--columns` and `--seed` say which cells are wanted. Texts are as in `quality_texts.py`.

    make bench-structured-stories     # every row on a model of 15M
    make bench-structured-smollm2     # SmolLM2-135M, calibrated on C4

usage: python -m benchmarks.structured_quality --model DIR --calibration SPEC --evaluation SPEC ... --output FILE
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks import quality_worker as worker
from benchmarks.quality_cells import Cell, CellFile, code_commit
from benchmarks.quality_texts import TextSpec
from benchmarks.structured_rows import COLUMNS, ROWS, Row, chosen_masks
from benchmarks.structured_table import structured_table
from gradprobe_hf import GradProbeConfig, RecoveryConfig, recover_pretrained
from gradprobe_hf.checkpoint.smaller import save_smaller
from gradprobe_hf.data.batches import Batches
from gradprobe_hf.data.text.packing import WindowSpec
from gradprobe_hf.data.text.self_generated import KeptText
from gradprobe_hf.data.text.text_options import SELF
from gradprobe_hf.data.windows import Writing, load_batches
from gradprobe_hf.estimation.peak import peak_memory
from gradprobe_hf.evaluation.divergence import PairedMeasurement, measure_pair
from gradprobe_hf.model.passes.upcast import upcast_products
from gradprobe_hf.report.build import versions
from gradprobe_hf.run.apply import applied
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.run.decide import conclude, decide_pruning
from gradprobe_hf.run.decision import PruningDecision
from gradprobe_hf.run.diagnostics import Diagnostics
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.structures.plan import Plan
from gradprobe_hf.structures.removal import Removal

MADE_BY = ("benchmarks/structured_quality.py", "benchmarks/structured_rows.py")  # beside what decides every cell
NEAR = 0.001  # of the parameters of the blocks: how far a shape may be from the column's


@dataclass(frozen=True)
class Task:
    """One cell to make.

    Attributes:
        settings, commit: as of `quality_worker.CellTask`.
        recovery_steps: of rows that are trained.
        rates: learning rates to train these with; the one with the least held-out divergence is the row's.
        folder: of this run: what the model writes is kept there, for all cells.
    """

    protocol: worker.Protocol
    method: str
    column: str
    seed: int
    settings: dict[str, Any]
    commit: str
    recovery_steps: int
    rates: tuple[float, ...]
    folder: Path


def make_cell(task: Task) -> tuple[Cell, dict[str, str]]:
    """One cell, and the versions of what made it.

    Raises:
        quality_worker.OtherSettingsError: the file's settings are of another model or text.
        ValueError: what pruning raises.
    """
    bench = worker.Bench(task.protocol)
    bench.check(task.settings)
    with upcast_products(bench.model):
        return _cell(bench, ROWS[task.method], task), versions()


def _cell(bench: worker.Bench, row: Row, task: Task) -> Cell:
    context = _context(bench, row, task)
    begun = time.perf_counter()
    masks, diagnostics = chosen_masks(context, row), Diagnostics()
    decision = decide_pruning(context) if masks is None else conclude(context, masks, diagnostics)
    assert decision.removal is not None, "whole structures go"
    seconds, peak = time.perf_counter() - begun, peak_memory()["peak_resident_bytes"]
    held_out = dict[str, float]()
    if row.recovered:
        found, held_out = _recovered(bench, context, decision, task, row)
    else:
        found = bench.measured(context, decision, task.method)
    dense, blocks = _parameters(context)
    apart = {name: one.divergence for name, one in found.items() if one.divergence is not None}
    return Cell(
        method=task.method,
        seed=task.seed,
        column=task.column,
        zeros=dense - decision.removal.parameters(context.model),
        weights=blocks,
        perplexity={name: one.pruned.perplexity or float("nan") for name, one in found.items()},
        seconds=round(seconds, 1),
        peak_bytes=peak,
        passes=decision.diagnostics.passes,
        kl={name: round(one.kl, worker.DECIMALS) for name, one in apart.items()},
        agreement={name: round(one.top1_agreement, worker.DECIMALS) for name, one in apart.items()},
        calibration=context.calibration.fingerprint,
        options={
            "structure": dict(decision.removal.plan.going),
            **({"recovery_steps": task.recovery_steps, "held_out_kl": held_out} if row.recovered else {}),
        },
        commit=task.commit,
    )


def _context(bench: worker.Bench, row: Row, task: Task) -> RunContext:
    own = task.protocol
    shape = _shape(bench, row.axis, float(task.column))
    common: dict[str, Any] = {"num_samples": own.num_samples, "sequence_length": own.sequence_length, "seed": task.seed}
    config = GradProbeConfig(**shape, **row.options, **common, batch_size=own.batch_size)
    return replace(worker.bench_context(bench), config=config, calibration=_calibration(bench, row, task))


def _calibration(bench: worker.Bench, row: Row, task: Task) -> Batches:
    own = task.protocol
    if not row.own_text:
        return bench.windows(TextSpec.parse(own.calibration).read(), "calibration", own.num_samples, task.seed)
    return load_batches(
        _half_own_text(task),
        WindowSpec(own.num_samples, own.sequence_length, own.batch_size, task.seed),
        part="calibration",
        model=bench.model,
        processing_class=bench.tokenizer,
        writing=Writing(kept=KeptText(task.folder / "own.safetensors", own.model, Processes())),
    )


def _half_own_text(task: Task) -> dict[str, float]:
    """The calibration text and what the model writes, in equal parts."""
    source = TextSpec.parse(task.protocol.calibration).read()
    if not isinstance(source, str):  # a part of a file: mixtures name their texts
        (task.folder / "calibration.txt").write_text("\n\n".join(source), encoding="utf-8")
        source = str(task.folder / "calibration.txt")
    return {source: 1, SELF: 1}


def _shape(bench: worker.Bench, axis: str, share: float) -> dict[str, Any]:
    """What the configuration says of a column: as many parameters as so many whole blocks have.

    Raises:
        ValueError: no number of channels comes near to that.
    """
    model, targets = bench.model, bench.targets
    blocks = len({target.block for target in targets})
    whole = max(1, round(share * blocks))

    def left(**going: int) -> int:
        return Removal.example(Plan.of(model, targets, going)).parameters(model)

    dense, wanted = left(), left(blocks=whole)
    if axis == "blocks":
        return {"structure": {"blocks": whole}}
    going = {"blocks": whole // 2} if axis == "both" and whole > 1 else {}
    channels = round((left(**going) - wanted) / (left(**going) - left(**going, ffn=1)))
    going |= {"ffn": channels}
    if abs(left(**going) - wanted) > NEAR * (dense - wanted) / whole * blocks:
        raise ValueError(f"{going} does not leave the parameters that {whole} blocks do: {left(**going):,}, {wanted:,}")
    if axis == "auto":  # as many as the largest of the others
        return {"structure": "auto", "params": max(wanted, left(**going))}
    return {"structure": going}


def _parameters(context: RunContext) -> tuple[int, int]:
    """Those of the model, and those of all of its blocks."""
    plan = Plan.of(context.model, context.targets, {"blocks": 1})
    dense = Removal(plan).parameters(context.model)
    return dense, (dense - Removal.example(plan).parameters(context.model)) * len(plan.blocks)


def _recovered(
    bench: worker.Bench, context: RunContext, decision: PruningDecision, task: Task, row: Row
) -> tuple[dict[str, PairedMeasurement], dict[str, float]]:
    """What is left, written, trained towards the dense model on the row's text, and measured beside it.

    Returns:
        By text, what the best learning rate came to; by learning rate, the least divergence on the windows held out.
    """
    assert decision.removal is not None, "whole structures go"
    text = _half_own_text(task) if row.trained_on_own_text else TextSpec.parse(task.protocol.calibration).read()
    held_out = dict[str, float]()
    best: PreTrainedModel | None = None
    with tempfile.TemporaryDirectory() as folder:
        targets = [*context.targets, *decision.new_weights.vectors]
        with applied(bench.model, targets, decision.masks, keep=False, new_weights=decision.new_weights):
            save_smaller(Path(folder), bench.model, decision.removal)
        for rate in task.rates:
            made = recover_pretrained(
                AutoModelForCausalLM.from_pretrained(folder, dtype=task.protocol.dtype),
                bench.model,
                RecoveryConfig(
                    steps=task.recovery_steps,
                    learning_rate=rate,
                    sequence_length=task.protocol.sequence_length,
                    seed=task.seed,
                ),
                text=text,
                evaluation=False,
                processing_class=bench.tokenizer,
                progress=False,
            )
            assert made.report.recovery is not None, "it was trained"
            least = min(made.report.recovery["held_out"].values())
            if least < min(held_out.values(), default=math.inf):
                best = made.model.eval()
            held_out[f"{rate:g}"] = round(least, worker.DECIMALS)
    assert best is not None, "the divergence of one of them is a number"
    found = {}
    for name, batches in bench.texts.items():
        dense = context.workload_on(batches)
        found[name] = measure_pair(dense, replace(dense, model=best), label=f"{task.method}: {name}")
    return found, held_out


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--calibration", required=True, metavar="SPEC")
    parser.add_argument("--evaluation", required=True, nargs="+", metavar="SPEC")
    parser.add_argument("--columns", nargs="+", default=list(COLUMNS), metavar="SHARE")
    parser.add_argument("--methods", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="NAME")
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="draws the calibration windows")
    parser.add_argument("--num-samples", type=int, default=32)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--evaluation-samples", type=int, default=24, help="windows, of a text that does not say")
    parser.add_argument("--recovery-steps", type=int, default=50)
    parser.add_argument(
        "--recovery-rates",
        type=float,
        nargs="+",
        default=[RecoveryConfig().learning_rate],
        help="learning rates: a row is trained with each, and has the one with the least held-out divergence",
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--fresh", action="store_true", help="forget the cells of earlier runs")
    parser.add_argument("--mixed", action="store_true", help="keep cells that other code has made")
    return parser.parse_args()


def main() -> None:
    args = parsed()
    file = CellFile(args.output, code_commit(*MADE_BY), args.fresh, args.mixed)
    protocol = worker.Protocol(
        model=str(args.model),
        dtype=args.dtype,
        calibration=args.calibration,
        evaluation=tuple(args.evaluation),
        num_samples=args.num_samples,
        sequence_length=args.sequence_length,
        batch_size=args.batch_size,
        windows=args.evaluation_samples,
        blocks_per_step=1,
    )
    if file.dense is None:
        file.begin(*worker.alone(worker.measure_dense, protocol))
    assert file.settings is not None, "known since the dense model was measured"
    failed = []
    names = [name for name in ROWS if name in args.methods]
    wanted = [(name, seed, column) for seed in args.seed for column in args.columns for name in names]
    with tempfile.TemporaryDirectory() as folder:
        for method, seed, column in [key for key in wanted if key not in file.cells]:
            recovery = args.recovery_steps, ROWS[method].rates or tuple(args.recovery_rates)
            task = Task(protocol, method, column, seed, file.settings, file.commit, *recovery, Path(folder))
            try:
                file.add(*worker.alone(make_cell, task))
            except Exception as error:  # one cell is no reason to lose the others
                failed.append(f"{method}, {column}, seed {seed}")
                print(f"{failed[-1]} failed: {type(error).__name__}: {error}", file=sys.stderr)
    print(structured_table(file.to_dict() | {"made_by": args.output.stem}))
    if failed:
        sys.exit(f"failed: {'; '.join(failed)}. The same command tries again what is missing.")


if __name__ == "__main__":
    main()
