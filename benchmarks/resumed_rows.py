"""Rows of whole runs in one JSON file: what the file has is not made again, and rows of other settings are refused."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality_cells import code_commit, write_whole
from benchmarks.quality_texts import TextSpec
from gradprobe_hf.report.build import versions

Row = dict[str, Any]


def row_parser(about: str | None, names: Sequence[str], output: Path) -> argparse.ArgumentParser:
    """The arguments that such benchmarks have in common."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--calibration", required=True, metavar="SPEC", help="as of benchmarks.quality")
    parser.add_argument("--evaluation", required=True, metavar="SPEC")
    parser.add_argument("--rows", nargs="+", choices=names, default=list(names), metavar="NAME")
    parser.add_argument("--num-samples", type=int, default=32)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--evaluation-samples", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=output)
    parser.add_argument("--fresh", action="store_true", help="forget the rows of earlier runs")
    return parser


def windows_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options of a configuration that these arguments give to every row."""
    return {name: getattr(args, name) for name in ("num_samples", "sequence_length", "evaluation_samples", "seed")}


def texts_of(args: argparse.Namespace) -> dict[str, Any]:
    """What `prune_pretrained` calibrates and measures on."""
    return {name: TextSpec.parse(getattr(args, name)).read() for name in ("calibration", "evaluation")}


def made_rows(args: argparse.Namespace, row: Callable[[argparse.Namespace, str], Row]) -> dict[str, Any]:
    """The file's settings and rows, when those that were missing are made and written, each with its commit."""
    made_by = f"benchmarks/{Path(inspect.getfile(row)).name}"
    asked = {name: value for name, value in vars(args).items() if name not in ("output", "fresh", "rows")}
    asked |= {name: Path(asked[name]).name for name in ("model", "calibration", "evaluation", "sst2") if name in asked}
    known = json.loads(args.output.read_text()) if args.output.exists() and not args.fresh else {"rows": []}
    if known.get("settings", asked) != asked:
        raise SystemExit(f"{args.output} is of {known['settings']}: --fresh forgets it, another --output keeps it.")
    for name in args.rows:
        if name not in [made["row"] for made in known["rows"]]:
            known["rows"].append({**row(args, name), "commit": code_commit(made_by)})
            whole = {"settings": asked, "rows": known["rows"], "versions": versions()}
            write_whole(args.output, json.dumps(whole, indent=1) + "\n")
    return {"settings": asked, "rows": known["rows"]}
