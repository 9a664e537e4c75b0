"""Perplexity of a model pruned in many ways to the same exact sparsity.

A row is a method, a column a sparsity or a pattern. All cells are made on one loaded model whose weights stay as they
are: every cell is measured on the weights that the model is served. The first probe is the same for every sparsity, so
a run makes it once, and its seconds count in every row that begins with it. Cells that the result file has are not made
again; pass --fresh when a method has changed.

The other tables: `--accumulators` keeps the statistics in fewer bytes, `--variants` changes one option of two probes,
`--texts` calibrates on more text, less text, and the model's own. `--peers PYTHON` adds rows made by llm-compressor
from the same model and windows, in the environment of that Python (see `peer.py`).

    make bench-quality bench-variants bench-accumulators      # on SmolLM2-135M, into results/
    make bench-stories bench-texts                            # on a model of 15M, three draws of the windows

usage: python -m benchmarks.quality --model DIR [--calibration SPEC] [--evaluation SPEC ...] [--columns 0.5 2:4]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.quality_cells import Cell, CellFile
from benchmarks.quality_peers import PeerTask
from benchmarks.quality_rows import (
    AND,
    AS_SPARSE_ROWS,
    COLUMNS,
    PEERS,
    RULE,
    TABLES,
    Options,
    configuration,
    in_table,
)
from benchmarks.quality_tables import quality_table, spread_table, variants_table
from benchmarks.text_table import texts_table
from gradprobe_hf import GradProbeConfig
from gradprobe_hf.comparison.rows import Comparison
from gradprobe_hf.data.batches import Batches
from gradprobe_hf.data.windows import WindowSpec, load_batches
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.reconstruction.new_weights import NewWeights
from gradprobe_hf.report.build import peak_memory
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.run.decide import PruningDecision

RESULTS = Path(__file__).parent / "results"
CLEAR_REFS = Path("/proc/self/clear_refs")
CALIBRATION_SHARE = 0.7  # of a text that is split
SHOWN = {"accumulators": spread_table, "variants": variants_table, "texts": texts_table, "quality": quality_table}


class Bench:
    """One model, its texts, and the cells that are made of them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rows, _ = TABLES[args.table]
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(args.model)
        self.targets = find_targets(self.model)
        self.source: Any = args.calibration
        self.texts: dict[str, Batches] = {}
        self._read_texts()
        calibrated = text_name(str(args.split or args.calibration))
        settings = {
            "model": Path(args.model).name,
            "dtype": args.dtype,
            "blocks_per_step": args.blocks_per_step,
            "calibration": f"{args.num_samples} x {args.sequence_length} of {calibrated}",
            "evaluation": {
                name: {"text": f"{text.samples} x {args.sequence_length}", "fingerprint": text.fingerprint}
                for name, text in self.texts.items()
            },
        }
        self.file = CellFile(args.output, settings, args.fresh)

    def _read_texts(self) -> None:
        args = self.args
        if args.split:
            text = args.split.read_text(encoding="utf-8")
            cut = int(len(text) * CALIBRATION_SHARE)
            self.source = [text[:cut]]
            self.texts[args.split.stem] = self._batches([text[cut:]], "evaluation", args.evaluation_samples)
            return
        for spec in args.evaluation:
            source, _, windows = spec.partition("=")
            count = int(windows or args.evaluation_samples)
            self.texts[text_name(source)] = self._batches(source, "evaluation", count)

    def run(self) -> None:
        """Make every cell that is wanted and missing: one comparison for each draw of each calibration text."""
        for seed in self.args.seed:
            todo = list(self._todo(seed))
            for text in dict.fromkeys(self._text_of(method) for method, _ in todo):
                self._make(seed, text, [cell for cell in todo if self._text_of(cell[0]) == text])

    def _todo(self, seed: int) -> Iterator[tuple[str, str]]:
        for column in self.args.columns:
            for method in self.args.methods or (*self.rows, *(PEERS if self.args.peers else ())):
                wanted = self.args.methods or self.args.full or in_table(method, column)
                parts = (method, *AS_SPARSE_ROWS) if method == RULE else (method,)
                if wanted and any((part, seed, column) not in self.file.cells for part in parts):
                    yield method, column

    def _text_of(self, method: str) -> tuple[str | None, int]:
        """The source of a row's calibration text, where it has one of its own, and the number of windows."""
        options = self._options(method)
        return options.get("calibration"), options.get("num_samples", self.args.num_samples)

    def _options(self, method: str) -> Options:
        return self.rows.get(method, {})  # a peer has none

    def _make(self, seed: int, text: tuple[str | None, int], todo: list[tuple[str, str]]) -> None:
        own_source, samples = text
        batches = self._batches(own_source or self.source, "calibration", samples, seed)
        configs = [self._config(method, column, seed) for method, column in todo if method not in PEERS]
        context = RunContext(
            self.model,
            self.tokenizer,
            self.targets,
            GradProbeConfig(num_samples=samples, sequence_length=self.args.sequence_length, seed=seed),
            batches,
            next(iter(self.texts.values())),
        )
        # Rows of unlike statistics cannot share the first probe.
        shared = [config for config in configs if config and self.args.table != "accumulators"]
        comparison = Comparison(context, shared)
        if not self.file.dense:
            self.file.dense = self._perplexities(comparison, None, "dense")
        for method, column in todo:
            if method in PEERS:
                self._peer_cell(comparison, batches, method, column, seed)
            elif config := self._config(method, column, seed):
                cell = self.file.cells.get((method, seed, column)) or self._cell(comparison, method, column, config)
                if method == RULE:
                    self._make_as_sparse(comparison, cell)

    def _make_as_sparse(self, comparison: Comparison, rule: Cell) -> None:
        """The other methods at the sparsity that the threshold rule came to."""
        for name, method in AS_SPARSE_ROWS.items():
            if (name, rule.seed, rule.column) not in self.file.cells:
                config = self._config(method, rule.column, rule.seed, rule.sparsity)
                assert config is not None, "the rule has unstructured columns only"
                self._cell(comparison, name, rule.column, config)

    def _config(self, method: str, column: str, seed: int, sparsity: float | None = None) -> GradProbeConfig | None:
        """Default: at the sparsity that Wanda's rounding of every row made of the column, if that is known already."""
        sparsity = self._budget(column, seed) if sparsity is None else sparsity
        return configuration(self._options(method), column, self.args, seed, sparsity)

    def _budget(self, column: str, seed: int) -> float:
        if ":" in column:
            kept, of = map(int, column.split(":"))
            return 1 - kept / of
        wanda = self.file.cells.get(("wanda", seed, column))
        return wanda.sparsity if wanda else float(column)

    def _cell(self, comparison: Comparison, method: str, column: str, config: GradProbeConfig) -> Cell:
        reset_peak()
        decision, seconds = comparison.decision(config)
        peak = peak_since_reset()
        if masks_from := self.file.cells.get((method.split(AND)[0], config.seed, column)):
            peak = max(peak, masks_from.peak_bytes) if peak and masks_from.peak_bytes else None
        label = f"{method}, {column}, seed {config.seed}"
        found = {name: comparison.measured(decision, f"{label}: {name}", text) for name, text in self.texts.items()}
        row = comparison.describe(method, config, decision, seconds, next(iter(found.values())))
        return self.file.add(
            Cell(
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
        )

    def _peer_cell(self, comparison: Comparison, batches: Batches, method: str, column: str, seed: int) -> None:
        """The weights that llm-compressor makes of the same windows, measured like the rest."""
        args, sparsity = self.args, self._budget(column, seed)
        pruned, about = PeerTask(args.peers, args.model, args.dtype, PEERS[method], column, sparsity).run(batches)
        weights = NewWeights()
        for target in self.targets:
            weights.add(target.name, pruned[target.parameter])
        label = f"{method}, {column}, seed {seed}"
        self.file.versions |= {f"llm-compressor: {name}": value for name, value in about["versions"].items()}
        self.file.add(
            Cell(
                method=method,
                seed=seed,
                column=column,
                zeros=sum(int((matrix == 0).sum()) for matrix in weights.values()),
                weights=sum(matrix.numel() for matrix in weights.values()),
                perplexity=self._perplexities(comparison, PruningDecision({}, new_weights=weights), label),
                seconds=about["seconds"],
                peak_bytes=about["peak_bytes"],
                passes={},
            )
        )

    def _perplexities(self, comparison: Comparison, decision: PruningDecision | None, label: str) -> dict[str, float]:
        found = {name: comparison.measured(decision, f"{label}: {name}", text) for name, text in self.texts.items()}
        return {name: one.perplexity or math.nan for name, one in found.items()}

    def _batches(self, source: Any, part: Any, samples: int, seed: int = 0) -> Batches:
        return load_batches(
            source,
            WindowSpec(samples, self.args.sequence_length, self.args.batch_size, seed),
            part=part,
            model=self.model,
            processing_class=self.tokenizer,
        )


def text_name(source: str) -> str:
    return "WikiText-2" if "wikitext" in source else Path(source).stem


def reset_peak() -> None:
    """Start a new maximum of this process's resident memory (Linux: proc(5), clear_refs)."""
    if CLEAR_REFS.exists():
        CLEAR_REFS.write_text("5")


def peak_since_reset() -> int | None:
    return peak_memory()["peak_resident_bytes"] if CLEAR_REFS.exists() else None


def parsed() -> argparse.Namespace:
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
    parser.add_argument("--columns", nargs="+", metavar="C", help=f"default: {' '.join(COLUMNS)} (other tables: fewer)")
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="default: those that the table has")
    parser.add_argument("--full", action="store_true", help="every method in every column")
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="draws the calibration windows")
    parser.add_argument("--num-samples", type=int, default=64)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--evaluation-samples", type=int, default=60)
    parser.add_argument("--blocks-per-step", type=int, default=1, help="of the sequential order")
    tables = parser.add_mutually_exclusive_group()
    for table, about in {
        "accumulators": "float32 and int8 statistics",
        "variants": "other Fisher estimates, factors, bounds and scopes",
        "texts": "more calibration text, less of it, and the model's own",
    }.items():
        tables.add_argument(
            f"--{table}", dest="table", action="store_const", const=table, default="quality", help=about
        )
    parser.add_argument("--peers", metavar="PYTHON", help="of an environment that has llm-compressor")
    parser.add_argument("--output", type=Path, help="default: results/TABLE.json")
    parser.add_argument("--fresh", action="store_true", help="forget the cells of earlier runs")
    args = parser.parse_args()
    rows, columns = TABLES[args.table]
    known = {**rows, **PEERS}
    for method in args.methods or ():
        if method not in known:
            parser.error(f"--methods {method!r} is none of: {'; '.join(known)}")
        if method in PEERS and not args.peers:
            parser.error(f"{method!r} needs --peers PYTHON, of an environment that has llm-compressor")
    args.output = args.output or RESULTS / f"{args.table}.json"
    args.columns = args.columns or list(columns)
    return args


def main() -> None:
    args = parsed()
    bench = Bench(args)
    bench.run()
    print(SHOWN[args.table](bench.file.to_dict()))


if __name__ == "__main__":
    main()
