"""A loop that profiles itself, in a script that is profiled: its steps are the script's, and one watch sees them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import nn

from gradprobe_hf.profiling.observing.observation import Observation


class Watch(Protocol):
    """What a loop tells of itself."""

    @property
    def done(self) -> bool: ...

    def follow(self, model: nn.Module) -> None: ...

    def step(self) -> None: ...

    def observation(self) -> Observation: ...


_watching: list[Watch] = []


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Loops that profile themselves in here tell this watch."""
    _watching.append(watch)
    try:
        yield
    finally:
        _watching.remove(watch)


def watch_of_script() -> Watch | None:
    """The one that a loop should tell; None: it is not in a script that is profiled."""
    return _watching[-1] if _watching else None
