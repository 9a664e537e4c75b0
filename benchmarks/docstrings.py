"""The docstrings of PyTorch and NumPy, as one text: documentation that no other benchmark measures on.

What the installed versions have, about 3 MB.

usage: python -m benchmarks.docstrings FILE
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import torch

HOLDERS: tuple[Any, ...] = (torch, torch.nn, torch.nn.functional, torch.optim, torch.linalg, torch.Tensor)
HOLDERS += (numpy, numpy.linalg, numpy.random, numpy.fft, numpy.ndarray)
SHORTEST = 200  # characters: shorter ones are signatures


def docstrings() -> Iterator[str]:
    """Those of what modules and classes name, and of the classes' methods; each once, in the order of their names."""
    seen = set[str]()
    for holder in HOLDERS:
        for said in _of(holder, deeper=isinstance(holder, ModuleType)):
            if len(said) >= SHORTEST and said not in seen:
                seen.add(said)
                yield said


def _of(holder: Any, deeper: bool) -> Iterator[str]:
    for name in sorted(vars(holder)):
        if name.startswith("_") or isinstance(member := getattr(holder, name), ModuleType):
            continue
        yield inspect.getdoc(member) or ""
        if deeper and inspect.isclass(member):
            yield from _of(member, deeper=False)


def main() -> None:
    path = Path(sys.argv[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(docstrings()), encoding="utf-8")


if __name__ == "__main__":
    main()
