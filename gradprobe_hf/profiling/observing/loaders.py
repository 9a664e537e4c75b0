"""Loaders: which batches belong to training, and which to an evaluation, told by the loader that they came from."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any


class TrainingLoaders:
    """What feeds the steps of a loop: the loaders of the last step, and whatever follows them in another epoch.

    A batch of any other loader is that of an evaluation. Of the first step nothing is known, and all count as its own.
    Where step after step fetches nothing, the batches were there before (`list(loader)`), and nothing is known again.

    Attributes:
        dealt_to: processes that share what one of them loads.
        has_batch: whether the step has fetched a batch of its own.
        is_own: whether the latest batch was one.
    """

    def __init__(self) -> None:
        self.dealt_to, self.has_batch, self.is_own = 1, False, True
        self._known: list[_Loader] = []
        self._dry = 0  # steps in a row without a batch; Accelerate fetches one ahead, so that the last of an epoch is
        self._of_step: list[_Loader] = []
        self._latest: _Loader | None = None

    @property
    def are_known(self) -> bool:
        """Whether any step has ended that a loader fed."""
        return bool(self._known)

    @property
    def are_several(self) -> bool:
        """Whether more than one has fed the step."""
        return len(self._of_step) > 1

    def fetched(self, iterator: Any, processes: int) -> None:
        """A batch came from an iterator of torch's `DataLoader`, for so many processes."""
        self._latest = _Loader(weakref.ref(iterator), id(iterator._dataset))
        if not any(one.iterator() is iterator for one in self._of_step):
            self._of_step.append(self._latest)
        self.is_own = not self._known or any(one.goes_on_in(iterator) for one in self._known)
        self.has_batch = self.has_batch or self.is_own
        self.dealt_to = max(self.dealt_to, processes)

    def end_step(self) -> None:
        """What fed this step is what will feed the next one."""
        self._dry = 0 if self._of_step else self._dry + 1
        if self._of_step:
            self._known = self._of_step
        elif self._dry > 1:
            self._known = []
        elif self._latest is not None and all(one.iterator() is None for one in self._known):
            self._known = [self._latest]  # a new loader was taken for that of an evaluation
        self.begin_step()

    def begin_step(self) -> None:
        """Nothing was fetched yet."""
        self._of_step, self.has_batch = [], False


@dataclass(frozen=True)
class _Loader:
    """What a batch came from. Dataset: its id."""

    iterator: weakref.ref[Any]
    dataset: int

    def goes_on_in(self, iterator: Any) -> bool:
        """Whether an iterator is this one, or follows it in another epoch."""
        own = self.iterator()
        return iterator is own or (own is None and id(iterator._dataset) == self.dataset)
