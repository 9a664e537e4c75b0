"""The highest point of memory, in bytes: since a process began, or since it was last asked to count anew."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")  # proc(5)
_CLEAR = Path("/proc/self/clear_refs")
_CPU = torch.device("cpu")
_highest: dict[str, int] = {}  # type of a device -> what was forgotten to count anew


def peak_resident_bytes() -> int:
    """Resident memory of this process at its highest, since it began."""
    return max(_highest.get("cpu", 0), peak_bytes(_CPU))


def peak_allocated_bytes() -> int:
    """Allocated memory of the first CUDA device at its highest, since the process began."""
    return max(_highest.get("cuda", 0), torch.cuda.max_memory_allocated())


def peak_memory() -> dict[str, int]:
    """Bytes at the highest point so far: resident memory of this process, and allocated memory of a CUDA device."""
    peaks = {"peak_resident_bytes": peak_resident_bytes()}
    if torch.cuda.is_available():
        peaks["peak_cuda_bytes"] = peak_allocated_bytes()
    return peaks


def higher(peaks: Mapping[str, int], others: Mapping[str, int]) -> dict[str, int]:
    """Of two `peak_memory` the higher, where both are known.

    >>> higher({"peak_resident_bytes": 2}, {"peak_resident_bytes": 3, "peak_cuda_bytes": 1})
    {'peak_resident_bytes': 3}
    """
    return {name: max(size, others.get(name, 0)) for name, size in peaks.items()}


def begin_peak(device: torch.device) -> bool:
    """Count a device's highest point from here on anew. False: this system does not count the CPU's anew."""
    _highest[device.type] = max(_highest.get(device.type, 0), peak_bytes(device))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        _CLEAR.write_text("5")  # proc(5): the peak begins at what is resident now
    except OSError:
        return False
    return True


def peak_bytes(device: torch.device) -> int:
    """Since `begin_peak`: allocated memory of a CUDA device; of the CPU what is resident of this process."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _counted()


def _counted() -> int:
    if STATUS.exists():  # Linux: getrusage would count the process that started this one, if it was the larger
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows keeps the peak elsewhere
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
