"""What was seen of a loop: everything that a report is made of, and nothing else.

Seconds are of one process. It is bounded: sums, counts, and as many samples as steps; no event is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import nan
from typing import Any, Literal, Self

from gradprobe_hf.profiling.observing.places import Place
from gradprobe_hf.report.against_estimate import Expectation

CallKind = Literal["synchronization", "print", "constant", "norm", "cast", "matmul", "attention", "zeroing"]


@dataclass(frozen=True)
class Call:
    """Calls of one kind from one line, over all located steps.

    Attributes:
        what: as it is written, such as ".item()".
        count: of calls.
        seconds: that the line waits for them in a step: the median of the steps with one, times their share of all.
        steps: located steps with at least one.
        detail: of a tensor made anew: its shape; of a cast: from which dtype to which.
    """

    kind: CallKind
    what: str
    place: Place | None
    count: int
    seconds: float
    steps: int
    detail: str = ""


@dataclass(frozen=True)
class LoaderWait:
    """Waiting for one data loader, over all timed steps.

    Attributes:
        place: the line that asks for the next batch.
        dataset: its class.
        workers: processes that load; 0: this one does; None: some.
        batches: that were waited for.
        starting: of the seconds: the first batches of workers that started, and the end of those before them.
    """

    place: Place | None
    dataset: str
    workers: int | None
    batches: int
    seconds: float
    starting: float = 0.0


@dataclass(frozen=True)
class Operator:
    """An operator in the traced steps; seconds without those of the operators that it calls."""

    name: str
    count: int
    seconds: float


@dataclass(frozen=True)
class ModuleTime:
    """Modules of one place in the model, in the located steps.

    Attributes:
        name: with a star for the numbers in it: "model.layers.*.mlp".
        kind: its class.
        seconds: in forward, without those of the modules inside it.
    """

    name: str
    kind: str
    count: int
    seconds: float


@dataclass(frozen=True)
class Compilation:
    """torch.compile at work on one function during the timed steps. Reason: the guard that failed, if it says so."""

    place: Place
    count: int
    seconds: float
    reason: str


@dataclass(frozen=True)
class GraphBreak:
    """A line at which torch.compile ends one graph and begins another. Count: of the graphs that ended there."""

    place: Place
    count: int
    reason: str


@dataclass(frozen=True)
class Contents:
    """Of the batches in some steps. Tokens and padding: None where a batch does not tell."""

    steps: int
    samples: int
    tokens: int | None
    padding: int | None


@dataclass(frozen=True)
class Setup:
    """How a run is set up, as its warm-up shows.

    Attributes:
        optimizer: the class of the one that steps, of several the one with the most tensors that it steps one by one;
            None: none was seen.
        optimizers: how many step.
        steps_by: how it steps its tensors: "fused", "foreach", "one by one"; None: it does not say.
        has_fused: whether its class can be fused.
        stepped_at: the line that steps it.
        tensors: that it steps; None: not known.
        asked: half precision that weights are in, or that autocast was entered for: "bfloat16", "float16"; or None.
        attention: implementation -> modules of transformers that have it.
        checkpointed: layers that are computed again in backward.
        without_gradient: names of trained parameters that no step of the warm-up gave a gradient, and their number.
        without_optimizer: names of parameters with a gradient that no optimizer steps, and their number.
        wasted_bytes: of these gradients.
        leaves_out_gradients: whether a callback of this package drops some before each step.
        float32_products: torch.get_float32_matmul_precision() of a run on CUDA; None: not known, or on a CPU.
    """

    optimizer: str | None
    steps_by: str | None
    has_fused: bool
    stepped_at: Place | None
    tensors: int | None
    asked: str | None
    attention: Mapping[str, int]
    checkpointed: int
    without_gradient: tuple[str, ...] = ()
    without_optimizer: tuple[str, ...] = ()
    wasted_bytes: int = 0
    leaves_out_gradients: bool = False
    optimizers: int = 1
    float32_products: str | None = None


@dataclass(frozen=True)
class MemorySample:
    """Bytes at the end of a step. Allocated, reserved, peak: of PyTorch on an accelerator; None on a CPU.

    Attributes:
        process: resident, of this process.
        free: what can still be had on the device.
        peak: most that was allocated since the step began.
    """

    process: int
    free: int
    allocated: int | None = None
    reserved: int | None = None
    peak: int | None = None


@dataclass(frozen=True)
class BatchSize:
    """A batch that was tried, of the run's own or a larger size.

    Attributes:
        times: as many samples as the run's own batch.
        samples: in a step; None: not known.
        memory: bytes at its fullest: allocated on an accelerator, resident on a CPU; None: it failed.
        room: bytes that it could have had.
        failed: why it could not be had; None: it fits.
        gain: samples a second / those of the run's own batch; None: not measured.
        pays: whether all rounds agree that it is faster.
    """

    times: int
    samples: float | None
    memory: int | None = None
    room: int | None = None
    failed: str | None = None
    gain: float | None = None
    pays: bool = False


@dataclass(frozen=True)
class RunOption:
    """What measurements say for an option of a pruning run: its value, "as it is" where that is best, and why."""

    option: str
    value: str
    why: str


@dataclass(frozen=True)
class RankStages:
    """One process of several: seconds of each stage in a timed step, on average."""

    rank: int
    stages: Mapping[str, float]


@dataclass(frozen=True)
class RunStage:
    """A stage of a pruning run: seconds since the run began, and the process's bytes at its end."""

    name: str
    begin: float
    end: float
    process: int


@dataclass(frozen=True)
class Span:
    """A stretch of a stage, in seconds since the first that is kept."""

    stage: str
    begin: float
    end: float


@dataclass(frozen=True)
class Observation:
    """Attributes:
    warmup: steps that were left out.
    timed: seconds of each step that was only timed.
    traced: of each step under torch.profiler.
    located: number of steps under the watch for lines.
    stages: seconds of each stage in the timed steps; "other" is what no stage claims.
    recomputed: share of the located steps that modules in backward take: what checkpointing computes again.
    collectives: share of the traced steps in which one was under way; None: one process.
    busy: share of the traced steps in which the device computes; None on a CPU.
    ranks: each process, where there are several and they could tell.
    spans: of the last timed steps.
    evaluations: between steps, which are in none of these figures.
    training_phase: which one was seen, of phases with optimizers of their own; those before ended too soon.
    gradient_norms: of what the optimizer stepped with, in the steps of the warm-up and in the located ones.
    expected: what was estimated of a pruning run, beside what it took.
    run: stages of a pruning run, in the order in which they ended; without the seconds that watching added.
    batches: sizes that were tried, the smallest first; empty: none.
    batch_limit: why no larger one than the largest that fits was tried.
    checkpointing: of the passes of a pruning run that `batches` are made of; None: not known.
    other_checkpointing: such a pass of the run's own batch with checkpointing switched on or off.
    options: what these say for the run's options.
    contents: of the batches of the warm-up, but for its first step, and of the located steps.
    timed_contents: of those of the timed steps.
    missing: what could not be seen -> why; a kind of finding, too.
    complete: whether all steps of the schedule were seen.
    """

    warmup: int
    timed: tuple[float, ...]
    traced: tuple[float, ...]
    located: int
    stages: Mapping[str, float]
    loaders: tuple[LoaderWait, ...]
    calls: tuple[Call, ...]
    operators: tuple[Operator, ...]
    compilations: tuple[Compilation, ...]
    contents: Contents | None
    device: str
    versions: Mapping[str, str]
    missing: Mapping[str, str]
    complete: bool
    modules: tuple[ModuleTime, ...] = ()
    graph_breaks: tuple[GraphBreak, ...] = ()
    setup: Setup | None = None
    memory: tuple[MemorySample, ...] = ()
    recomputed: float = 0.0
    collectives: float | None = None
    busy: float | None = None
    ranks: tuple[RankStages, ...] = ()
    processes: int = 1
    spans: tuple[Span, ...] = ()
    run: tuple[RunStage, ...] = ()
    gradient_norms: tuple[float, ...] = ()
    evaluations: int = 0
    training_phase: int = 1
    expected: tuple[Expectation, ...] = ()
    batches: tuple[BatchSize, ...] = ()
    batch_limit: str = ""
    checkpointing: bool | None = None
    other_checkpointing: BatchSize | None = None
    options: tuple[RunOption, ...] = ()
    timed_contents: Contents | None = None

    @property
    def compiles(self) -> bool:
        """Whether torch.compile was used: lines cannot be looked for then."""
        return "calls" in self.missing

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What `to_dict` made, also after JSON."""
        rows = {name: tuple(row(**_placed(one)) for one in values[name]) for name, row in _ROWS.items()}
        numbers = {name: tuple(values[name]) for name in ("timed", "traced")}
        # JSON has no NaN, which the norm of a training that has gone wrong is.
        numbers["gradient_norms"] = tuple(nan if norm is None else norm for norm in values["gradient_norms"])
        return cls(
            **{
                **values,
                **rows,
                **numbers,
                **{name: Contents(**values[name]) if values.get(name) else None for name in _CONTENTS},
                "other_checkpointing": BatchSize(**values["other_checkpointing"])
                if values["other_checkpointing"]
                else None,
                "setup": Setup(**_placed(values["setup"])) if values["setup"] else None,
            }
        )


_CONTENTS = ("contents", "timed_contents")
_ROWS: dict[str, type] = {
    "loaders": LoaderWait,
    "calls": Call,
    "operators": Operator,
    "compilations": Compilation,
    "modules": ModuleTime,
    "graph_breaks": GraphBreak,
    "memory": MemorySample,
    "ranks": RankStages,
    "spans": Span,
    "run": RunStage,
    "expected": Expectation,
    "batches": BatchSize,
    "options": RunOption,
}


def _placed(row: Mapping[str, Any]) -> dict[str, Any]:
    """Places and tuples, which JSON has as objects and lists."""
    made: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    return {
        name: Place(**value) if name in ("place", "stepped_at") and value else value for name, value in made.items()
    }
