"""Peak memory of whole runs, each in a process of its own: load, probe twice, decide, save.

SmolLM2-135M in memory, with blocks recomputed, and read from disk, with every kind of accumulators; then a model of
Mistral-7B's shape (its configuration, random weights) read from disk, pruned to 50%, saved, and inspected. Beside each
stands what `gradprobe estimate` says. On a machine with a GPU, `--gpu` probes the large model resident on it.

usage: python benchmarks/memory.py --model DIR [--large DIR] [--rows NAME ...] [--gpu]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor
from transformers import MistralConfig, PreTrainedModel

from gradprobe_hf import GradProbeConfig, prune_pretrained
from gradprobe_hf.checkpoint.inspect import inspect_checkpoint
from gradprobe_hf.estimation.estimate import estimate
from gradprobe_hf.estimation.machine import process_bytes
from gradprobe_hf.model.loading import load_config, load_model, load_processing_class, skeleton
from gradprobe_hf.model.loss import summed_loss
from gradprobe_hf.model.patches import checkpointed, checkpointed_layers, eval_mode, frozen
from gradprobe_hf.model.saving import LARGEST_SHARD
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.report.build import peak_memory, versions

RESULTS = Path(__file__).parent / "results" / "memory.json"
RUNS = Path(__file__).parent.parent / "runs"
KINDS = ("float32", "bfloat16", "int8")
SMALL: dict[str, Any] = {"num_samples": 4, "sequence_length": 256, "batch_size": 1}
LARGE: dict[str, Any] = {"num_samples": 2, "sequence_length": 256, "batch_size": 2}

# What each row is run with: settings of the configuration, and where the weights are.
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
}


def make_large(folder: Path) -> None:
    """A checkpoint of Mistral-7B's shape with random bfloat16 weights, made shard by shard; whole or not at all."""
    config = MistralConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=32768,
        sliding_window=None,
        architectures=["MistralForCausalLM"],
        dtype="bfloat16",
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        whole = Path(scratch) / "whole"
        whole.mkdir()
        weight_map: dict[str, str] = {}
        for number, shapes in enumerate(_portions(skeleton(config))):
            name = f"model-{number:05d}.safetensors"
            save_file({key: _random(shape, generator) for key, shape in shapes.items()}, whole / name, {"format": "pt"})
            weight_map |= dict.fromkeys(shapes, name)
        index = {"metadata": {}, "weight_map": weight_map}
        (whole / "model.safetensors.index.json").write_text(json.dumps(index))
        config.save_pretrained(whole)
        whole.rename(folder)


def _portions(model: PreTrainedModel) -> Iterator[dict[str, torch.Size]]:
    portion: dict[str, torch.Size] = {}
    size = 0
    for name, parameter in model.named_parameters():
        portion[name] = parameter.shape
        size += parameter.nbytes
        if size >= LARGEST_SHARD:
            yield portion
            portion, size = {}, 0
    if portion:
        yield portion


def _random(shape: torch.Size, generator: torch.Generator) -> Tensor:
    if len(shape) == 1:  # a norm
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02, generator=generator)


def random_tokens(model: str, num_samples: int, sequence_length: int, batch_size: int) -> list[dict[str, Tensor]]:
    """Random weights make no more of text than of this."""
    vocabulary = load_config(model).vocab_size
    ids = torch.randint(vocabulary, (num_samples, sequence_length), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": rows} for rows in ids.split(batch_size)]


def run_row(name: str, model: str, large: bool, scratch: str) -> dict[str, Any]:
    """One row, in this process."""
    base = process_bytes()
    if name.startswith("bare"):
        return {"seconds": {"bare pass": bare_pass(model, random_tokens(model, **LARGE))}}
    config = config_of(name, large)
    output = Path(scratch) / "pruned"
    result = prune_pretrained(
        model,
        config,
        calibration=random_tokens(model, **LARGE) if large else "pydoc",
        evaluation=False,
        apply=False,
        output_dir=output,
        offload_folder=scratch,
        device_map="disk" if name.startswith("from disk") else None,
        dtype="bfloat16",
        progress=False,
    )
    peak = peak_memory()
    values = {
        "peak_bytes": peak["peak_resident_bytes"],
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
    settings, shape = (LARGE_ROWS, LARGE) if large else (SMALL_ROWS, SMALL)
    return GradProbeConfig(sparsity=0.5, **settings[name], **shape)


def estimated_peak(model: str, config: GradProbeConfig, name: str, base: int) -> int | None:
    """What `gradprobe estimate` says of the same run, in a process of so many bytes before it."""
    meta = skeleton(load_config(model), dtype="bfloat16")
    found = estimate(meta, find_targets(meta), config, base=base, timing=False)
    wanted = {"resident": "resident", "checkpointed": "checkpointed", "from disk": "offloaded"}[name.split(",")[0]]
    return next((row.peak("host") for row in found.placements if row.name == wanted), None)


def bare_pass(model_id: str, batches: list[dict[str, Tensor]]) -> float:
    """Seconds of forward and backward from disk that compute every target's weight gradient and drop it.

    The mean of two passes, as a run has two probes.
    """
    model = load_model(model_id, device_map="disk", dtype="bfloat16")
    layers = checkpointed_layers(model)
    with _with_gradients(model), frozen(model), eval_mode(model), checkpointed(model, layers), torch.enable_grad():
        start = time.perf_counter()
        for batch in batches * 2:
            summed_loss(model, batch)[0].backward()
        return (time.perf_counter() - start) / 2


class _Differentiated(torch.autograd.Function):
    """The weight as a node of the graph, so that autograd computes its gradient, which is then let go."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, weight: Tensor) -> Tensor:  # noqa: ARG004
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:  # noqa: ARG004
        return None, None


@contextmanager
def _with_gradients(model: PreTrainedModel) -> Iterator[None]:
    anchor = torch.zeros((), requires_grad=True)
    modules = [model.get_submodule(site.module) for target in find_targets(model) for site in target.sites]
    for module in modules:
        module.__dict__["_old_forward"] = partial(_linear, module, anchor)
    yield  # the process ends after it: nothing to put back


def _linear(module: Any, anchor: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, _Differentiated.apply(anchor, module.weight), module.bias)


def in_bfloat16(model: Path) -> Path:
    """The checkpoint as the Hub has it: of float32 files, reading from disk would have to convert each weight."""
    folder = RUNS / f"{model.name}-bfloat16"
    if not folder.exists():
        loaded = load_model(str(model), dtype="bfloat16")
        with tempfile.TemporaryDirectory(dir=RUNS) as scratch:
            whole = Path(scratch) / "whole"
            loaded.save_pretrained(whole)
            load_processing_class(loaded).save_pretrained(whole)
            whole.rename(folder)
    return folder


def on_gpu(model_id: str) -> dict[str, Any] | None:
    """The large model resident on one device: time, memory, model FLOP utilisation, and how busy the device is."""
    if not torch.cuda.is_available():
        print("no GPU here: its row is left out")
        return None
    shape: dict[str, Any] = {"num_samples": 128, "sequence_length": 2048, "batch_size": 4}
    batches = random_tokens(model_id, **shape)
    config = GradProbeConfig(sparsity=0.5, fisher="factored", checkpointing=True, **shape)
    busy: list[float] = []
    with _sampled(torch.cuda.utilization, busy):
        result = prune_pretrained(
            model_id, config, calibration=batches, evaluation=False, apply=False, device_map="cuda", dtype="bfloat16"
        )
    probes = [result.report.timings[stage] for stage in ("probe 0", "probe 1")]
    meta = skeleton(load_config(model_id), dtype="bfloat16")
    found = estimate(meta, find_targets(meta), config, timing=True)
    useful = found.work["resident"].flops  # of both probes; what checkpointing computes again does not count
    rate = found.flops_per_second
    return {
        "row": f"resident on {torch.cuda.get_device_name()}",
        "large": True,
        "seconds": {stage: round(value, 1) for stage, value in result.report.timings.items()},
        "peak_bytes": peak_memory()["peak_resident_bytes"],
        "peak_device_bytes": torch.cuda.max_memory_allocated(),
        "utilisation_of_measured_matmul": useful / sum(probes) / rate if rate else None,
        "device_busy": sum(busy) / len(busy) / 100 if busy else None,
        "wall_seconds": round(sum(result.report.timings.values()), 1),
    }


@contextmanager
def _sampled(read: Callable[[], float], into: list[float]) -> Iterator[None]:
    over = threading.Event()

    def sample() -> None:
        while not over.wait(0.5):
            into.append(read())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def read_through(model: Path) -> None:
    """Every row begins with the model's files in the page cache: what the row before left there would decide else."""
    for path in sorted(model.glob("*.safetensors")):
        with open(path, "rb", buffering=0) as file:
            while file.read(2**24):
                pass


def measured(name: str, model: Path, large: bool) -> dict[str, Any]:
    """One row, in a process of its own."""
    read_through(model)
    with tempfile.TemporaryDirectory(dir=RUNS) as scratch:
        command = [sys.executable, __file__, "--model", str(model), "--child", name, "--scratch", scratch]
        start = time.perf_counter()
        done = subprocess.run([*command, *(["--is-large"] if large else [])], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{name} failed:\n{done.stderr[-2000:]}")
    values = json.loads(done.stdout.splitlines()[-1])
    return {"row": name, "large": large, **values, "wall_seconds": round(time.perf_counter() - start, 1)}


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("model", "row", "peak", "estimated", "accumulators", "probes", "all")
    for row in rows:
        seconds = row["seconds"]
        probes = sum(value for stage, value in seconds.items() if stage.startswith("probe")) or seconds.get("bare pass")
        table.add_row(
            "Mistral-7B-shaped" if row["large"] else "SmolLM2-135M",
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
    path.write_text(json.dumps({"settings": settings, "rows": rows, "versions": versions()}, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--large", type=Path, help="folder of the large model, made there if it is missing")
    parser.add_argument("--rows", nargs="+", help="only these rows")
    parser.add_argument("--gpu", action="store_true", help="the large model on a GPU, nothing else")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--scratch", help=argparse.SUPPRESS)
    parser.add_argument("--is-large", action="store_true", help=argparse.SUPPRESS)
    ask = parser.parse_args()
    if ask.child:
        print(json.dumps(run_row(ask.child, str(ask.model), ask.is_large, ask.scratch)))
        return
    RUNS.mkdir(exist_ok=True)
    kept = json.loads(ask.output.read_text())["rows"] if ask.output.exists() else []
    done = {(row["large"], row["row"]): row for row in kept}
    plan = [] if ask.gpu else [(False, name, in_bfloat16(ask.model)) for name in SMALL_ROWS]
    if ask.large:
        if not ask.large.exists():
            make_large(ask.large)
        plan += [] if ask.gpu else [(True, name, ask.large) for name in LARGE_ROWS]
        if ask.gpu and (row := on_gpu(str(ask.large))):
            done[True, row["row"]] = row
            write(ask.output, list(done.values()))
    for large, name, model in plan:
        if ask.rows and name not in ask.rows:
            continue
        done[large, name] = measured(name, model, large)
        write(ask.output, list(done.values()))
    show(list(done.values()))


if __name__ == "__main__":
    main()
