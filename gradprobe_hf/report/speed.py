"""Speed: what a reader compares of models that were measured in turns.

A row is as `BenchResult.to_dict` has it, the first one that of the dense model: a measurement has a median, its
`values`, one for each round, and with it the row its ratio to the first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from gradprobe_hf.report.original import DENSE


def measurements(speed: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Title, dense and pruned (the second row), of each measurement that there is."""
    dense, pruned = speed["rows"][:2]
    reads_text = speed["prompt_length"] is not None
    titles = {} if reads_text else {"prefill_seconds": "forward pass, ms"}
    return [
        (titles.get(name, title), shown(dense[name]), f"{shown(pruned[name])} ({pruned['ratios'][name]:.2f} x)")
        for name, (title, shown) in _LINES.items()
        if dense[name] is not None
    ]


def protocol(speed: Mapping[str, Any], whose: str = DENSE.whose) -> str:
    """What was measured, and how. Args: whose: what the first row is of."""
    dense = speed["rows"][0]
    written = f" and {speed['new_tokens']} written" if dense["tokens_per_second"] else ""
    read = "one input at a time"
    if speed["prompt_length"] is not None:  # the model reads text
        read = f"one text at a time, of which {speed['prompt_length']:,} tokens are read{written}"
    return (
        f"{read}; {speed['device']}, "
        f"{speed['threads']} threads, {dense['dtype']}; medians of {speed['repeats']} rounds in which models of these "
        f"shapes, with random weights, take turns; x: times {whose}, the median over the rounds"
    )


def times_as_fast(speed: Mapping[str, Any], row: Mapping[str, Any]) -> float:
    """How many texts a model reads and writes while the first one does one: the median over the rounds."""
    dense, own = (_text_seconds(one, speed["new_tokens"]) for one in (speed["rows"][0], row))
    return statistics.median(one / its for one, its in zip(dense, own, strict=True))


def _text_seconds(row: Mapping[str, Any], new_tokens: int) -> list[float]:
    """Of each round; of a model that writes nothing, to read the text."""
    if row["tokens_per_second"] is None:
        return list(row["prefill_seconds"]["values"])
    both = zip(row["first_token_seconds"]["values"], row["tokens_per_second"]["values"], strict=True)
    return [first + (new_tokens - 1) / rate for first, rate in both]


def _milliseconds(timing: Mapping[str, Any]) -> str:
    return f"{1000 * timing['median']:,.0f}"


_LINES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "peak_memory_bytes": ("peak memory, MB", lambda value: f"{value / 1e6:,.0f}"),
    "prefill_seconds": ("time to read a text, ms", _milliseconds),
    "first_token_seconds": ("time to the first token, ms", _milliseconds),
    "tokens_per_second": ("tokens per second", lambda timing: f"{timing['median']:,.1f}"),
}
