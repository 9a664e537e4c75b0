"""Statistics: what the probes measure of all targets together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradprobe_hf.model.targets import Target
from gradprobe_hf.probe.accumulation.storage import AccumulatorStorage
from gradprobe_hf.probe.matrix import MatrixStatistics
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.scores.terms import Term


class Statistics:
    """The statistics of every target, over one probe or two.

    Args:
        terms: which of the terms in `matrix.py` to measure.
        storage: where accumulators are stored; by default in float32 beside their matrices.
        units: of a target's inputs, by its name, that have a gate each.
    """

    def __init__(
        self,
        targets: Iterable[Target],
        terms: frozenset[Term],
        model: nn.Module,
        storage: AccumulatorStorage | None = None,
        units: Mapping[str, int] | None = None,
    ) -> None:
        self.probe = 0  # of a pair: which of its probes adds to them, 0 or 1
        storage, units = storage or AccumulatorStorage(), units or {}
        self._of = {
            target.name: MatrixStatistics(target, terms, model, storage, index, units.get(target.name, 0))
            for index, target in enumerate(targets)
        }

    def __getitem__(self, name: str) -> MatrixStatistics:
        return self._of[name]

    def reduce(self, processes: Processes) -> None:
        """Make the sums of the probe that has just ended those of all processes.

        One collective for each term of a matrix, once a probe: their number does not grow with that of the batches. The
        sums of an earlier probe are already the same everywhere; see `begin_second_probe`.
        """
        if processes.count == 1:
            return
        matrices = list(self._of.values())
        accumulators = [accumulator for one in matrices for accumulator in one.accumulators.values()]
        # One collective for all flags and counts. The number of updates is part of the salt that rounds a sum: where it
        # is the same everywhere, all processes round the reduced sums to the same bits.
        own = [*(one.reached for one in matrices), *(accumulator.updates for accumulator in accumulators)]
        most = processes.max_(torch.tensor(own, dtype=torch.int64)).tolist()
        for accumulator, updates in zip(accumulators, most[len(matrices) :], strict=True):
            accumulator.updates = updates
        for one, any_reached in zip(matrices, most[: len(matrices)], strict=True):
            one.reduce(processes, self.probe, bool(any_reached))

    def begin_second_probe(self, processes: Processes) -> None:
        """Call before the second probe of a pair, if it adds to the reduced sums of the first.

        The next reduction has to count these once, not per process: one of them brings them along alone. Shards stay as
        they are: they are not replicas of one another.
        """
        self.probe = 1
        for one in self._of.values() if not processes.is_main else ():
            for accumulator in one.accumulators.values() if one.shards is None else ():
                accumulator.clear()

    def state(self) -> tuple[dict[str, Any], Iterator[dict[str, Tensor]]]:
        """What `load_state` takes: JSON values, and the tensors of one matrix after the other, read lazily."""
        values = {
            "probe": self.probe,
            "reached": [one.reached for one in self._of.values()],
            "updates": [
                {term: accumulator.updates for term, accumulator in one.accumulators.items()}
                for one in self._of.values()
            ],
        }
        return values, (one.state() for one in self._of.values())

    def load_state(self, values: Mapping[str, Any], tensors: Callable[[int], dict[str, Tensor]]) -> None:
        """Become what `state` was taken of; `tensors(index)` returns those of one matrix."""
        self.probe = values["probe"]
        rows = zip(self._of.values(), values["reached"], values["updates"], strict=True)
        for index, (one, reached, updates) in enumerate(rows):
            one.reached = reached
            if one.accumulators or reached:  # otherwise there is no tensor to load
                one.load_state(tensors(index), updates)

    def copy_(self, other: Statistics) -> None:
        """Copy from `other`, of the same matrices, the terms that are here."""
        # In memory `state` hands out the tensors themselves, and `load_state` copies them; from files it reads copies.
        values, _ = other.state()
        theirs = list(other._of.values())
        self.load_state(values, lambda index: theirs[index].state())

    @property
    def unreached(self) -> list[str]:
        """Names of the matrices that the loss does not depend on: nothing was measured of them."""
        return [name for name, statistics in self._of.items() if not statistics.reached]

    @property
    def nbytes(self) -> int:
        """Bytes of the accumulators of size `[out, in]`, in memory or in files."""
        return sum(accumulator.nbytes for one in self._of.values() for accumulator in one.accumulators.values())
