"""`gradprobe profile`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from gradprobe_hf.cli.options import VerbParser, given

_HELP = {
    "warmup": "steps that are left out at the beginning (default: 3)",
    "timed": "steps that are only timed: all shares are of these (default: 10)",
    "traced": "steps under torch.profiler, for the operators (default: 5)",
    "located": "steps in which the lines of calls are looked for (default: 5)",
}


def add_arguments(parser: VerbParser) -> None:
    parser.add_argument("what", metavar="script", choices=["script"], help="what to profile")
    parser.add_argument("script", metavar="FILE.py", help="a training script; what follows -- is for it")
    parser.passes_on = True
    for name, text in _HELP.items():
        parser.add_option("options", name, type=int, metavar="STEPS", help=text)
    parser.add_option("options", "json", metavar="FILE", help="write the report as JSON to this file")
    parser.add_option("options", "markdown", metavar="FILE", help="write the report as Markdown to this file")
    parser.add_option(
        "options", "whole_run", action="store_true", help="let the script run to its end, instead of ending it then"
    )


def run(options: argparse.Namespace) -> None:
    from gradprobe_hf.cli.profile_table import print_profile
    from gradprobe_hf.profiling.observing.schedule import Schedule
    from gradprobe_hf.profiling.script import is_main_process, profile_script

    schedule = Schedule(**given(options, *(field.name for field in fields(Schedule))))
    reports = {name: Path(path) for name, path in given(options, "json", "markdown").items()}
    for name, path in reports.items():
        if path.is_dir() or not path.parent.is_dir():
            raise ValueError(f"--{name} {path}: name a file, in a folder that exists.")
    ran = profile_script(options.script, options.passed_on, schedule, options.whole_run)
    if is_main_process():
        for name, path in reports.items():
            path.write_text(getattr(ran.report, name)(), encoding="utf-8")
        print_profile(ran.report)
    if ran.interrupted:
        raise KeyboardInterrupt
    if ran.exit_code:
        sys.exit(ran.exit_code)
