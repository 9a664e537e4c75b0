"""What a bad input is."""

from __future__ import annotations

from dataclasses import dataclass

PRUNE = "prune @llama --output out --num-samples 4 --sequence-length 16"
FEW = " --evaluation-samples 4"  # where something is measured: by default not beside a calibration text of one's own


@dataclass(frozen=True)
class Bad:
    """One bad input.

    Attributes:
        how: the command's arguments, or a Python expression.
        names: what its error must say: the value that was typed, the option, the remedy.
        code: exit code of a command: 2 where it cannot be read, 1 where what it says is wrong; None: not a command.
        passes: of the model that may be made before it fails, where nothing but a pass can tell.
    """

    how: str
    names: tuple[str, ...]
    code: int | None = None
    passes: int = 0


def unreadable(how: str, *names: str) -> Bad:
    """A command that cannot be read."""
    return Bad(how, names, code=2)


def refused(how: str, *names: str, passes: int = 0) -> Bad:
    """A command that can be read, and is wrong."""
    return Bad(how, names, 1, passes)


def prune(options: str, *names: str, passes: int = 0) -> Bad:
    """`gradprobe prune` with options that can be read, and are wrong."""
    few = "" if "--calibration" in options or "--evaluation" in options else FEW
    return Bad(f"{PRUNE} {options}{few}", names, 1, passes)


def call(how: str, *names: str, passes: int = 0) -> Bad:
    """A Python expression."""
    return Bad(how, names, None, passes)
