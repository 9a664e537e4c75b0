"""Which steps of a loop are observed, and how."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Schedule:
    """How many steps of each kind, in this order. Behind them the loop runs as if nobody had watched.

    Attributes:
        warmup: left out: kernels are chosen, caches are filled, workers start.
        timed: measured with nothing but a clock. Shares and throughput come from these.
        traced: under torch.profiler, for the operators.
        located: under a watch that finds the line of each call. They are slower, and measure no step.

    Raises:
        ValueError: a count below 1.
    """

    warmup: int = 3
    timed: int = 10
    traced: int = 5
    located: int = 5

    def __post_init__(self) -> None:
        for field in fields(self):
            count = getattr(self, field.name)
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ValueError(f"{field.name} must be a number of steps, at least 1, got {count!r}.")

    @property
    def steps(self) -> int:
        """Of all kinds together."""
        return self.warmup + self.timed + self.traced + self.located
