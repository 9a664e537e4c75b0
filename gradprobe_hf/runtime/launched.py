"""Which of the processes of a launcher this one is, for what needs no collective, and no torch."""

from __future__ import annotations

import os


def is_alone() -> bool:
    """Whether no launcher (accelerate, torchrun) has started others beside this process."""
    return os.environ.get("WORLD_SIZE", "1") == "1"


def is_first() -> bool:
    """Whether this process is the one that writes: the first of those that a launcher has started, or the only one."""
    return is_alone() or os.environ.get("RANK", "0") == "0"
