"""New weights: values of whole matrices, kept beside the model until everything else has succeeded."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gradprobe_hf.model.targets import Target
from gradprobe_hf.runtime.interrupts import uninterrupted
from gradprobe_hf.runtime.scratch import remove_scratch, scratch_folder


@dataclass(frozen=True)
class _File:
    """Values in a file, which is mapped into memory where they are used, and no longer.

    The pages of a mapping count as resident memory of the process as long as it is there: those of all blocks would be
    a whole model's in the end.
    """

    path: Path
    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, values: Tensor, path: Path) -> _File:
        # Written, then mapped: on a full disk a write raises, and writing through a mapping ends the process (SIGBUS).
        with open(path, "wb") as file:
            file.write(values.contiguous().cpu().view(torch.uint8).numpy().data)
        return cls(path, values.shape, values.dtype)

    def mapped(self) -> Tensor:
        """What is written into it is written into the file."""
        flat = torch.from_file(str(self.path), shared=True, size=self.shape.numel(), dtype=self.dtype)
        return flat.view(self.shape)


class NewWeights(Mapping[str, Tensor]):
    """Matrix name -> its new values `[out, in]`, in memory or in files that are mapped into it while they are used.

    Attributes:
        vectors: the gains and biases among them.

    Args:
        folder: where the files go, which are gone with this object; None: in memory.
    """

    def __init__(self, folder: str | Path | None = None, *, on_disk: bool = False) -> None:
        self._kept: dict[str, Tensor | _File] = {}
        self._installed: set[str] = set()
        self.vectors: list[Target] = []
        self._folder: Path | None = None
        if on_disk:
            self._folder = scratch_folder("weights", folder)
            weakref.finalize(self, remove_scratch, self._folder)

    def add(self, name: str, values: Tensor) -> None:
        """Keep `values [out, in]`.

        Raises:
            OSError: the disk is full.
        """
        if self._folder is None:
            self._kept[name] = values
            return
        self._kept[name] = _File.of(values, self._folder / f"{len(self._kept):05d}")

    def add_vector(self, target: Target, values: Tensor) -> None:
        """Keep `values [n]` of a gain or a bias, which is no target of the run: it stands in `vectors` from now on."""
        self.add(target.name, values)
        self.vectors.append(target)

    def install(self, name: str, matrix: Tensor) -> None:
        """Write the kept values into `matrix`, and keep what was there in their place."""
        if name not in self._installed:
            with uninterrupted():
                self._exchange(name, matrix)
                self._installed.add(name)

    def withdraw(self, name: str, matrix: Tensor) -> None:
        """Undo `install`, if it was done."""
        if name in self._installed:
            with uninterrupted():
                self._exchange(name, matrix)
                self._installed.discard(name)

    def _exchange(self, name: str, matrix: Tensor) -> None:
        kept, now = self[name], matrix.clone()
        matrix.copy_(kept)
        kept.copy_(now)

    @property
    def pending(self) -> set[str]:
        """The names of those that are not installed."""
        return set(self._kept) - self._installed

    def clear(self) -> None:
        """They are in the model: nothing is left to do."""
        self._kept.clear()
        self._installed.clear()
        self.vectors.clear()
        if self._folder is not None:
            remove_scratch(self._folder)

    def __getitem__(self, name: str) -> Tensor:
        kept = self._kept[name]
        return kept.mapped() if isinstance(kept, _File) else kept

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)
