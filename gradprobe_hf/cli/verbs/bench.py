"""`gradprobe bench`."""

from __future__ import annotations

import argparse

from gradprobe_hf.cli.config_options import add_fields
from gradprobe_hf.cli.options import VerbParser, given, shows_progress
from gradprobe_hf.cli.values import at_least

LOADING = ("dtype", "trust_remote_code", "merge_adapters", "device_map", "allow_missing_weights")


def add_arguments(parser: VerbParser) -> None:
    parser.add_argument("models", metavar="MODEL", nargs="+", help="Hub ids or checkpoint folders; the first is 1.00")
    parser.add_options("quiet", *LOADING)
    numbers = {
        "prompt_length": (1, "tokens that are read (default: 512, or as many as all of them take)"),
        "new_tokens": (2, "tokens that are written, one text at a time (default: 32)"),
        "repeats": (1, "rounds that count, after two that do not (default: 10)"),
    }
    for name, (least, what) in numbers.items():
        parser.add_option("options", name, type=at_least(least), metavar="N", help=what)
    add_fields(parser, ("task",))


def run(options: argparse.Namespace) -> None:
    from gradprobe_hf.bench.bench import bench_pretrained
    from gradprobe_hf.cli.output import print_json
    from gradprobe_hf.cli.tables.bench import print_bench

    found = bench_pretrained(
        options.models,
        progress=shows_progress(options),
        **given(options, "prompt_length", "new_tokens", "repeats", "task", *LOADING),
    )
    print_json(found.to_dict()) if options.json else print_bench(found)
