"""Mixtures: several sources and their weights -> rows of all of them, in proportion and in a seeded order."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gradprobe_hf.data.text.packing import Drawn
from gradprobe_hf.runtime.option_checks import number

logger = logging.getLogger(__name__)


def is_mixture(source: Any) -> bool:
    """Whether it is a dict of names and weights."""
    return isinstance(source, Mapping)


def shares(weights: Mapping[Any, Any], samples: int) -> dict[str, int]:
    """How many samples of each source: in proportion, and exactly `samples` in all (largest remainders).

    Raises:
        ValueError: a name that is no text, a weight that is not positive, or too few samples for a source to have one.

    >>> shares({"a.jsonl": 2, "pydoc": 1}, 64)
    {'a.jsonl': 43, 'pydoc': 21}
    """
    if not weights:
        raise ValueError("a mixture must name its texts, like {'a.jsonl': 2, 'pydoc': 1}, got an empty dict.")
    for name, weight in weights.items():
        if not isinstance(name, str):
            raise ValueError(f"a mixture names its texts, like {{'a.jsonl': 2, 'pydoc': 1}}, got {name!r}.")
        if isinstance(weight, torch.Tensor):
            raise ValueError("one batch was given where batches are read: put it into a list, [batch].")
        if hasattr(weight, "column_names"):
            raise ValueError(f"a DatasetDict is several data sets: choose one of them, with [{name!r}] say.")
        number(f"the weight of {name!r}", weight, "a number > 0", lambda x: x > 0)
    whole = sum(weights.values())
    exact = {name: samples * weight / whole for name, weight in weights.items()}
    counts = {name: int(share) for name, share in exact.items()}
    # Of equal remainders the first wins: `sorted` is stable.
    by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[: samples - sum(counts.values())]:
        counts[name] += 1
    without = [name for name, count in counts.items() if not count]
    if without:
        raise ValueError(
            f"of {samples} samples none would be of {', '.join(map(repr, without))}: ask for more, or leave it out."
        )
    return counts


def in_proportion(parts: Mapping[str, Drawn], counts: Mapping[str, int]) -> dict[str, Drawn]:
    """The parts cut to the shares of the one that holds the least of its own, so that the weights hold.

    Args:
        counts: rows of each that were asked for.
    """
    held = held_share(parts, counts)
    if held < 0.99:
        least = min(parts, key=lambda name: len(parts[name].rows) / counts[name])
        logger.warning(
            "%s holds %d of the %d rows that its weight asks for: all of the mixture is cut to %.0f%%, and read more "
            "often. Give it less weight, or more text",
            parts[least].source,
            len(parts[least].rows),
            counts[least],
            100 * held,
        )
    return {name: _cut(part, max(1, int(held * counts[name] + 1e-9))) for name, part in parts.items()}


def held_share(parts: Mapping[str, Drawn], counts: Mapping[str, int]) -> float:
    """How much of the rows that were asked for the part has which holds the least of its own."""
    return min(len(part.rows) / counts[name] for name, part in parts.items())


def _cut(part: Drawn, rows: int) -> Drawn:
    if rows == len(part.rows):
        return part
    return replace(part, rows=part.rows[:rows], protocol=f"{rows} of {part.protocol}")


def mixed(parts: Mapping[str, Drawn], weights: Mapping[str, float], seed: int) -> Drawn:
    """The rows of all sources in one seeded order, so that every batch is of the mixture."""
    rows = [row for part in parts.values() for row in part.rows]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    source = "a mixture: " + ", ".join(f"{len(part.rows)} of {part.source}" for part in parts.values())
    # Of a file its name alone: where it lies on this machine is nobody's business.
    names = {name: path.name if (path := Path(name).expanduser()).exists() else name for name in parts}
    given = ", ".join(f"{names[name]}={weights[name]:g}" for name in parts)
    protocol = f"weights {given}; " + "; ".join(f"{part.source}: {part.protocol}" for part in parts.values())
    example = next((part.example for part in parts.values() if part.example is not None), None)
    return Drawn(
        [rows[i] for i in order],
        source,
        f"{protocol}; mixed with seed {seed}",
        example=example,
        mixed_ids=tuple(dict.fromkeys(part.dataset_id for part in parts.values() if part.dataset_id)),
    )
