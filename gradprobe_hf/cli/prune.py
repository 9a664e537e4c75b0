"""Prune a model and write a complete checkpoint: weights, tokenizer, report, pictures and model card."""

from __future__ import annotations

import argparse

from gradprobe_hf.cli.options import (
    add_data_arguments,
    add_memory_arguments,
    add_method_arguments,
    add_resume_arguments,
    configuration,
)
from gradprobe_hf.cli.output import add_model_arguments, placement_of, print_json, print_pruning, source_of
from gradprobe_hf.pruning import prune_pretrained


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the pruned checkpoint")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing checkpoint in --output")
    add_method_arguments(parser)
    add_data_arguments(parser, no_evaluation=", or 'none'")
    add_memory_arguments(parser.add_argument_group("memory"))
    add_resume_arguments(parser.add_argument_group("long runs"))
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
        apply=False,  # the checkpoint is what is asked for: the weights in memory, or offloaded, are let go
        output_dir=options.output,
        overwrite=options.overwrite,
        push_to_hub=options.push_to_hub or False,
        hub_private_repo=options.private or None,
        progress=not options.quiet,
        **source_of(options),
        **placement_of(options),
        resume_dir=options.resume_dir,
    )
    if not result.processes.is_main:
        return
    if options.json:
        print_json(result.report.to_dict() | {"output": options.output})
    else:
        print_pruning(result.report, options.output)
