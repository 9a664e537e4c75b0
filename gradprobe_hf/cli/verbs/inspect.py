"""`gradprobe inspect`."""

from __future__ import annotations

import argparse

from gradprobe_hf.cli.options import VerbParser, given


def add_arguments(parser: VerbParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="a checkpoint folder with safetensors files")
    parser.add_options("quiet", "trust_remote_code")


def run(options: argparse.Namespace) -> None:
    from gradprobe_hf.checkpoint.inspect import inspect_checkpoint
    from gradprobe_hf.cli.output import print_inspection, print_json

    found = inspect_checkpoint(options.directory, **given(options, "trust_remote_code"))
    print_json(found.to_dict()) if options.json else print_inspection(found, options.directory)
