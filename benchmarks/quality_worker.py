"""One cell of `quality.py`: what a process of its own does, so that the seconds and the peak memory are the row's."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread
from typing import Any, ParamSpec, TypeVar

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.quality_cells import Cell, Dense
from benchmarks.quality_peers import PeerTask
from benchmarks.quality_rows import TABLES, Row, configuration
from benchmarks.quality_texts import TextSpec
from benchmarks.rivals import register
from gradprobe_hf import GradProbeConfig
from gradprobe_hf.data.batches import Batches
from gradprobe_hf.data.text.paper_protocol import PaperSpec, paper_batches
from gradprobe_hf.data.windows import WindowSpec, load_batches
from gradprobe_hf.estimation.peak import peak_memory
from gradprobe_hf.evaluation.divergence import PairedMeasurement, measure_pair
from gradprobe_hf.model.loading.placement import accelerator
from gradprobe_hf.model.passes.upcast import upcast_products
from gradprobe_hf.model.targets import Target, find_targets
from gradprobe_hf.reconstruction.new_weights import NewWeights
from gradprobe_hf.recovery.of_pruning import recovered_weights
from gradprobe_hf.report.build import matrix_rows, versions
from gradprobe_hf.run.apply import replaced
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.run.decide import conclude, decide_pruning
from gradprobe_hf.run.decision import PruningDecision
from gradprobe_hf.run.diagnostics import Diagnostics
from gradprobe_hf.run.evaluate import evaluate_pair

DECIMALS = 5  # of a window's loss: a thousandth of a per cent of its perplexity

P = ParamSpec("P")
T = TypeVar("T")


class OtherSettingsError(ValueError):
    """What the file has was made of another model or text, or under another protocol."""


@dataclass(frozen=True)
class Protocol:
    """What all cells of a table have in common; texts as in `quality_texts.py`.

    Attributes:
        windows: of an evaluation text that does not say how many.
        blocks_per_step: of a sequential order.
        peers: the Python of an environment that has llm-compressor; None: there is none.
    """

    model: str
    dtype: str
    calibration: str
    evaluation: tuple[str, ...]
    num_samples: int
    sequence_length: int
    batch_size: int
    windows: int
    blocks_per_step: int
    peers: str | None = None


@dataclass(frozen=True)
class CellTask:
    """One cell to make.

    Attributes:
        table, method: name the row.
        sparsity: where it is another's; None: the column's.
        settings: of the file that it will go into.
        commit: of the code.
        state: a folder for what its recovery goes on from where it was stopped; None: it begins anew.
    """

    protocol: Protocol
    table: str
    method: str
    column: str
    seed: int
    sparsity: float | None
    settings: dict[str, Any]
    commit: str
    state: Path | None = None


class Bench:
    """The model and its texts."""

    def __init__(self, protocol: Protocol) -> None:
        self.protocol = protocol
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(protocol.model, dtype=protocol.dtype)
        self.model = model.eval().to(accelerator())
        self.tokenizer = AutoTokenizer.from_pretrained(protocol.model)
        self.targets: tuple[Target, ...] = find_targets(self.model)
        specs = [TextSpec.parse(spec) for spec in protocol.evaluation]
        self.texts = {spec.name: self._evaluation(spec) for spec in specs}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What has to be the same for cells to stand in one table."""
        own = self.protocol
        return {
            "model": Path(own.model).name,
            "dtype": own.dtype,
            "blocks_per_step": own.blocks_per_step,
            "calibration": f"{own.num_samples} x {own.sequence_length} of {TextSpec.parse(own.calibration).name}",
            "evaluation": {
                name: {"text": f"{text.samples} x {text.longest}", "fingerprint": text.fingerprint}
                for name, text in self.texts.items()
            },
            **on_device(self.model.device),
        }

    def check(self, settings: dict[str, Any]) -> None:
        if settings != self.settings:
            raise OtherSettingsError(f"has cells of other settings ({settings}, not {self.settings})")

    def context(self, row: Row, seed: int) -> RunContext:
        samples = row.options.get("num_samples", self.protocol.num_samples)
        batches = self.windows(self.source(row), "calibration", samples, seed)
        return RunContext(self.model, self.tokenizer, self.targets, GradProbeConfig(), batches, Batches.none())

    def source(self, row: Row) -> Any:
        """The text that a row calibrates on."""
        return row.calibration or TextSpec.parse(self.protocol.calibration).read()

    def config(self, row: Row, task: CellTask) -> GradProbeConfig:
        own = self.protocol
        common = {
            "num_samples": own.num_samples,
            "sequence_length": own.sequence_length,
            "batch_size": own.batch_size,
            "seed": task.seed,
        }
        sparsity = task.sparsity if task.sparsity is not None else self.budget(task.column)
        found = configuration(row, task.column, sparsity, common, own.blocks_per_step)
        if task.sparsity is None and found.group is None and row.masks is None and found.budget_scope == "row":
            # Rounds in every row itself: what others are asked for may round to one more.
            return configuration(row, task.column, float(task.column), common, own.blocks_per_step)
        return found

    def budget(self, column: str) -> float:
        """What Wanda makes of a column by rounding in every row: all others are asked for exactly as many zeros."""
        if ":" in column:
            kept, of = map(int, column.split(":"))
            return 1 - kept / of
        zeros = sum(target.shape[0] * round(float(column) * target.shape[1]) for target in self.targets)
        return zeros / sum(target.numel for target in self.targets)

    def measured(self, context: RunContext, decision: PruningDecision, label: str) -> dict[str, PairedMeasurement]:
        return {
            name: evaluate_pair(replace(context, evaluation=text), decision, f"{label}: {name}")
            for name, text in self.texts.items()
        }

    def measured_with(self, context: RunContext, parameters: NewWeights, label: str) -> dict[str, PairedMeasurement]:
        """The same of a model whose whole parameters are new."""
        works = {name: context.workload_on(text) for name, text in self.texts.items()}
        return {
            name: measure_pair(work, work, partial(replaced, context.model, parameters, keep=False), f"{label}: {name}")
            for name, work in works.items()
        }

    def _evaluation(self, spec: TextSpec) -> Batches:
        if spec.whole:
            return paper_batches(spec.read(), self.model, self.tokenizer, PaperSpec())
        return self.windows(spec.read(), "evaluation", spec.windows or self.protocol.windows)

    def windows(self, source: Any, part: Any, samples: int, seed: int = 0) -> Batches:
        return load_batches(
            source,
            WindowSpec(samples, self.protocol.sequence_length, self.protocol.batch_size, seed),
            part=part,
            model=self.model,
            processing_class=self.tokenizer,
        )


def on_device(device: torch.device) -> dict[str, str]:
    """The setting of cells that a GPU has made, which round otherwise; those of a CPU have none."""
    return {"device": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}


def measure_dense(protocol: Protocol) -> tuple[dict[str, Any], Dense]:
    """The settings, and the model as it is."""
    bench = Bench(protocol)
    with upcast_products(bench.model):
        found = bench.measured(bench_context(bench), PruningDecision({}), "dense")
    perplexity = {name: one.dense.perplexity or float("nan") for name, one in found.items()}
    return bench.settings, Dense(perplexity, {name: _losses(one, "dense") for name, one in found.items()})


def bench_context(bench: Bench) -> RunContext:
    """Of a model that nothing is done to."""
    nothing = Batches.none()
    return RunContext(bench.model, bench.tokenizer, bench.targets, GradProbeConfig(), nothing, nothing)


def make_cell(task: CellTask) -> tuple[Cell, dict[str, str]]:
    """One cell, and the versions of what made it.

    Raises:
        OtherSettingsError: the file's are not those of the model and the texts as they are now.
        ValueError: what pruning raises.
    """
    register(task.protocol.num_samples, task.protocol.sequence_length)
    bench, row = Bench(task.protocol), TABLES[task.table][0][task.method]
    bench.check(task.settings)
    with upcast_products(bench.model):
        return _peer_cell(bench, row, task) if row.peer else _own_cell(bench, row, task)


def _own_cell(bench: Bench, row: Row, task: CellTask) -> tuple[Cell, dict[str, str]]:
    config = bench.config(row, task)
    context = replace(bench.context(row, task.seed), config=config)
    begun = time.perf_counter()
    decision = _decided(context, row)
    seconds = time.perf_counter() - begun
    recovered = None
    if config.recovery_steps:  # on the text that was calibrated on: nothing else is given to any row
        before = sum(context.stopwatch.seconds.values())
        recovered = recovered_weights(context, decision, bench.source(row), None, task.state).parameters
        seconds += sum(context.stopwatch.seconds.values()) - before  # those of what it goes on from, too
    peak = peak_memory()["peak_resident_bytes"]
    if recovered is None:
        found = bench.measured(context, decision, _label(task))
    else:
        found = bench.measured_with(context, recovered, _label(task))
    matrices = matrix_rows(context, decision)
    cell = _cell(
        task,
        context,
        found,
        zeros=sum(one.zeros_after for one in matrices),
        weights=sum(one.weights for one in matrices),
        seconds=round(seconds, 1),
        peak_bytes=peak,
        passes=decision.diagnostics.passes,
        options=_changed(config),
    )
    if task.state is not None:
        shutil.rmtree(task.state, ignore_errors=True)
    return cell, versions()


def _decided(context: RunContext, row: Row) -> PruningDecision:
    if row.masks is None:
        return decide_pruning(context)
    diagnostics = Diagnostics()
    return conclude(context, row.masks(context, diagnostics), diagnostics)


def _peer_cell(bench: Bench, row: Row, task: CellTask) -> tuple[Cell, dict[str, str]]:
    """The weights that llm-compressor makes of the same windows, measured like the rest."""
    own, context = bench.protocol, bench.context(row, task.seed)
    assert own.peers is not None, "asked for where there is one"
    asked = PeerTask(own.peers, own.model, own.dtype, row.peer or "", task.column, bench.budget(task.column))
    pruned, about = asked.run(context.calibration)
    weights = NewWeights()
    for target in bench.targets:
        weights.add(target.name, pruned[target.parameter])
    found = bench.measured(context, PruningDecision({}, new_weights=weights), _label(task))
    cell = _cell(
        task,
        context,
        found,
        zeros=sum(int((matrix == 0).sum()) for matrix in weights.values()),
        weights=sum(matrix.numel() for matrix in weights.values()),
        seconds=about["seconds"],
        peak_bytes=about["peak_bytes"],
        passes={},
    )
    return cell, {f"llm-compressor: {name}": value for name, value in about["versions"].items()}


def _cell(task: CellTask, context: RunContext, found: dict[str, PairedMeasurement], **made: Any) -> Cell:
    apart = {name: one.divergence for name, one in found.items() if one.divergence is not None}
    return Cell(
        method=task.method,
        seed=task.seed,
        column=task.column,
        perplexity={name: one.pruned.perplexity or float("nan") for name, one in found.items()},
        kl={name: round(one.kl, DECIMALS) for name, one in apart.items()},
        agreement={name: round(one.top1_agreement, DECIMALS) for name, one in apart.items()},
        losses={name: _losses(one, "pruned") for name, one in found.items()},
        calibration=context.calibration.fingerprint,
        commit=task.commit,
        **made,
    )


def _losses(found: PairedMeasurement, which: str) -> list[float]:
    """The mean loss of each window."""
    windows = found.windows
    if windows is None:
        return []
    return [round(value, DECIMALS) for value in (getattr(windows, which) / windows.tokens).tolist()]


def _label(task: CellTask) -> str:
    return f"{task.method}, {task.column}, seed {task.seed}"


def _changed(config: GradProbeConfig) -> dict[str, Any]:
    """The options that differ from their defaults."""
    defaults = {option.name: option.default for option in fields(config)}
    return {name: value for name, value in config.to_dict().items() if getattr(config, name) != defaults[name]}


def alone(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of a call in a process of its own, forked from one that has imported this module and done nothing.

    So no cell pays for the imports, and its peak memory holds nothing of another cell. It ends with this process, even
    where that is killed: an hour of a core for a result that nobody reads would be the next cell's.
    """
    server = get_context("forkserver")
    server.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(1, mp_context=server, initializer=_end_with_parent) as pool:
        return pool.submit(function, *args, **kwargs).result()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None, "called in a process of the pool"

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)  # the other threads compute

    Thread(target=watch, daemon=True).start()
