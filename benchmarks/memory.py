"""Peak memory of whole runs, each in a process of its own: load, probe twice, decide, save.

SmolLM2-135M in memory, with blocks recomputed, and read from disk, with every kind of accumulators; then a model of
Mistral-7B's shape (its configuration, random weights) read from disk, pruned to 50%, saved, and inspected. Beside each
stands what `gradprobe estimate` says. `--gpu` runs the large model resident on a GPU instead (see `memory_gpu.py`).

The row `from disk, best` takes about four minutes a block of two cores. Ended early, it goes on where it was when it is
called again; its seconds are the sum. With `--blocks` it has the first blocks alone.

    make bench-memory        # into results/memory.json; needs 50 GB of disk

usage: python -m benchmarks.memory --model DIR [--large DIR] [--blocks N] [--rows NAME ...] [--gpu]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.bare_pass import seconds_of_bare_pass
from benchmarks.memory_gpu import row_on_gpu
from benchmarks.quality_cells import write_whole
from benchmarks.random_checkpoint import mistral_config, random_tokens, write_random_checkpoint
from gradprobe_hf import GradProbeConfig, prune_pretrained
from gradprobe_hf.checkpoint.inspect import inspect_checkpoint
from gradprobe_hf.estimation.estimate import estimate
from gradprobe_hf.estimation.machine import process_bytes
from gradprobe_hf.estimation.peak import peak_memory
from gradprobe_hf.model.loading.load import load_config, load_model, skeleton
from gradprobe_hf.model.loading.processing import load_processing_class
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.report.build import versions
from gradprobe_hf.runtime.half_products import has_units

RESULTS = Path(__file__).parent / "results" / "memory.json"
ROOT = Path(__file__).parent.parent
RUNS = ROOT / "runs"
KINDS = ("float32", "bfloat16", "int8")
SMALL: dict[str, Any] = {"num_samples": 4, "sequence_length": 256, "batch_size": 1}
LARGE: dict[str, Any] = {"num_samples": 2, "sequence_length": 256, "batch_size": 2}
PLACEMENTS = {"resident": "resident", "checkpointed": "checkpointed", "from disk": "offloaded"}  # row -> of an estimate

# The options of each row; its name says where the weights are.
SMALL_ROWS: dict[str, dict[str, Any]] = {
    **{f"resident, {kind}": {"checkpointing": False, "accumulator_dtype": kind} for kind in KINDS},
    **{f"checkpointed, {kind}": {"checkpointing": True, "accumulator_dtype": kind} for kind in KINDS},
    **{
        f"from disk, {kind} on disk": {"checkpointing": True, "accumulator_dtype": kind, "accumulator_device": "disk"}
        for kind in KINDS
    },
    "from disk, factored": {"checkpointing": True, "fisher": "factored"},
}
LARGE_ROWS: dict[str, dict[str, Any]] = {
    "bare pass from disk": {},
    "from disk, factored": {"checkpointing": True, "fisher": "factored"},
    "from disk, int8 on disk": {
        "checkpointing": True,
        "fisher": "sequence",
        "accumulator_dtype": "int8",
        "accumulator_device": "disk",
    },
    "from disk, best": {"checkpointing": True, "fisher": "factored", "probes": 1, "update": "admm"},
}
BEST_BLOCKS = 32  # of the large model, in the row above: all


def run_row(name: str, model: str, large: bool, scratch: str) -> dict[str, Any]:
    """One row, in this process."""
    base = process_bytes()
    if name.startswith("bare"):
        return {"seconds": {"bare pass": seconds_of_bare_pass(model, random_tokens(model, **LARGE))}}
    config = config_of(name, large)
    output, state = Path(scratch) / "pruned", state_of(name, model, large)
    result = prune_pretrained(
        model,
        config,
        calibration=random_tokens(model, **LARGE) if large else "pydoc",
        evaluation=False,
        apply=False,
        output_dir=output,
        resume_dir=state,
        progress=False,
        offload_folder=scratch,
        device_map="disk" if name.startswith("from disk") else None,
        dtype="bfloat16",
    )
    values = {
        "peak_bytes": peak_memory()["peak_resident_bytes"],
        "seconds": {stage: round(value, 1) for stage, value in result.report.timings.items()},
        "accumulator_bytes": result.report.memory["accumulator_bytes"],
        "sparsity": result.report.sparsity,
    }
    del result
    inspected = inspect_checkpoint(output)
    assert inspected.zeros == round(0.5 * inspected.weights), "exactly half of the targets are zero in the files"
    values["peak_with_inspection_bytes"] = peak_memory()["peak_resident_bytes"]
    values["inspected_sparsity"] = inspected.zeros / inspected.weights
    return values | {"estimated_bytes": estimated_peak(model, config, name, base)}


def config_of(name: str, large: bool) -> GradProbeConfig:
    options, shape = (LARGE_ROWS, LARGE) if large else (SMALL_ROWS, SMALL)
    return GradProbeConfig(**{"sparsity": 0.5, "probes": 2, **options[name], **shape})


def state_of(name: str, model: str, large: bool) -> Path | None:
    """Where a row that takes hours keeps its state, to go on from; the others begin anew."""
    return RUNS / f"memory-state-{Path(model).name}" if large and config_of(name, large).updates else None


def estimated_peak(model: str, config: GradProbeConfig, name: str, base: int) -> int | None:
    """What `gradprobe estimate` says of the same run, in a process that held `base` bytes before it."""
    meta = skeleton(load_config(model), dtype="bfloat16")
    found = estimate(meta, find_targets(meta), config, base=base)
    wanted = PLACEMENTS[name.split(",")[0]]
    return next((row.peak("host") for row in found.placements if row.name == wanted), None)


def in_bfloat16(model: Path) -> Path:
    """The checkpoint in the dtype it is loaded in: weights on disk in float32 would be converted at every read."""
    folder = RUNS / f"{model.name}-bfloat16"
    if not folder.exists():
        loaded = load_model(str(model), dtype="bfloat16")
        with tempfile.TemporaryDirectory(dir=RUNS) as scratch:
            whole = Path(scratch) / "whole"
            loaded.save_pretrained(whole)
            load_processing_class(loaded).save_pretrained(whole)
            whole.rename(folder)
    return folder


def read_through(model: Path) -> None:
    """Start every row with the model's files in the page cache, whatever the row before has left there."""
    for path in sorted(model.glob("*.safetensors")):
        with open(path, "rb", buffering=0) as file:
            while file.read(2**24):
                pass


def measured(name: str, model: Path, large: bool) -> dict[str, Any]:
    """One row, in a process of its own."""
    read_through(model)
    with tempfile.TemporaryDirectory(dir=RUNS) as scratch:
        command = [sys.executable, "-m", "benchmarks.memory", "--model", str(model.absolute())]
        command += ["--child", name, "--scratch", scratch, *(["--is-large"] if large else [])]
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            raise RuntimeError(f"{name} failed:\n{done.stderr[-2000:]}")
    values = json.loads(done.stdout.splitlines()[-1])
    found = {"row": name, "large": large, **values, "wall_seconds": round(time.perf_counter() - start, 1)}
    return found | {"blocks": load_config(str(model)).num_hidden_layers, "cpu": cpu_units()}


def cpu_units() -> str:
    """What seconds depend on most: whether the CPU multiplies bfloat16 itself."""
    units = ", units for bfloat16" if has_units(torch.device("cpu")) else ""
    return torch.backends.cpu.get_cpu_capability() + units


def large_model(folder: Path, blocks: int) -> Path:
    """The large model with its first blocks alone, made where it is missing."""
    config = mistral_config()
    if blocks != config.num_hidden_layers:
        folder = folder.with_name(f"{folder.name}-{blocks}")
        config.num_hidden_layers = blocks
    if not folder.exists():
        write_random_checkpoint(folder, config)
    return folder


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("model", "row", "peak", "estimated", "accumulators", "probes", "all")
    for row in rows:
        seconds = row["seconds"]
        probes = sum(value for stage, value in seconds.items() if stage.startswith("probe")) or seconds.get("bare pass")
        table.add_row(
            "Mistral-7B-shaped" if row["large"] else "small",
            row["row"],
            f"{row['peak_bytes'] / 1e6:,.0f} MB" if "peak_bytes" in row else "",
            f"{row['estimated_bytes'] / 1e6:,.0f} MB" if row.get("estimated_bytes") else "",
            f"{row['accumulator_bytes'] / 1e6:,.0f} MB" if "accumulator_bytes" in row else "",
            f"{probes:.1f} s",
            f"{row['wall_seconds']:.0f} s",
        )
    Console(soft_wrap=True).print(table)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    settings = {"small": SMALL, "large": LARGE, "threads": torch.get_num_threads()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({"settings": settings, "rows": rows, "versions": versions()}, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--large", type=Path, help="folder of the large model, made there if it is missing")
    parser.add_argument("--blocks", type=int, default=BEST_BLOCKS, help="of the large model in its row 'best'")
    parser.add_argument("--rows", nargs="+", help="only these rows")
    parser.add_argument("--gpu", action="store_true", help="the large model on a GPU, nothing else")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--scratch", help=argparse.SUPPRESS)
    parser.add_argument("--is-large", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(run_row(args.child, str(args.model), args.is_large, args.scratch)))
        return
    if args.gpu and not args.large:
        parser.error("--gpu needs --large DIR, where the large model is or will be")
    RUNS.mkdir(exist_ok=True)
    kept = json.loads(args.output.read_text())["rows"] if args.output.exists() else []
    done = {(row["large"], row["row"]): row for row in kept}
    if args.gpu and (row := row_on_gpu(str(large_model(args.large, mistral_config().num_hidden_layers)))):
        done[True, row["row"]] = row
        write(args.output, list(done.values()))
    plan = [] if args.gpu else [(False, name) for name in SMALL_ROWS]
    plan += [(True, name) for name in LARGE_ROWS] if args.large and not args.gpu else []
    for large, name in plan:
        if args.rows and name not in args.rows:
            continue
        blocks = args.blocks if config_of(name, large).updates else mistral_config().num_hidden_layers
        model = large_model(args.large, blocks) if large else in_bfloat16(args.model)
        done[large, name] = measured(name, model, large)
        write(args.output, list(done.values()))
    show(list(done.values()))


if __name__ == "__main__":
    main()
