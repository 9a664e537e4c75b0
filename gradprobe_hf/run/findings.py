"""Findings: what a search has measured so far, kept in the run's state so that a run that is resumed goes on behind it.

A search measures one thing after the other: the loss without this block, the loss of that shape. Each of these is a
finding, of JSON values under a key; it is saved at once, with the diagnostics as they are behind it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from gradprobe_hf.run.diagnostics import Diagnostics
from gradprobe_hf.run.snapshots import Snapshots, Step

Value = TypeVar("Value")


@dataclass(frozen=True)
class Findings:
    """What is known already.

    Attributes:
        snapshots: where a finding is saved; None: nowhere.
        known: key -> its value, and the diagnostics behind it.
        prefix: of the keys, where one search is part of another.
    """

    snapshots: Snapshots | None = None
    known: dict[str, dict[str, Any]] = field(default_factory=dict)
    prefix: str = ""

    @classmethod
    def of(cls, snapshots: Snapshots | None) -> Findings:
        """Those that all processes have of an earlier run. A collective."""
        latest, known = None if snapshots is None else snapshots.agreed(), dict[str, dict[str, Any]]()
        if snapshots is not None and latest is not None and latest.stage == "search":
            for number in range(latest.number + 1):
                values = snapshots.read(Step.of("search", number)).values
                known[values["key"]] = values
        return cls(snapshots, known)

    def under(self, prefix: str) -> Findings:
        """Those of a part of this search, whose keys may be the same as another part's."""
        return replace(self, prefix=f"{self.prefix}{prefix} / ")

    def get(self, key: str, diagnostics: Diagnostics, measure: Callable[[], Value]) -> Value:
        """What was found under this key, else what is measured now.

        Args:
            diagnostics: that `measure` adds to; of what is known they become as they were behind it.
            measure: returns JSON values, the same in all processes. It may have findings of its own.
        """
        key = self.prefix + key
        if key in self.known:
            diagnostics.load(copy.deepcopy(self.known[key]["diagnostics"]))  # it will be added to
            found: Value = self.known[key]["value"]
            return found
        value = measure()
        if self.snapshots is not None:
            made = {"key": key, "value": value, "diagnostics": diagnostics.to_dict()}
            self.snapshots.record(Step.of("search", len(self.known)), made, [])
            self.known[key] = made
        return value
