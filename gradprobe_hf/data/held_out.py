"""Held out: a part of the user's own text that does not calibrate, to measure on where no other text is named."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradprobe_hf.data.batches import Batches
from gradprobe_hf.data.text.mixture import is_mixture, shares
from gradprobe_hf.data.text.packing import WindowSpec
from gradprobe_hf.data.text.pydoc_text import Part
from gradprobe_hf.data.text.text_options import PYDOC, SELF
from gradprobe_hf.data.windows import EVALUATION_SEED, open_rows

logger = logging.getLogger(__name__)

LEAST = 4  # rows: on fewer, a perplexity and its interval say nothing


@dataclass(frozen=True)
class HeldOut:
    """Finds what may be measured on.

    Attributes:
        windows: those that calibrate.
        load: `load_batches` for one model: (source, windows, part).
        check: raises ValueError for batches that cannot be measured on, of which there is no loss say.
        is_left: whether nothing else reads what these windows leave of a text.
    """

    windows: WindowSpec
    load: Callable[[Any, WindowSpec, Part], Batches]
    check: Callable[[Batches], None]
    is_left: bool = True

    def of(self, source: Any, most: int) -> Batches:
        """`most` rows, or fewer; none of batches that come as they are, and where too few are left (`LEAST` or `most`).

        Of a data set with several splits that is the one for evaluation, of any other text what the windows that
        calibrate leave of it, and of a mixture the same of each text that is the user's.

        Raises:
            ValueError: as `load_batches`, of what calibrates.
            OSError: the Hub cannot be reached.
        """
        if not is_mixture(source):
            found = self._of_one(source, most)
        else:
            own = {name: weight for name, weight in source.items() if name not in (PYDOC, SELF)}
            calibrating, whole = shares(source, self.windows.samples), sum(own.values())
            parts = (
                replace(self, windows=replace(self.windows, samples=calibrating[name]))._of_one(
                    name, max(1, round(most * weight / whole))
                )
                for name, weight in own.items()
            )
            found = _joined([part for part in parts if part])
        return found if found.samples >= min(LEAST, most) else Batches.none()

    def _of_one(self, source: Any, most: int) -> Batches:
        opened = open_rows(source, "calibration", self.windows.seed)
        if opened is None:
            return Batches.none()
        other = None if opened.split is None else open_rows(source, "evaluation", EVALUATION_SEED)
        if other is not None and other.split != opened.split:
            # Splits for tests are published without labels, or with -1 in their place.
            read = replace(self.windows, samples=most, at_most=True)
            if found := self._measurable(lambda: self.load(other, read, "evaluation"), other.name):
                return found
        if not self.is_left:
            return Batches.none()
        left = self.load(opened, replace(self.windows, held_out=most), "calibration")
        return self._measurable(lambda: left, opened.name)

    def _measurable(self, read: Callable[[], Batches], name: str) -> Batches:
        try:
            found = read()
            if found:
                self.check(found)
            return found
        except ValueError as error:
            logger.info("%s is not measured on: %s", name, error)
            return Batches.none()


def _joined(parts: Sequence[Batches]) -> Batches:
    """The batches of several texts, one after the other."""
    if len(parts) < 2:
        return parts[0] if parts else Batches.none()
    return Batches(
        items=tuple(item for part in parts for item in part),
        source=", ".join(part.source for part in parts),
        samples=sum(part.samples for part in parts),
        tokens=sum(part.tokens for part in parts),
        protocol="; ".join(f"{part.source}: {part.protocol}" for part in parts),
    )
