"""Places: the user's own line that led to a call."""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Literal

import torch

Owner = Literal["user", "torch", "library", "here"]

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STANDARD = tuple(os.path.abspath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib"))
# Both read scalars by design: the step counts of an optimizer are on the CPU, and a loss scale has to be looked at.
_BY_DESIGN = tuple(_TORCH + folder + os.sep for folder in ("optim", "amp"))


@dataclass(frozen=True)
class Place:
    """A line of the user's code.

    Attributes:
        file: relative to the folder the run was started in, where it lies below it.
        function: that the line is in.
        through: "file:line" of the library that made the call on the line's behalf; None if the line made it itself.
    """

    file: str
    line: int
    function: str
    through: str | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def place_of(frame: FrameType | None) -> Place | None:
    """The innermost frame that belongs to no library. None: there is none, or PyTorch makes this call by design.

    Frames of torch itself do not count as a library's: `print(tensor)` and `tensor.norm()` are the user's calls.
    """
    through = None
    while frame is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        owner = _owner(file)
        if owner == "user":
            return Place(shown_path(file), line, frame.f_code.co_name, through)
        if file.startswith(_BY_DESIGN):
            return None
        if owner == "library" and through is None:
            through = f"{os.sep.join(file.split(os.sep)[-2:])}:{line}"
        frame = frame.f_back
    return None


@cache
def _owner(file: str) -> Owner:
    if file.startswith("<") and not file.startswith(("<stdin", "<ipython")):
        return "library"  # the import system, and code that libraries generate
    path = os.path.abspath(file)
    if path.startswith(_HERE):
        return "here"
    if path.startswith(_TORCH):
        return "torch"
    installed = "site-packages" in path or "dist-packages" in path
    return "library" if installed or path.startswith(_STANDARD) else "user"


def shown_path(file: str) -> str:
    path, root = os.path.abspath(file), os.getcwd() + os.sep
    return path.removeprefix(root) if not file.startswith("<") else file
