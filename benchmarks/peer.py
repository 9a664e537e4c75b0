"""Prune a model with llm-compressor: what `quality.py --peers PYTHON` runs, with the Python of another environment.

    python3 -m venv peers && peers/bin/pip install llmcompressor torch==2.13.0
    make bench-quality PEERS=peers/bin/python

It gets the very windows that the other rows are calibrated on. Nothing of this project is imported, because the two
need different versions of transformers.

usage: python benchmarks/peer.py MODEL WINDOWS OUTPUT --method sparsegpt|wanda --sparsity F [--pattern N:M] [--dtype D]
    WINDOWS  a safetensors file with input_ids [windows, tokens]
    OUTPUT   a safetensors file: name -> weight [out, in] of every linear map but the head; its metadata has, as
             JSON under "about", seconds, peak_bytes (of the whole process) and versions
"""

from __future__ import annotations

import argparse
import json
import time
from importlib.metadata import version
from pathlib import Path

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

MODIFIERS = {"sparsegpt": SparseGPTModifier, "wanda": WandaPruningModifier}
UNSTRUCTURED = "0:0"
PACKAGES = ("llmcompressor", "transformers", "torch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("windows")
    parser.add_argument("output")
    parser.add_argument("--method", required=True, choices=sorted(MODIFIERS))
    parser.add_argument("--sparsity", required=True, type=float)
    parser.add_argument("--pattern", default=UNSTRUCTURED)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    windows = load_file(args.windows)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype)
    rows = {"input_ids": windows.tolist(), "attention_mask": torch.ones_like(windows).tolist()}
    recipe = MODIFIERS[args.method](sparsity=args.sparsity, mask_structure=args.pattern, ignore=["re:.*lm_head.*"])
    begun = time.perf_counter()
    oneshot(
        model=model,
        dataset=Dataset.from_dict(rows),
        recipe=recipe,
        max_seq_length=windows.shape[1],
        num_calibration_samples=len(windows),
    )
    seconds = time.perf_counter() - begun
    changed = {
        f"{name}.weight": module.weight.detach().contiguous()
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    about = {
        "seconds": round(seconds, 1),
        "peak_bytes": peak_memory(),
        "versions": {package: version(package) for package in PACKAGES},
    }
    save_file(changed, args.output, metadata={"about": json.dumps(about)})


def peak_memory() -> int | None:
    """Bytes of this process at its highest, on Linux (proc(5)); getrusage would count its large parent too."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
