"""Tell what a run will take, before any of it: memory and disk, passes, and what fits here. No weight is read."""

from __future__ import annotations

import argparse

from gradprobe_hf.cli.estimate_table import print_estimate
from gradprobe_hf.cli.options import (
    add_accumulator_arguments,
    add_method_arguments,
    add_window_arguments,
    configuration,
)
from gradprobe_hf.cli.output import add_source_arguments, given, print_json
from gradprobe_hf.estimation.estimate import estimate
from gradprobe_hf.model.loading import load_config, skeleton
from gradprobe_hf.model.targets import find_targets


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a Hub id, a folder with a config.json, or such a JSON file")
    add_source_arguments(parser)
    add_method_arguments(parser)
    add_window_arguments(parser.add_argument_group("calibration windows"))
    add_accumulator_arguments(parser.add_argument_group("memory"))
    parser.add_argument("--resume", action="store_true", help="count the snapshots of a run that can be resumed")
    parser.add_argument("--quiet", action="store_true", help="errors only")


def run(options: argparse.Namespace) -> None:
    config = configuration(options)
    model = skeleton(load_config(options.model, **given(options, "revision", "trust_remote_code")), dtype=options.dtype)
    targets = find_targets(model, config.include, config.exclude)
    found = estimate(model, targets, config, snapshots=options.resume)
    print_json({"model": options.model, **found.to_dict()}) if options.json else print_estimate(found)
