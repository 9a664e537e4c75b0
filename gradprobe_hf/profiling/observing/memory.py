"""Memory at the end of a step."""

from __future__ import annotations

import torch

from gradprobe_hf.estimation.machine import available_bytes, process_bytes
from gradprobe_hf.estimation.peak import begin_peak
from gradprobe_hf.profiling.observing.observation import MemorySample


def memory_now(device: str) -> MemorySample:
    """Of a device; its peak is counted from here on anew."""
    here = torch.device(device)
    if here.type not in ("cpu", "cuda"):
        return MemorySample(process_bytes(), 0)
    sample = MemorySample(process_bytes(), available_bytes(here))
    if here.type == "cpu":
        return sample
    used = torch.cuda.memory_allocated(here), torch.cuda.memory_reserved(here), torch.cuda.max_memory_allocated(here)
    begin_peak(here)
    return MemorySample(sample.process, sample.free, *used)
