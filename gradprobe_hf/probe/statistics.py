"""Statistics: what a probe keeps of all matrices together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradprobe_hf.model.targets import Target
from gradprobe_hf.probe.matrix import AccumulatorStorage, MatrixStatistics
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.scores.evidence import Term


class Statistics:
    """The statistics of every target, over one probe or several."""

    def __init__(
        self,
        targets: Iterable[Target],
        terms: frozenset[Term],
        model: nn.Module,
        keeping: AccumulatorStorage | None = None,
    ) -> None:
        self.terms = terms
        self.probe = 0
        self.keeping = keeping or AccumulatorStorage()
        self._of = {
            target.name: MatrixStatistics(target, terms, model, self.keeping, index)
            for index, target in enumerate(targets)
        }

    def __getitem__(self, name: str) -> MatrixStatistics:
        return self._of[name]

    def reduce(self, processes: Processes) -> None:
        """Make the sums of the probe that just ended those of all processes, each term with one collective a matrix.

        What an earlier probe left is the same everywhere: only the main process may still hold it (`yield_to_main`).
        """
        if processes.count == 1:
            return
        kept = [accumulator for one in self._of.values() for accumulator in one.accumulators.values()]
        # How often a sum was updated decides how it is rounded: the same everywhere, so that all round it alike.
        own = [*(one.reached for one in self._of.values()), *(accumulator.updates for accumulator in kept)]
        most = processes.max_(torch.tensor(own, dtype=torch.int64)).tolist()
        for accumulator, updates in zip(kept, most[len(self._of) :], strict=True):
            accumulator.updates = updates
        for one, any_reached in zip(self._of.values(), most, strict=False):
            one.reduce(processes, self.probe, bool(any_reached))

    def yield_to_main(self, processes: Processes) -> None:
        """Before a probe that adds to reduced sums: the main process alone keeps them, so that they count once."""
        for one in self._of.values() if not processes.is_main else ():
            for accumulator in one.accumulators.values() if one.layout is None else ():
                accumulator.clear()

    def state(self) -> tuple[dict[str, Any], Iterator[dict[str, Tensor]]]:
        """Everything that `load_state` needs: JSON values, and the tensors of one matrix after the other."""
        described = {
            "probe": self.probe,
            "reached": [one.reached for one in self._of.values()],
            "updates": [{term: kept.updates for term, kept in one.accumulators.items()} for one in self._of.values()],
        }
        return described, (one.state() for one in self._of.values())

    def load_state(self, described: Mapping[str, Any], tensors: Callable[[int], dict[str, Tensor]]) -> None:
        """Become what `state` was taken of; `tensors(index)` gives those of one matrix."""
        self.probe = described["probe"]
        rows = zip(self._of.values(), described["reached"], described["updates"], strict=True)
        for index, (one, reached, updates) in enumerate(rows):
            one.reached = reached
            if one.accumulators or reached:
                one.load_state(tensors(index), updates)

    def copy_(self, other: Statistics) -> None:
        """Become what `other` holds of the same matrices, of the terms that are kept here."""
        described, _ = other.state()
        theirs = list(other._of.values())
        self.load_state(described, lambda index: theirs[index].state())

    @property
    def unreached(self) -> list[str]:
        """Matrices the loss does not depend on: no evidence about them."""
        return [name for name, statistics in self._of.items() if not statistics.reached]

    @property
    def nbytes(self) -> int:
        """Bytes of the accumulators of size `[out, in]`, in memory or in files."""
        return sum(kept.nbytes for one in self._of.values() for kept in one.accumulators.values())
