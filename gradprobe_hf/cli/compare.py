"""Prune one model in several ways to one sparsity, and measure each: a table, a JSON file and a picture."""

from __future__ import annotations

import argparse
from pathlib import Path

from gradprobe_hf.cli.options import (
    add_data_arguments,
    add_memory_arguments,
    add_method_arguments,
    configuration,
    option_values,
)
from gradprobe_hf.cli.output import add_model_arguments, console, given, print_comparison, print_json
from gradprobe_hf.comparison import RESULT_NAME, baselines, compare_pretrained
from gradprobe_hf.config import GradProbeConfig
from gradprobe_hf.preparation import Loading
from gradprobe_hf.processes import join_processes
from gradprobe_hf.recipes import read_yaml


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--output", metavar="DIR", help=f"folder for {RESULT_NAME} and the picture")
    parser.add_argument("--overwrite", action="store_true", help=f"replace a {RESULT_NAME} in --output")
    parser.add_argument(
        "--methods",
        metavar="NAME,...",
        help=f"which of: {', '.join(baselines(GradProbeConfig()))} (default: all)",
    )
    parser.add_argument(
        "--also",
        action="append",
        metavar="FILE.yaml",
        help="a configuration of your own, over the options given here; named after its file (repeatable)",
    )
    add_method_arguments(parser)
    add_data_arguments(parser)
    add_memory_arguments(parser.add_argument_group("memory"))
    parser.add_argument("--quiet", action="store_true", help="no progress bars, errors only")


def run(options: argparse.Namespace) -> None:
    config = configuration(options)
    if options.output and (Path(options.output) / RESULT_NAME).exists() and not options.overwrite:
        raise FileExistsError(f"{options.output}/{RESULT_NAME} exists; --overwrite replaces it.")
    found = compare_pretrained(
        options.model,
        config,
        _chosen(config, options),
        calibration=options.calibration,
        evaluation=options.evaluation,
        loading=Loading(
            **given(options, "device_map", "max_memory", "offload_folder"),
            others=given(options, "dtype", "gguf_file"),
        ),
        progress=not options.quiet,
    )
    if not join_processes().is_main:
        return
    if options.output:
        found.save(options.output)
    if options.json:
        print_json(found.to_dict())
    else:
        print_comparison(found.rows, found.dense, found.evaluation)
        if options.output:
            console().print(f"{options.output}/{RESULT_NAME}, picture {options.output}/comparison.png")


def _chosen(config: GradProbeConfig, options: argparse.Namespace) -> dict[str, GradProbeConfig] | None:
    """The configurations that were asked for by name and by file; None: every baseline that can be."""
    if options.methods is None and not options.also:
        return None
    known = baselines(config)
    names = list(known) if options.methods is None else [name.strip() for name in options.methods.split(",")]
    for name in names:
        if name not in known:
            raise ValueError(f"no method is called {name!r}; there are: {', '.join(known)}.")
    found = {name: known[name] for name in names}
    for path in options.also or ():
        found[Path(path).stem] = GradProbeConfig.from_dict(option_values(options) | read_yaml(path))
    return found
