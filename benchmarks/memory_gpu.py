"""The large model of `memory.py` resident on one GPU: time, memory, operations per second, utilisation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.random_checkpoint import random_tokens
from gradprobe_hf import GradProbeConfig, prune_pretrained
from gradprobe_hf.estimation.estimate import estimate
from gradprobe_hf.estimation.peak import peak_memory
from gradprobe_hf.model.loading.load import load_config, skeleton
from gradprobe_hf.model.targets import find_targets

SHAPE: dict[str, Any] = {"num_samples": 128, "sequence_length": 2048, "batch_size": 4}
INTERVAL = 0.5  # seconds between two samples of the utilisation


def row_on_gpu(model_id: str) -> dict[str, Any] | None:
    """The row; None where there is no GPU."""
    if not torch.cuda.is_available():
        print("no GPU here: its row is left out")
        return None
    config = GradProbeConfig(sparsity=0.5, probes=2, fisher="factored", checkpointing=True, **SHAPE)
    busy: list[float] = []
    with _sampled(torch.cuda.utilization, busy):
        result = prune_pretrained(
            model_id,
            config,
            calibration=random_tokens(model_id, **SHAPE),
            evaluation=False,
            apply=False,
            device_map="cuda",
            dtype="bfloat16",
        )
    timings = result.report.timings
    meta = skeleton(load_config(model_id), dtype="bfloat16")
    useful = estimate(meta, find_targets(meta), config).work["resident"].flops  # without what is computed twice
    return {
        "row": f"resident on {torch.cuda.get_device_name()}",
        "large": True,
        "seconds": {stage: round(value, 1) for stage, value in timings.items()},
        "peak_bytes": peak_memory()["peak_resident_bytes"],
        "peak_device_bytes": torch.cuda.max_memory_allocated(),
        "flops_per_second": useful / (timings["probe 0"] + timings["probe 1"]),
        "device_busy": sum(busy) / len(busy) / 100 if busy else None,
        "wall_seconds": round(sum(timings.values()), 1),
    }


@contextmanager
def _sampled(read: Callable[[], float], into: list[float]) -> Iterator[None]:
    over = threading.Event()

    def sample() -> None:
        while not over.wait(INTERVAL):
            into.append(read())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
