"""`gradprobe recover`."""

from __future__ import annotations

import argparse

from gradprobe_hf.cli.config_options import add_recovery_options, recovery_configuration
from gradprobe_hf.cli.options import VerbParser, given, shows_progress
from gradprobe_hf.cli.values import Mixture

_SOURCE = ("dtype", "revision", "trust_remote_code")


def add_arguments(parser: VerbParser) -> None:
    parser.add_model(*_SOURCE)
    dense = "the dense model that MODEL was pruned from, or the adapter: a Hub id or a folder"
    parser.add_option("options", "teacher", metavar="DENSE", help=dense)
    parser.needed.append("teacher")
    revision = "branch, tag or commit of DENSE on the Hub (default: main)"
    parser.add_option("options", "teacher_revision", metavar="NAME", help=revision)
    parser.add_options("output", required=True)
    text = (
        "text to train on, or rows with labels; several texts make a mixture, SPEC=WEIGHT says how much of each "
        "(default: self, text that the dense model writes itself, where it is a causal language model)"
    )
    parser.add_option("data", "text", nargs="+", action=Mixture, metavar="SPEC", help=text)
    evaluation = (
        "another text, or other rows, to measure on before and after, or 'none' (default: of a causal language model "
        "pydoc, its held-out part)"
    )
    parser.add_options("overwrite", "quiet", "resume_dir", "push_to_hub", "private")
    parser.add_options("evaluation", help=evaluation)
    add_recovery_options(parser)


def run(options: argparse.Namespace) -> None:
    from gradprobe_hf.cli.output import print_json, print_recovery
    from gradprobe_hf.recovery.recover import recover_pretrained

    if options.save_steps is not None and not options.resume_dir:
        raise ValueError(f"save_steps={options.save_steps} has no effect here: it belongs to resume_dir. Leave it out.")
    if options.evaluation_samples is not None and options.evaluation is False:
        raise ValueError(
            f"evaluation_samples={options.evaluation_samples} has no effect here: it belongs to an evaluation "
            "(--evaluation TEXT). Leave it out."
        )
    found = recover_pretrained(
        options.model,
        options.teacher,
        recovery_configuration(options),
        output_dir=options.output,
        overwrite=options.overwrite,
        push_to_hub=False if options.push_to_hub is None else options.push_to_hub,
        hub_private_repo=options.private or None,
        resume_dir=options.resume_dir,
        progress=shows_progress(options),
        **given(options, "text", "evaluation", "teacher_revision", *_SOURCE),
    )
    if found.processes.is_main and options.json:
        print_json(found.report.to_dict() | {"output": str(found.output_dir)})
    elif found.processes.is_main:
        print_recovery(found.report, str(found.output_dir))
