"""The original: what a pruned model is beside, in words. The dense model, or one that had been pruned itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Original:
    """What it is called.

    Attributes:
        column: at the head of a table.
        name: in a sentence.
        whose: where something of it is meant.
    """

    column: str
    name: str
    whose: str


DENSE = Original("dense", "the dense model", "the dense model's")
PRUNED_BEFORE = Original("before", "the model it was made of", "the earlier model's")


def original_of(model: Mapping[str, Any]) -> Original:
    """That of a model that a report describes.

    >>> original_of({"name": "a-50", "pruned_to": 0.5}).column, original_of({"name": "a"}).column
    ('before', 'dense')
    """
    return PRUNED_BEFORE if {"pruned_to", "structure"} & set(model) else DENSE
