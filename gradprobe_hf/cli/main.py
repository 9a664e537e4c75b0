"""Parse, dispatch, and turn every expected error into one readable line and an exit code."""

from __future__ import annotations

import argparse
import io
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import gradprobe_hf
from gradprobe_hf.cli.flags import in_flags
from gradprobe_hf.cli.options import CommandParser, VerbParser
from gradprobe_hf.cli.recipe import RecipeError, named_in, read_recipe
from gradprobe_hf.runtime.interrupts import ended_as_interrupted
from gradprobe_hf.runtime.launched import is_first

# The file of each verb is imported when it is chosen; this is all that `gradprobe --help` knows: usage and description.
VERBS = {
    "prune": (
        "MODEL --output DIR [options]",
        "Prune a model and write a complete checkpoint: weights, tokenizer, report, figures and model card.",
    ),
    "compare": ("MODEL [options]", "Prune a model in several ways to one sparsity and measure the perplexity of each."),
    "estimate": ("MODEL [options]", "Estimate the memory, disk space and passes of a run, without reading any weight."),
    "evaluate": (
        "MODEL {--data SPEC | --protocol paper | --tasks NAME,...} [options]",
        "Measure a model on a text or on tasks, alone or beside a dense one.",
    ),
    "recover": (
        "MODEL --teacher DENSE --output DIR [options]",
        "Train the kept weights of a pruned model towards the dense model's predictions, its zeros kept.",
    ),
    "inspect": (
        "DIR [options]",
        "Count the zeros in a checkpoint's files, per matrix and block, and find the n:m patterns that hold.",
    ),
    "bench": (
        "MODEL [MODEL ...] [options]",
        "Measure checkpoints side by side: parameters, bytes, memory, and how fast they read and write.",
    ),
    "profile": (
        "{script FILE.py | prune MODEL | trace TRACE.json.gz} [options] [-- ARGUMENTS]",
        "Find out where the time of a training script, a pruning run or a trace goes, and which lines waste some.",
    ),
}
_OF_ONE_PROCESS = ("estimate", "inspect", "bench")  # the first of several does all of these: they share no work
INTERRUPTED = 130  # what a shell reports for a command stopped by Ctrl-C


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.Namespace()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A pipe may have another encoding, without letters for a text or a name that is printed.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        options = read(sys.argv[1:] if arguments is None else arguments)
        if not is_first() and options.verb in _OF_ONE_PROCESS:
            return 0
        with _logging(quiet=not is_first() or getattr(options, "quiet", False)), ended_as_interrupted():
            options.run(options)
    except KeyboardInterrupt as stopped:  # of a verb that says itself what is left, or of Ctrl-C
        left = str(stopped) or "no unfinished checkpoint is left behind"
        print(f"\ngradprobe: interrupted; {left}", file=sys.stderr)
        return INTERRUPTED
    except _expected_errors() as error:
        print(f"gradprobe: error: {said(error, options)}", file=sys.stderr)
        return 1
    return 0


def read(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command, those of its recipe among them.

    Raises:
        SystemExit: they cannot be read (2), or the help was asked for (0).
        ValueError: see `read_recipe`.
    """
    top = parser(*arguments[:1])
    options = top.parse_args(arguments)
    read_recipe(top.chosen, options)
    top.chosen.check_required(options)
    return options


def parser(chosen: str = "") -> CommandParser:
    """The whole command. Only the verb that was chosen has its options."""
    top = CommandParser(prog="gradprobe", description="Prune pretrained transformers using gradients of their loss.")
    top.add_argument("--version", action="version", version=f"gradprobe_hf {gradprobe_hf.__version__}")
    verbs = top.add_subparsers(
        dest="verb", metavar="VERB", title="verbs, each with its own --help", parser_class=VerbParser, required=True
    )
    for name, (usage, description) in VERBS.items():
        verb = verbs.add_parser(name, usage=f"gradprobe {name} {usage}", help=description, description=description)
        if name == chosen:
            module = import_module(f"gradprobe_hf.cli.verbs.{name}")
            module.add_arguments(verb)
            if "--json" not in verb._option_string_actions:  # a script's own output is on standard output, too
                verb.add_options("json")
            verb.set_defaults(run=module.run)
            top.chosen = verb
    return top


def whole_parser() -> CommandParser:
    """The command with the options of every verb: what its page and a shell's completion are made from."""
    top = parser()
    verbs = _choices(top)
    for name in list(verbs):
        verbs[name] = _choices(parser(name))[name]
    return top


def _choices(top: CommandParser) -> dict[str, Any]:
    found: Any = next(action for action in top._actions if action.dest == "verb")
    return found.choices


def said(error: Exception, options: argparse.Namespace) -> str:
    """An error on one line, in the words of the command line or of the recipe."""
    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, RecipeError):
        return message
    return named_in(message, options) or in_flags(message, vars(options))


def _expected_errors() -> tuple[type[Exception], ...]:
    """Wrong input, or a machine or Hub that will not. What has not imported torch has not run out of its memory."""
    torch = sys.modules.get("torch")
    return (ValueError, OSError, ImportError, MemoryError, *([torch.OutOfMemoryError] if torch else []))


@contextmanager
def _logging(quiet: bool) -> Iterator[None]:
    """Progress and logs go to standard error, so that standard output is the result."""
    root, own = logging.getLogger(), logging.getLogger("gradprobe_hf")
    before = root.handlers[:], root.level, own.level
    root.handlers[:] = [logging.StreamHandler(sys.stderr)]
    root.setLevel(logging.WARNING)
    own.setLevel(logging.WARNING if quiet else logging.INFO)
    if quiet or not sys.stderr.isatty():
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
    if quiet:
        from datasets import disable_progress_bars

        disable_progress_bars()
    try:
        yield
    finally:  # who called `main` in an interpreter of their own has their logs back
        root.handlers[:] = before[0]
        root.setLevel(before[1])
        own.setLevel(before[2])
