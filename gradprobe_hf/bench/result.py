"""Results of a bench: rows of measurements, and how many times the first model's each is."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gradprobe_hf.checkpoint.file_sizes import FileSizes
from gradprobe_hf.report.report import finite

COUNTED = ("parameters", "file_bytes", "zstd_bytes", "hub_bytes", "peak_memory_bytes")
TIMED = ("prefill_seconds", "first_token_seconds", "tokens_per_second")


@dataclass(frozen=True)
class Timing:
    """One measurement, repeated. Attributes: the median and the quartiles around it, and the values in order."""

    median: float
    quartiles: tuple[float, float]
    values: list[float]

    @classmethod
    def of(cls, values: Sequence[float]) -> Timing:
        if len(values) == 1:
            return cls(values[0], (values[0], values[0]), list(values))
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(middle, (low, high), list(values))

    def over(self, other: Timing) -> float:
        """The median of the ratios of the rounds."""
        return statistics.median(own / its for own, its in zip(self.values, other.values, strict=True))


@dataclass(frozen=True)
class BenchRow:
    """One checkpoint.

    Attributes:
        model: as it was named.
        dtype: that it computes in.
        file_bytes: of its safetensors files; None: it has none.
        zstd_bytes, hub_bytes: of these under zstd, and as the Hub transfers them; None: not measured.
        peak_memory_bytes: with its weights; of the device, or what its process grew by.
        prefill_seconds: a forward pass of the prompt.
        first_token_seconds: from the prompt to the first token; None for a model that writes none.
        tokens_per_second: behind that, one text at a time.
        ratios: measurement -> how many times that of the first model.
    """

    model: str
    cls: str
    parameters: int
    dtype: str
    peak_memory_bytes: int
    prefill_seconds: Timing
    first_token_seconds: Timing | None = None
    tokens_per_second: Timing | None = None
    file_bytes: int | None = None
    zstd_bytes: int | None = None
    hub_bytes: int | None = None
    ratios: dict[str, float] = field(default_factory=dict)

    def beside(self, first: BenchRow) -> BenchRow:
        """The row with its ratios."""
        found = {}
        for name in (*COUNTED, *TIMED):
            own, other = getattr(self, name), getattr(first, name)
            if own is not None and other is not None:
                found[name] = own.over(other) if isinstance(own, Timing) else own / other
        return replace(self, ratios=found)


@dataclass(frozen=True)
class BenchResult:
    """What `bench_pretrained` returns.

    Attributes:
        rows: one for each model, as they were given; ratios are to the first.
        prompt_length: tokens that are read; None of models that read an image, or a sound.
        device, threads: that computed.
    """

    rows: list[BenchRow]
    prompt_length: int | None
    new_tokens: int
    repeats: int
    device: str
    threads: int
    versions: dict[str, str]

    def with_sizes(self, sizes: Sequence[FileSizes | None]) -> BenchResult:
        """The same with what the files of each model take; None of one that has none."""
        rows = [
            row if one is None else replace(row, file_bytes=one.stored, zstd_bytes=one.zstd, hub_bytes=one.hub)
            for row, one in zip(self.rows, sizes, strict=True)
        ]
        return replace(self, rows=[row.beside(rows[0]) for row in rows])

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        found: dict[str, Any] = finite(asdict(self))
        return found
