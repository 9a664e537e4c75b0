"""Places: the user's own line that led to a call."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import FrameType
from typing import Literal

import torch

Owner = Literal["user", "torch", "library", "package", "here"]


def library_folders(names: Iterable[str]) -> tuple[str, ...]:
    """Where these packages are, those that there are."""
    specs = filter(None, map(find_spec, names))
    return tuple(os.path.abspath(folder) + os.sep for one in specs for folder in one.submodule_search_locations or ())


_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # all of profiling/
_PACKAGE = os.path.dirname(os.path.dirname(_HERE)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
# And what installed commands are, such as `gradprobe` itself.
_STANDARD = tuple(os.path.abspath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib", "scripts"))
# Libraries wherever they are: a clone that was installed as editable is in no site-packages.
_LIBRARIES = library_folders(("transformers", "accelerate", "datasets", "evaluate", "huggingface_hub", "peft", "trl"))
# Both read scalars by design: the step counts of an optimizer are on the CPU, and a loss scale has to be looked at.
# Not all of torch.amp: a forward pass under autocast is called from there.
_BY_DESIGN = (_TORCH + "optim" + os.sep, os.path.join(_TORCH, "amp", "grad_scaler.py"))
_LOADER = os.path.join(_TORCH, "utils", "data") + os.sep  # which draws its seed as a number, whenever it begins


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


def place_of(frame: FrameType | None, any_call: bool = False) -> Place | None:
    """The innermost frame that belongs to no library. None: there is none, or PyTorch makes this call by design.

    Frames of torch itself do not count as a library's: `print(tensor)` and `tensor.norm()` are the user's calls. In a
    pruning run that a command started there is no user's frame; its own innermost one stands in.

    Args:
        any_call: also what PyTorch does by design.
    """
    through, own = None, None
    while frame is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        owner = _owner(file)
        if owner == "user":
            return Place(shown_path(file), line, frame.f_code.co_name, through)
        by_itself = file.startswith(_LOADER) and through is None  # not for a collator
        if (file.startswith(_BY_DESIGN) or by_itself) and not any_call:
            return None
        if owner == "package" and own is None:
            own = Place(_within_package(file), line, frame.f_code.co_name, through)
        if owner in ("library", "package") and through is None:
            through = f"{os.sep.join(file.split(os.sep)[-2:])}:{line}"
        frame = frame.f_back
    return own


@cache
def _owner(file: str) -> Owner:
    if file.startswith("<") and not file.startswith(("<stdin", "<ipython")):
        return "library"  # the import system, and code that libraries generate
    path = os.path.abspath(file)
    if path.startswith(_HERE):
        return "here"
    if path.startswith(_PACKAGE):
        return "package"
    if path.startswith(_TORCH):
        return "torch"
    installed = "site-packages" in path or "dist-packages" in path
    return "library" if installed or path.startswith((*_STANDARD, *_LIBRARIES)) else "user"


def _within_package(file: str) -> str:
    return os.path.relpath(os.path.abspath(file), os.path.dirname(_PACKAGE[:-1]))


def shown_path(file: str) -> str:
    path, root = os.path.abspath(file), os.getcwd() + os.sep
    return path.removeprefix(root) if not file.startswith("<") else file


def place_in_user_code(frames: Iterable[traceback.FrameSummary]) -> Place | None:
    """The innermost of some recorded frames, outermost first, that belongs to no library; else the innermost."""
    innermost_first = list(frames)[::-1]
    for one in [*(one for one in innermost_first if _owner(one.filename) == "user"), *innermost_first]:
        return Place(shown_path(one.filename), one.lineno or 0, one.name)
    return None
