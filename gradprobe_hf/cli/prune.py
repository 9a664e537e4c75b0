"""`gradprobe prune`."""

from __future__ import annotations

import argparse

from gradprobe_hf.cli.config_options import add_config_options, configuration
from gradprobe_hf.cli.options import PLACEMENT, SOURCE, VerbParser, given


def add_arguments(parser: VerbParser) -> None:
    parser.add_model(*SOURCE)
    parser.add_options("output", required=True)
    parser.add_options(
        "overwrite", "calibration", "evaluation", *PLACEMENT, "resume_dir", "push_to_hub", "private", "quiet"
    )
    add_config_options(parser)


def run(options: argparse.Namespace) -> None:
    from gradprobe_hf.cli.output import print_json, print_pruning
    from gradprobe_hf.pruning import prune_pretrained

    result = prune_pretrained(
        options.model,
        configuration(options),
        calibration=options.calibration,
        evaluation=options.evaluation,
        apply=False,  # the checkpoint is what is asked for: the weights in memory, or offloaded, are let go
        output_dir=options.output,
        overwrite=options.overwrite,
        push_to_hub=options.push_to_hub or False,
        hub_private_repo=options.private or None,
        resume_dir=options.resume_dir,
        progress=not options.quiet,
        **given(options, *SOURCE, *PLACEMENT),
    )
    if result.processes.is_main and options.json:
        print_json(result.report.to_dict() | {"output": options.output})
    elif result.processes.is_main:
        print_pruning(result.report, options.output)
