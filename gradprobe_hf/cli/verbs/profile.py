"""`gradprobe profile`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from gradprobe_hf.cli.options import VerbParser, given
from gradprobe_hf.runtime.launched import is_alone, is_first

if TYPE_CHECKING:
    from gradprobe_hf.profiling.report import ProfileReport

_HELP = {
    "warmup": "steps that are left out at the beginning (default: 3; of a pruning run 2)",
    "timed": "steps that are only timed: all shares are of these (default: 10; 6)",
    "traced": "steps under torch.profiler, for the operators (default: 5; 2)",
    "located": "steps in which the lines of calls are looked for (default: 5; 2)",
}
_REPORTS = {"json": "JSON", "markdown": "Markdown", "html": "one HTML page with pictures"}
_WHAT = {"script": "FILE.py", "prune": "MODEL", "trace": "TRACE.json.gz"}


def add_arguments(parser: VerbParser) -> None:
    parser.add_argument(
        "what",
        metavar="{script,prune,trace}",
        choices=list(_WHAT),
        help="a training script, a short pruning run, or a trace that torch.profiler has exported anywhere",
    )
    parser.add_argument(
        "subject",
        metavar="FILE.py|MODEL|TRACE",
        help="which one; what follows -- is for the script, or is what `gradprobe prune` takes",
    )
    parser.passes_on = True
    for name, text in _HELP.items():
        parser.add_option("options", name, type=int, metavar="STEPS", help=text)
    for name, form in _REPORTS.items():
        parser.add_option("options", name, metavar="FILE", help=f"write the report as {form} to this file")
    parser.add_option(
        "options",
        "fix",
        nargs="*",
        metavar="CHANGE",
        help="try changes from outside, each in runs of its own beside the unchanged script: workers, prefetch, "
        "pinning, batch-size, batch-size-4x (or another number), attention, flash, precision, checkpointing, fused, "
        "compile, no-compile, largest-batch (default: those that make sense for the run)",
    )
    parser.add_option("options", "rounds", type=int, metavar="COUNT", help="how often each is tried (default: 3)")
    parser.add_option(
        "options", "whole_run", action="store_true", help="let the script run to its end, instead of ending it then"
    )


def run(options: argparse.Namespace) -> None:
    from gradprobe_hf.cli.tables.profile import print_profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch.profiler's own log, of when it starts and stops
    _check_effect(options)
    reports = {name: Path(path) for name, path in given(options, *_REPORTS).items()}
    taken = {} if options.what == "prune" else {Path(options.subject).resolve(): f"the {options.what}"}
    for name, path in reports.items():
        if path.is_dir() or not path.parent.is_dir():
            raise ValueError(f"--{name} {path}: name a file, in a folder that exists.")
        if (other := taken.get(path.resolve())) is not None:
            raise ValueError(f"--{name} {path}: this would overwrite {other}. Name another file.")
        taken[path.resolve()] = f"--{name}"
    report, interrupted, code = _PROFILES[options.what](options)
    if is_first():
        print_profile(report)  # first: a disk may be full
        for name, path in reports.items():
            path.write_text(getattr(report, name)(), encoding="utf-8")
    if interrupted:
        raise KeyboardInterrupt("the report is of what was seen until then")
    if code:
        sys.exit(code)


def _check_effect(options: argparse.Namespace) -> None:
    """Refuse what the chosen kind of profile does not read."""
    without = {
        "script": () if options.fix is not None else ("rounds",),
        "prune": ("whole_run", "fix", "rounds"),
        "trace": ("whole_run", "passed_on", "fix", "rounds", *_HELP),
    }
    for name in without[options.what]:
        if (value := getattr(options, name)) not in (None, False, []) or (name == "fix" and value is not None):
            typed = " ".join(["--", *value]) if name == "passed_on" else f"--{name.replace('_', '-')}"
            where = "without --fix" if options.what == "script" else f"in `gradprobe profile {options.what}`"
            raise ValueError(f"{typed} has no effect {where}. Leave it out.")


_Profiled = tuple["ProfileReport", bool, int]  # whether it was interrupted, and the exit code


def _script(options: argparse.Namespace) -> _Profiled:
    from gradprobe_hf.profiling.observing.schedule import Schedule
    from gradprobe_hf.profiling.script import fix_script, profile_script

    schedule = Schedule(**_steps(options))
    changes = None if options.fix is None else _changes(options)
    ran = profile_script(options.subject, options.passed_on, schedule, options.whole_run)
    if changes is None or ran.interrupted or ran.exit_code:
        return ran.report, ran.interrupted, ran.exit_code
    rounds = 3 if options.rounds is None else options.rounds
    tried = fix_script(ran.report, options.subject, options.passed_on, schedule, changes, rounds)
    return tried.report, tried.interrupted, 0


def _changes(options: argparse.Namespace) -> list[str]:
    """The names of those to try.

    Raises:
        ValueError: there is no such change, or the run has several processes.
    """
    from gradprobe_hf.profiling.fixing.changes import CHANGES, LARGEST, change_named

    known = [*CHANGES, LARGEST]
    for name in options.fix:
        if name not in known and change_named(name) is None:
            raise ValueError(
                f"--fix {name}: there is no such change; it is one of {', '.join(known)}, or batch-size-8x, say."
            )
    if not is_alone():
        raise ValueError("--fix runs the script in processes of its own: run it without a launcher, in one process.")
    if options.rounds is not None and options.rounds < 1:
        raise ValueError(f"--rounds must be at least 1, got {options.rounds}.")
    return options.fix or known


def _prune(options: argparse.Namespace) -> _Profiled:
    from gradprobe_hf.cli.main import read, said

    # A checkpoint is written nowhere: the option that names its folder is there to satisfy the parser.
    pruning = read(["prune", options.subject, "--output", "", *options.passed_on])
    for name in ("output", "overwrite", "resume_dir", "push_to_hub", "private", "json", "quiet"):
        if getattr(pruning, name):
            raise ValueError(f"--{name.replace('_', '-')} has no effect here: nothing is written. Leave it out.")
    try:
        return _pruned(options, pruning)
    except ValueError as error:  # in the words of the options behind --
        raise ValueError(said(error, pruning)) from error


def _pruned(options: argparse.Namespace, pruning: argparse.Namespace) -> _Profiled:
    from dataclasses import asdict
    from functools import partial

    from gradprobe_hf.cli.config_options import configuration, option_values
    from gradprobe_hf.cli.options import PLACEMENT, SOURCE
    from gradprobe_hf.profiling.observing.schedule import Schedule
    from gradprobe_hf.profiling.pruning_run import SHORT, profile_pruning, shortened
    from gradprobe_hf.pruning import prune_pretrained

    schedule = Schedule(**(asdict(SHORT) | _steps(options)))
    config = configuration(pruning)
    if "num_samples" not in option_values(pruning):
        config = shortened(config, schedule)
    prune = partial(
        prune_pretrained,
        pruning.model,
        config,
        calibration=pruning.calibration,
        evaluation=pruning.evaluation,
        apply=False,
        progress=False,
        **given(pruning, *SOURCE, *PLACEMENT),
    )
    ran = profile_pruning(prune, schedule)
    return ran.report, ran.interrupted, 0


def _trace(options: argparse.Namespace) -> _Profiled:
    from gradprobe_hf.profiling.report import ProfileReport
    from gradprobe_hf.profiling.trace import read_trace

    return ProfileReport(read_trace(options.subject)), False, 0


_PROFILES: dict[str, Callable[[argparse.Namespace], _Profiled]] = {
    "script": _script,
    "prune": _prune,
    "trace": _trace,
}


def _steps(options: argparse.Namespace) -> dict[str, int]:
    from gradprobe_hf.profiling.observing.schedule import Schedule

    return given(options, *(field.name for field in fields(Schedule)))
