"""Parse, dispatch, and turn every expected error into one readable line and an exit code."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

import torch

from gradprobe_hf.cli import compare, estimate, evaluate, inspect, prune
from gradprobe_hf.report.build import versions

VERBS = {"prune": prune, "compare": compare, "estimate": estimate, "evaluate": evaluate, "inspect": inspect}
INTERRUPTED = 130  # what a shell reports for a command stopped by Ctrl-C


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    _configure_logging(quiet=getattr(options, "quiet", False))
    try:
        VERBS[options.verb].run(options)
    except KeyboardInterrupt:
        print("\ngradprobe: interrupted; no unfinished checkpoint is left behind", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, OSError, ImportError, MemoryError, torch.OutOfMemoryError) as error:
        # wrong input, or a machine or Hub that will not
        print(f"gradprobe: error: {error}", file=sys.stderr)
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="gradprobe", description="Prune pretrained transformers by asking their gradients."
    )
    top.add_argument("--version", action="version", version=f"gradprobe_hf {versions()['gradprobe_hf']}")
    verbs = top.add_subparsers(dest="verb", required=True)
    for name, module in VERBS.items():
        description = (module.__doc__ or "").strip()
        verb = verbs.add_parser(name, help=description.splitlines()[0], description=description)
        module.add_arguments(verb)
        verb.add_argument(
            "--json", action="store_true", help="print one JSON object and nothing else on standard output"
        )
    return top


def _configure_logging(quiet: bool) -> None:
    """Progress and logs go to standard error, so that standard output is the result."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s", force=True)
    logging.getLogger("gradprobe_hf").setLevel(logging.ERROR if quiet else logging.INFO)
    if quiet:
        from datasets import disable_progress_bars
        from transformers.utils.logging import disable_progress_bar, set_verbosity_error

        disable_progress_bar()
        disable_progress_bars()
        set_verbosity_error()
