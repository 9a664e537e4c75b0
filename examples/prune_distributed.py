"""Prune with several processes that share the calibration batches: on the devices of one machine, or of many.

usage: accelerate launch --config_file CONFIG examples/prune_distributed.py MODEL OUTPUT [TEXT]
       torchrun --nproc-per-node 2 examples/prune_distributed.py MODEL OUTPUT [TEXT]

With examples/accelerate_processes.yaml (and with torchrun) every process has a whole model; with
examples/accelerate_fsdp2.yaml the model is sharded over all of them. Every process runs all of this script and ends
with the same masks; the main one writes. A run that was killed goes on from OUTPUT-state.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from transformers.distributed import DistributedConfig

from gradprobe_hf import GradProbeConfig, prune_pretrained


def placement() -> dict[str, Any]:
    """Where this process loads its model, as arguments of `from_pretrained`."""
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":  # what accelerate_fsdp2.yaml asks for
        return {"distributed_config": DistributedConfig(fsdp_size=int(os.environ["WORLD_SIZE"]))}
    if torch.accelerator.is_available():
        return {"device_map": {"": int(os.environ.get("LOCAL_RANK", 0))}}  # a single process may have none
    return {}


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4) or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    model, output, *text = sys.argv[1:]
    result = prune_pretrained(
        model,
        # "best" works here too: of a sharded model a block at a time is gathered for its new weights.
        GradProbeConfig(
            sparsity=0.5,
            preset="balanced",
            # So few and short windows are enough to try it: leave these options out for a model that will be used.
            num_samples=32,
            sequence_length=64,
            batch_size=2,
            evaluation_samples=8,
        ),
        calibration=text[0] if text else "pydoc",
        output_dir=output,
        resume_dir=f"{output}-state",
        **placement(),
    )
    if result.processes.is_main:
        report, execution = result.report, result.report.execution
        print(f"{output}: {report.sparsity:.2%} zeros, {execution['processes']} processes, {execution['placement']}")
