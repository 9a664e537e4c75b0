"""`gradprobe prune`."""

from __future__ import annotations

import argparse

from gradprobe_hf.cli.config_options import add_config_options, configuration
from gradprobe_hf.cli.options import PLACEMENT, SOURCE, VerbParser, given, shows_progress
from gradprobe_hf.config.config import GradProbeConfig


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

    config = configuration(options)
    _check_effect(options, config)
    result = prune_pretrained(
        options.model,
        config,
        calibration=options.calibration,
        evaluation=options.evaluation,
        apply=False,  # the checkpoint is what is asked for: the weights in memory, or offloaded, are let go
        output_dir=options.output,
        overwrite=options.overwrite,
        push_to_hub=False if options.push_to_hub is None else options.push_to_hub,
        hub_private_repo=options.private or None,
        resume_dir=options.resume_dir,
        progress=shows_progress(options),
        **given(options, *SOURCE, *PLACEMENT),
    )
    if result.processes.is_main and options.json:
        print_json(result.report.to_dict() | {"output": str(result.output_dir)})
    elif result.processes.is_main:
        print_pruning(result.report, str(result.output_dir))


def _check_effect(options: argparse.Namespace, config: GradProbeConfig) -> None:
    """Refuse what was given on this command line and changes nothing; a file of options may serve other runs too."""
    without_text = "a method that reads text, and --score magnitude or random reads none"
    belongs = {
        "save_every": (options.resume_dir, "resume_dir"),
        "evaluation_samples": (options.evaluation is not False, "an evaluation (--evaluation TEXT)"),
        "calibration": (config.needs.passes != "none" or config.recovery_steps > 0, without_text),
    }
    for name, (has_effect, belongs_to) in belongs.items():
        if name not in options.recipe and name not in options.from_recipe and given(options, name) and not has_effect:
            raise ValueError(
                f"{name}={getattr(options, name)!r} has no effect here: it belongs to {belongs_to}. Leave it out."
            )
