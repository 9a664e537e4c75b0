"""Perplexity of a model pruned in many ways to the same exact sparsity, and how far it then is from the dense model.

A row is a method, a column a sparsity or a pattern. Each cell is made in a process of its own (`quality_worker.py`) and
written at once: whatever was stopped goes on where it was, cell by cell. Cells are of one model, one protocol and one
commit of the code; a file that has others is refused.

The other tables: `--accumulators` keeps the statistics in fewer bytes, `--variants` changes one option of two probes,
`--texts` calibrates on more text, less text, and the model's own. `--peers PYTHON` adds rows made by llm-compressor
from the same model and windows, in the environment of that Python (see `peer.py`). Texts are as in `quality_texts.py`.

    make bench-c4 bench-wikitext      # SmolLM2-135M, calibrated on C4 and on WikiText-2
    make bench-qwen bench-paper       # a second model; the paper protocol
    make bench-stories                # a model of 15M, most rows in every column

usage: python -m benchmarks.quality --model DIR [--calibration SPEC] [--evaluation SPEC ...] [--columns 0.5 2:4]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks import quality_worker as worker
from benchmarks.quality_cells import CellFile, code_commit
from benchmarks.quality_rows import COLUMNS, TABLES, Row, in_table
from benchmarks.quality_tables import quality_table, spread_table, variants_table
from benchmarks.text_table import texts_table

RESULTS = Path(__file__).parent / "results"
SHOWN = {"accumulators": spread_table, "variants": variants_table, "texts": texts_table, "quality": quality_table}


class Bench:
    """The cells that are wanted, and the file they go into."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rows: dict[str, Row] = TABLES[args.table][0]
        self.file = CellFile(args.output, code_commit(), args.fresh, args.mixed)
        self.protocol = worker.Protocol(
            model=str(args.model),
            dtype=args.dtype,
            calibration=args.calibration,
            evaluation=tuple(args.evaluation),
            num_samples=args.num_samples,
            sequence_length=args.sequence_length,
            batch_size=args.batch_size,
            windows=args.evaluation_samples,
            blocks_per_step=args.blocks_per_step,
            peers=args.peers,
        )

    def run(self) -> list[str]:
        """Make every cell that is wanted and missing; returns those that failed."""
        if self.file.dense is None:
            self.file.begin(*worker.alone(worker.measure_dense, self.protocol))
        failed = []
        for method, column, seed in self._missing():
            name = f"{method}, {column}, seed {seed}"
            try:
                self.file.add(*worker.alone(worker.make_cell, self._task(method, column, seed)))
            except worker.OtherSettingsError as error:
                raise SystemExit(
                    f"{self.file.path} {error}: --fresh forgets them, and another --output keeps them."
                ) from None
            except Exception as error:  # one cell, a process without memory say, is no reason to lose the others
                print(f"{name} failed: {type(error).__name__}: {error}", file=sys.stderr)
                failed.append(name)
        return failed

    def _missing(self) -> Iterator[tuple[str, str, int]]:
        for seed in self.args.seed:
            for column in self.args.columns:
                for method in self._methods(column):
                    row = self.rows[method]
                    like = row.like is None or (row.like, seed, column) in self.file.cells
                    if (method, seed, column) not in self.file.cells and row.is_in(column) and like:
                        yield method, column, seed

    def _methods(self, column: str) -> list[str]:
        """Those of a column as they were asked for, and behind them what is as sparse as one of them comes to."""
        args = self.args
        asked = args.methods or [name for name in self.rows if args.full or in_table(name, column)]
        wanted = dict.fromkeys([*asked, *(name for name, row in self.rows.items() if row.like in asked)])
        return [name for name in wanted if args.peers or not self.rows[name].peer]

    def _task(self, method: str, column: str, seed: int) -> worker.CellTask:
        like = self.rows[method].like
        assert self.file.settings is not None, "known since the dense model was measured"
        return worker.CellTask(
            protocol=self.protocol,
            table=self.args.table,
            method=method,
            column=column,
            seed=seed,
            sparsity=self.file.cells[like, seed, column].sparsity if like else None,
            settings=self.file.settings,
            commit=self.file.commit,
            state=self.args.state and self.args.state / f"{method}, {column.replace(':', 'of')}, {seed}",
        )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--calibration", default="Salesforce/wikitext:wikitext-2-raw-v1:validation", metavar="SPEC")
    parser.add_argument(
        "--evaluation", nargs="+", default=["Salesforce/wikitext:wikitext-2-raw-v1:test", "pydoc=26"], metavar="SPEC"
    )
    parser.add_argument("--columns", nargs="+", metavar="C", help=f"default: {' '.join(COLUMNS)} (other tables: fewer)")
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="default: those that the table has")
    parser.add_argument("--full", action="store_true", help="every method in every column")
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="draws the calibration windows")
    parser.add_argument("--num-samples", type=int, default=64)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--evaluation-samples", type=int, default=60, help="windows, of a text that does not say")
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
    parser.add_argument(
        "--state", type=Path, metavar="DIR", help="for checkpoints: a recovery that was stopped goes on from there"
    )
    parser.add_argument("--fresh", action="store_true", help="forget the cells of earlier runs")
    parser.add_argument("--mixed", action="store_true", help="keep cells that other code has made; the tables say so")
    args = parser.parse_args()
    rows, columns = TABLES[args.table]
    for method in args.methods or ():
        if method not in rows:
            parser.error(f"--methods {method!r} is none of: {'; '.join(rows)}")
        if rows[method].peer and not args.peers:
            parser.error(f"{method!r} needs --peers PYTHON, of an environment that has llm-compressor")
    args.output = args.output or RESULTS / f"{args.table}.json"
    args.columns = args.columns or list(columns)
    return args


def main() -> None:
    args = parsed()
    bench = Bench(args)
    failed = bench.run()
    print(SHOWN[args.table](bench.file.to_dict() | {"made_by": args.output.stem}))
    if failed:
        sys.exit(f"failed: {'; '.join(failed)}. The same command tries again what is missing.")


if __name__ == "__main__":
    main()
