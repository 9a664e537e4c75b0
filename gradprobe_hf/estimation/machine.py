"""The machine: memory and disk that are free here, in bytes."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil
import torch

CGROUPS = Path("/sys/fs/cgroup")
SHARE = 0.8  # of free memory, for models that are made beside the one at hand


def available_bytes(device: torch.device) -> int:
    """Free memory of a device; of the CPU what can be had without swapping, within the limit of a container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min([psutil.virtual_memory().available, *_container_room(CGROUPS, Path("/proc/self/cgroup"))])


def fits(nbytes: int, device: torch.device) -> bool:
    """Whether there is room on a device for models of so much, with some to spare."""
    return nbytes <= SHARE * available_bytes(device)


def free_disk_bytes(folder: str | Path = ".") -> int:
    """Free space of the file system that a folder is on."""
    return shutil.disk_usage(folder).free


def process_bytes() -> int:
    """Resident memory of this process: Python and its libraries, before any model is loaded."""
    return int(psutil.Process().memory_info().rss)


def compute_device() -> torch.device:
    """What a model would compute on: the first CUDA device, or the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def _container_room(root: Path, membership: Path) -> list[int]:
    """What is left of the memory limit of each control group (version 2) around this process.

    psutil reports the machine's memory, also in a container that is killed long before it has used that much.
    """
    try:
        own = next(line[3:] for line in membership.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return []
    group = root / own.strip().lstrip("/")
    groups = [group, *(parent for parent in group.parents if parent.is_relative_to(root))]
    return [room for room in map(_group_room, groups) if room is not None]


def _group_room(group: Path) -> int | None:
    """What is left of the limit of one group; None if it has none."""
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such group here, or its limit is the word "max"
        return None
    # Pages of files count as used. The kernel drops those that were not used lately before it would kill anybody.
    cached = int(statistics.get("inactive_file", 0))
    return max(0, limit - used + cached)
