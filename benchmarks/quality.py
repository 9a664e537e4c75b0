"""Perplexity of a model pruned in many ways to the same exact sparsity.

A row is a method, a column a sparsity or a pattern. All cells are made on one loaded model, whose weights stay as they
are: a cell is measured through what the model is served. The first probe is the same for every sparsity, so it is made
once a run and its seconds count in every row that begins with it. Cells already in the result file are not made again;
pass --fresh when the method has changed.

`--accumulators` and `--variants` are tables of their own: what keeping the statistics in fewer bytes does to the
result, and ways to decide that were tried. `--peers PYTHON` adds what llm-compressor makes of the same model and
windows, in the environment of that Python (see `peer.py`); it is measured like every other row.

usage: python -m benchmarks.quality --model DIR [--calibration SPEC] [--evaluation SPEC ...] [--columns 0.5 2:4]
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.quality_rows import (
    ACCUMULATORS,
    AND,
    COLUMNS,
    METHODS,
    PEERS,
    RIVALS,
    RULE,
    VARIANTS,
    configuration,
    in_table,
)
from benchmarks.quality_tables import quality_table, spread_table, variants_table
from gradprobe_hf import GradProbeConfig
from gradprobe_hf.comparison import Comparison, terms_of
from gradprobe_hf.data.batches import Batches
from gradprobe_hf.data.windows import load_batches
from gradprobe_hf.evaluation.perplexity import Measurement
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.report.build import peak_memory, versions
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.selection.packed_masks import PackedMasks

RESULTS = Path(__file__).parent / "results"
PEER = Path(__file__).parent / "peer.py"
CLEAR_REFS = Path("/proc/self/clear_refs")
CALIBRATION_SHARE = 0.7  # of a text that is split


@dataclass(frozen=True)
class Cell:
    """What a method made of the model in one column.

    Attributes:
        column: a sparsity, or n:m.
        perplexity: by text.
        seconds: that it takes alone, without the evaluation.
        peak_bytes: of resident memory meanwhile, with the shared first probe; None where the system does not tell.
        passes: forward and backward, over the calibration text.
    """

    method: str
    seed: int
    column: str
    zeros: int
    weights: int
    perplexity: dict[str, float]
    seconds: float
    peak_bytes: int | None
    passes: dict[str, float]

    @property
    def key(self) -> tuple[str, int, str]:
        return self.method, self.seed, self.column


class Bench:
    """The cells of one model, and the file they are kept in."""

    def __init__(self, ask: argparse.Namespace) -> None:
        self.ask = ask
        self.methods = ACCUMULATORS if ask.accumulators else VARIANTS if ask.variants else METHODS
        self.everywhere = ask.full or ask.accumulators
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(ask.model, dtype=ask.dtype).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(ask.model)
        self.targets = find_targets(self.model)
        self.source: Any = ask.calibration
        self.texts = {}
        if ask.split:
            text = ask.split.read_text(encoding="utf-8")
            cut = int(len(text) * CALIBRATION_SHARE)
            self.source, rest = [text[:cut]], [text[cut:]]
            self.texts[ask.split.stem] = self._batches(rest, "evaluation", ask.evaluation_samples, seed=0)
        for spec in ask.evaluation if not ask.split else ():
            source, _, windows = spec.partition("=")
            count = int(windows or ask.evaluation_samples)
            self.texts[text_name(source)] = self._batches(source, "evaluation", count, seed=0)
        calibrated = text_name(str(ask.split or ask.calibration))
        settings = {
            "model": Path(ask.model).name,
            "dtype": ask.dtype,
            "blocks_per_step": ask.blocks_per_step,
            "calibration": f"{ask.num_samples} x {ask.sequence_length} of {calibrated}",
            "evaluation": {
                name: {"text": f"{text.samples} x {ask.sequence_length}", "fingerprint": text.fingerprint}
                for name, text in self.texts.items()
            },
        }
        saved = json.loads(ask.output.read_text()) if ask.output.exists() and not ask.fresh else {}
        if saved.get("settings", settings) != settings:
            raise SystemExit(
                f"{ask.output} has cells of other settings ({saved['settings']}, not {settings}): --fresh forgets "
                "them, and another --output keeps them."
            )
        saved = saved or {"dense": {}, "rows": []}
        self.settings, self.dense = settings, saved["dense"]
        self.versions = saved.get("versions", {}) | versions()
        self.cells = {cell.key: cell for cell in (Cell(**row) for row in saved["rows"])}

    def run(self) -> None:
        for seed in self.ask.seed:
            todo = list(self._todo(seed))
            if todo:
                self._make(seed, todo)

    def _todo(self, seed: int) -> Iterator[tuple[str, str]]:
        for column in self.ask.columns:
            for method in self.ask.methods or (*self.methods, *(PEERS if self.ask.peers else ())):
                wanted = self.ask.methods or self.everywhere or in_table(method, column)
                parts = (method, *RIVALS) if method == RULE else (method,)
                if wanted and any((part, seed, column) not in self.cells for part in parts):
                    yield method, column

    def _make(self, seed: int, todo: list[tuple[str, str]]) -> None:
        common = GradProbeConfig(num_samples=self.ask.num_samples, sequence_length=self.ask.sequence_length, seed=seed)
        batches = self._batches(self.source, "calibration", self.ask.num_samples, seed)
        own = [(method, column) for method, column in todo if method not in PEERS]
        planned = {f"{method} {column}": self._config(method, column, seed) for method, column in own}
        terms = terms_of({name: config for name, config in planned.items() if config})
        comparison = Comparison(
            RunContext(self.model, self.targets, common, batches),
            next(iter(self.texts.values())),
            frozenset() if self.ask.accumulators else terms,
        )
        if not self.dense:
            found = self._measured(comparison, PackedMasks(), {}, "dense")
            self.dense = {name: one.perplexity for name, one in found.items()}
        for method, column in todo:
            if method in PEERS:
                self._peer_cell(comparison, batches, method, column, seed)
            elif config := self._config(method, column, seed):
                cell = self.cells.get((method, seed, column)) or self._cell(comparison, method, column, config)
                for name in RIVALS if method == RULE else ():
                    same = self._config(RIVALS[name], column, seed, cell.zeros / cell.weights)
                    assert same is not None, "an unstructured column"
                    if (name, seed, column) not in self.cells:
                        self._cell(comparison, name, column, same)

    def _config(self, method: str, column: str, seed: int, zeros: float | None = None) -> GradProbeConfig | None:
        """At the sparsity that Wanda's rounding of every row made of the column, if that is known already."""
        zeros = self._budget(column, seed) if zeros is None else zeros
        return configuration(self.methods[method], column, self.ask, seed, zeros)

    def _budget(self, column: str, seed: int) -> float:
        if ":" in column:
            kept, of = map(int, column.split(":"))
            return 1 - kept / of
        wanda = self.cells.get(("wanda", seed, column))
        return wanda.zeros / wanda.weights if wanda else float(column)

    def _cell(self, comparison: Comparison, method: str, column: str, config: GradProbeConfig) -> Cell:
        reset_peak()
        verdict, seconds = comparison.verdict(config)
        peak = peak_since_reset()
        if masks_from := self.cells.get((method.split(AND)[0], config.seed, column)):
            peak = max(peak, masks_from.peak_bytes) if peak and masks_from.peak_bytes else None
        found = self._measured(comparison, verdict.masks, verdict.updates, f"{method}, {column}, seed {config.seed}")
        row = comparison.describe(method, config, verdict, seconds, next(iter(found.values())))
        cell = Cell(
            method=method,
            seed=config.seed,
            column=column,
            zeros=row.zeros,
            weights=row.weights,
            perplexity={name: one.perplexity or math.nan for name, one in found.items()},
            seconds=row.seconds,
            peak_bytes=peak,
            passes=row.passes,
        )
        return self._kept(cell)

    def _peer_cell(self, comparison: Comparison, batches: Batches, method: str, column: str, seed: int) -> None:
        """What llm-compressor makes of the same windows, measured like the rest; its zeros are as it made them."""
        made, told = prune_with_peer(self.ask, batches, PEERS[method], column, self._budget(column, seed))
        updates = {target.name: made[target.parameter] for target in self.targets}
        found = self._measured(comparison, PackedMasks(), updates, f"{method}, {column}, seed {seed}")
        self.versions |= {f"llm-compressor: {name}": value for name, value in told["versions"].items()}
        self._kept(
            Cell(
                method=method,
                seed=seed,
                column=column,
                zeros=sum(int((matrix == 0).sum()) for matrix in updates.values()),
                weights=sum(matrix.numel() for matrix in updates.values()),
                perplexity={name: one.perplexity or math.nan for name, one in found.items()},
                seconds=told["seconds"],
                peak_bytes=told["peak_bytes"],
                passes={},
            )
        )

    def _kept(self, cell: Cell) -> Cell:
        self.cells[cell.key] = cell
        self._save()
        return cell

    def _measured(self, comparison: Comparison, masks: Any, updates: Any, label: str) -> dict[str, Measurement]:
        return {
            name: comparison.measured(masks, updates, f"{label}: {name}", text) for name, text in self.texts.items()
        }

    def _batches(self, source: Any, part: Any, samples: int, seed: int) -> Batches:
        ask = self.ask
        return load_batches(
            source,
            part=part,
            model=self.model,
            processing_class=self.tokenizer,
            samples=samples,
            sequence_length=ask.sequence_length,
            batch_size=ask.batch_size,
            seed=seed,
        )

    @property
    def results(self) -> dict[str, Any]:
        rows = [asdict(cell) for cell in self.cells.values()]
        return {"settings": self.settings, "dense": self.dense, "rows": rows, "versions": self.versions}

    def _save(self) -> None:
        self.ask.output.parent.mkdir(parents=True, exist_ok=True)
        self.ask.output.write_text(json.dumps(self.results, indent=2) + "\n")


def prune_with_peer(
    ask: argparse.Namespace, batches: Batches, method: str, column: str, sparsity: float
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The matrices `[out, in]` that llm-compressor comes to, by parameter; its seconds, peak_bytes and versions."""
    with tempfile.TemporaryDirectory() as scratch:
        windows, changed = Path(scratch, "windows.safetensors"), Path(scratch, "changed.safetensors")
        save_file({"input_ids": torch.cat([batch["input_ids"] for batch in batches])}, windows)
        command = [ask.peers, PEER, ask.model, windows, changed, "--method", method, "--dtype", ask.dtype]
        command += ["--sparsity", str(sparsity), *(["--pattern", column] if ":" in column else [])]
        subprocess.run(command, check=True, stdout=sys.stderr)
        with safe_open(changed, "pt") as file:
            told = json.loads(file.metadata()["told"])
        return load_file(changed), told


def text_name(source: str) -> str:
    return "WikiText-2" if "wikitext" in source else Path(source).stem


def reset_peak() -> None:
    """Begin a new highest point of this process's resident memory (Linux: proc(5), clear_refs)."""
    if CLEAR_REFS.exists():
        CLEAR_REFS.write_text("5")


def peak_since_reset() -> int | None:
    return peak_memory()["peak_resident_bytes"] if CLEAR_REFS.exists() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--calibration", default="Salesforce/wikitext:wikitext-2-raw-v1:validation")
    parser.add_argument(
        "--evaluation",
        nargs="+",
        default=["Salesforce/wikitext:wikitext-2-raw-v1:test", "pydoc=26"],
        metavar="SPEC[=WINDOWS]",
    )
    parser.add_argument(
        "--split", type=Path, metavar="FILE", help="calibrate on the first 70%% of a text, evaluate on the rest"
    )
    parser.add_argument("--columns", nargs="+", metavar="C", help=f"default: {' '.join(COLUMNS)} (accumulators: 0.6)")
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="default: those that the table has")
    parser.add_argument("--full", action="store_true", help="every method in every column")
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="of the calibration windows")
    parser.add_argument("--num-samples", type=int, default=64)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--evaluation-samples", type=int, default=60)
    parser.add_argument("--blocks-per-step", type=int, default=1, help="of the sequential order")
    tables = parser.add_mutually_exclusive_group()
    tables.add_argument("--accumulators", action="store_true", help="float32 and int8 statistics")
    tables.add_argument("--variants", action="store_true", help="other estimates, factors, bounds and scopes")
    parser.add_argument("--peers", metavar="PYTHON", help="of an environment that has llm-compressor")
    parser.add_argument("--output", type=Path, help="default: quality.json (or accumulators, variants) in results")
    parser.add_argument("--fresh", action="store_true", help="forget the cells of earlier runs")
    ask = parser.parse_args()
    known = {**(ACCUMULATORS if ask.accumulators else VARIANTS if ask.variants else METHODS), **PEERS}
    for method in ask.methods or ():
        if method not in known:
            parser.error(f"--methods {method!r} is none of: {'; '.join(known)}")
        if method in PEERS and not ask.peers:
            parser.error(f"{method!r} needs --peers PYTHON, of an environment that has llm-compressor")
    name = "accumulators" if ask.accumulators else "variants" if ask.variants else "quality"
    ask.output = ask.output or RESULTS / f"{name}.json"
    ask.columns = ask.columns or {"accumulators": ["0.6"], "variants": ["0.6", "0.7"]}.get(name, list(COLUMNS))
    bench = Bench(ask)
    bench.run()
    table = {"accumulators": spread_table, "variants": variants_table}.get(name, quality_table)
    print(table(bench.results))


if __name__ == "__main__":
    main()
