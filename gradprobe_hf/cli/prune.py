"""Prune a model and write a complete checkpoint: weights, tokenizer, report, pictures and model card."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any, get_args

from gradprobe_hf.cli.output import add_model_arguments, given, print_json, print_pruning
from gradprobe_hf.config import Decision, Fisher, GradProbeConfig, Scope, Strategy, read_yaml
from gradprobe_hf.pruning import prune_pretrained

# Options of the command that are fields of the configuration; a default of None means: what the configuration says.
CONFIG_FIELDS = tuple(field.name for field in fields(GradProbeConfig))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the pruned checkpoint")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing checkpoint in --output")
    how = parser.add_argument_group("how to prune")
    how.add_argument("--sparsity", type=float, help="fraction of the weights to remove, in [0, 1) (default: 0.5)")
    how.add_argument("--pattern", help="'unstructured' (default) or n:m; 2:4 keeps 2 of every 4 inputs")
    how.add_argument(
        "--strategy",
        choices=get_args(Strategy),
        help="proposes the candidates; with --decision none it decides (default: fisher)",
    )
    how.add_argument("--decision", choices=get_args(Decision), help="what the probes decide (default: path)")
    how.add_argument("--scope", choices=get_args(Scope), help="over what one budget is spent")
    how.add_argument("--fisher", choices=get_args(Fisher), help="estimate of the squared gradient (default: blend)")
    how.add_argument(
        "--gradient-threshold", type=float, metavar="X", help="growth tolerated by 'threshold' (default: 0.0)"
    )
    how.add_argument("--reduction-factor", type=float, metavar="X", help="what shrinks the candidates (default: 0.1)")
    how.add_argument("--include", action="append", metavar="PATTERN", help="prune only what matches (repeatable)")
    how.add_argument("--exclude", action="append", metavar="PATTERN", help="leave alone what matches (repeatable)")
    how.add_argument("--seed", type=int, help="draws the calibration windows (default: 0)")
    how.add_argument("--config", metavar="FILE.yaml", help="options from a file; those given here win over it")
    data = parser.add_argument_group("data: 'pydoc', 'self', a file or folder, or a Hub dataset id[:config[:split]]")
    data.add_argument("--calibration", default="pydoc", metavar="SPEC", help="text for the probes (default: pydoc)")
    data.add_argument("--num-samples", type=int, metavar="N", help="calibration windows (default: 128)")
    data.add_argument("--sequence-length", type=int, metavar="N", help="tokens in a window (default: 512)")
    data.add_argument("--batch-size", type=int, metavar="N", help="windows in a pass; changes no result (default: 4)")
    data.add_argument("--evaluation", metavar="SPEC", help="text to measure on, or 'none' (default: pydoc with pydoc)")
    data.add_argument("--evaluation-samples", type=int, metavar="N", help="evaluation windows (default: 20)")
    hub = parser.add_argument_group("sharing")
    hub.add_argument("--push-to-hub", metavar="REPO", help="upload the checkpoint to this repository")
    hub.add_argument("--private", action="store_true", help="create the repository private")
    parser.add_argument("--quiet", action="store_true", help="no progress bars, errors only")


def run(options: argparse.Namespace) -> None:
    result = prune_pretrained(
        options.model,
        configuration(options),
        calibration=options.calibration,
        evaluation=False if options.evaluation == "none" else options.evaluation,
        output_dir=options.output,
        overwrite=options.overwrite,
        push_to_hub=options.push_to_hub is not None,
        hub_model_id=options.push_to_hub,
        hub_private_repo=options.private or None,
        progress=not options.quiet,
        **given(options, "dtype", "gguf_file"),
    )
    if options.json:
        print_json(result.report.to_dict() | {"output": options.output})
    else:
        print_pruning(result.report, options.output)


def configuration(options: argparse.Namespace) -> GradProbeConfig:
    """The file's options, with those of the command line over them."""
    values: dict[str, Any] = read_yaml(options.config) if options.config else {}
    return GradProbeConfig.from_dict(values | given(options, *CONFIG_FIELDS))
