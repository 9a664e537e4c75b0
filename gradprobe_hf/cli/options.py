"""Options that are no fields of the configuration: each declared once, under its heading in the help of every verb."""

from __future__ import annotations

import argparse
import re
import sys
from functools import cached_property
from typing import Any, NoReturn

from gradprobe_hf.cli.flags import flag, unknown_flag
from gradprobe_hf.cli.values import Mixture, device_map, json_object, text_or_none

OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "options": {
        "output": {"metavar": "DIR", "help": "folder to write the checkpoint to"},
        "overwrite": {"action": "store_true", "help": "replace an earlier result in --output"},
        "config": {"metavar": "FILE.yaml", "help": "read options from a file; those on the command line win"},
        "json": {"action": "store_true", "help": "print one JSON object, and nothing else, to standard output"},
        "quiet": {"action": "store_true", "help": "show no progress, only warnings and errors"},
    },
    "which model": {
        "dtype": {
            "metavar": "DTYPE",
            "help": "load weights as bfloat16, float16, float32 or float64 (default: auto, as stored)",
        },
        "revision": {"metavar": "NAME", "help": "branch, tag or commit of MODEL on the Hub (default: main)"},
        "trust_remote_code": {
            "action": "store_true",
            "default": None,
            "help": "run model code that comes with the checkpoint",
        },
        "merge_adapters": {
            "action": "store_true",
            "default": None,
            "help": "fold an adapter (PEFT) into the base model that it names, and take the result",
        },
        "allow_missing_weights": {
            "action": "store_true",
            "default": None,
            "help": "take weights that the checkpoint does not have as they are initialised",
        },
        "gguf_file": {"metavar": "FILE", "help": "GGUF file inside MODEL, dequantised on loading"},
    },
    "the target": {},
    "the method": {},
    "in which steps": {},
    "which matrices": {},
    "data": {
        "calibration": {
            "nargs": "+",
            "action": Mixture,
            "metavar": "SPEC",
            "help": "text to measure gradients on; several make a mixture, SPEC=WEIGHT says how much of each (default: "
            "self, text that the model writes itself)",
        },
        "evaluation": {
            "type": text_or_none,
            "metavar": "SPEC",
            "help": "text to measure perplexity on, or 'none' (default: what --calibration leaves of a text of your "
            "own, or its split for that; otherwise pydoc, its held-out part)",
        },
    },
    "tasks": {},
    "memory": {
        "device_map": {
            "type": device_map,
            "metavar": "MAP",
            "help": "where weights are: 'auto', 'disk', a device, or a JSON object of modules (default: the "
            "accelerator, if there is one)",
        },
        "max_memory": {
            "type": json_object,
            "metavar": "JSON",
            "help": 'limits of --device-map auto, such as {"0": "20GiB", "cpu": "8GiB"}',
        },
        "offload_folder": {"metavar": "DIR", "help": "folder for weights and statistics on disk (default: temporary)"},
    },
    "long runs": {
        "resume_dir": {"metavar": "DIR", "help": "save snapshots of the run in this folder, and resume from them"},
    },
    "sharing": {
        "push_to_hub": {"metavar": "REPO", "help": "upload the checkpoint to this Hub repository"},
        "private": {"action": "store_true", "help": "make a repository that is created private"},
    },
}
# What `from_pretrained` takes: which model it is, and where its weights are.
SOURCE = tuple(OPTIONS["which model"])
PLACEMENT = tuple(OPTIONS["memory"])

_SPEC = (
    "SPEC: 'self', the model's own text; 'pydoc', the Python manual; a .txt, .jsonl, .parquet, .csv or .tsv file, or "
    "a folder of one kind; or a Hub dataset id[:config[:split]]"
)


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line: how the command is used is behind --help."""

    def __init__(self, **settings: Any) -> None:
        # An abbreviation is a guess, and means something else as soon as there is another option.
        super().__init__(**settings, allow_abbrev=False)
        self.chosen: CommandParser = self  # of the verb that was chosen
        self.needed: list[str] = []
        self.configuration: Any = None  # the class of the options that a file of --config has
        self.passes_on = False  # whether what follows -- is for somebody else: `options.passed_on`

    def error(self, message: str) -> NoReturn:
        if message.endswith("required: VERB"):
            message = f"no verb: {', '.join(self._verbs())}"
        self.exit(2, f"gradprobe: error: {message.rstrip('.')}; see {self.prog} --help\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        args = list(sys.argv[1:] if args is None else args)
        cut = args.index("--") if self.chosen.passes_on and "--" in args else len(args)
        options, rest = self.parse_known_args(_with_signs(args[:cut]), namespace)
        if self.chosen.passes_on:
            options.passed_on = args[cut + 1 :]
        # argparse takes an optional positional to be missing when an option comes first.
        if rest and not rest[0].startswith("-") and getattr(options, "model", "") is None:
            options.model = rest.pop(0)
        if not hasattr(options, "run"):
            self.error("the verb comes first, its options after it")
        if rest:
            unknown = unknown_flag(rest[0], self.chosen._option_string_actions).rstrip(".")
            is_script = getattr(options, "what", None) == "script"
            whose = "; if it is the script's, write it behind --" if is_script else ""
            self.chosen.error(unknown + whose)
        return options

    def check_required(self, options: argparse.Namespace) -> None:
        """End with an error for what neither the command line nor a recipe has."""
        for name in self.needed:
            if getattr(options, name) is None:
                texts = getattr(options, "calibration", None)
                if name == "model" and isinstance(texts, dict):
                    *_, last = texts
                    self.error(
                        f"MODEL is missing: --calibration takes every word after it as a text, {last!r} too. Put "
                        f"MODEL in front: {self.prog} MODEL --calibration SPEC"
                    )
                recipe = f", or as {name!r} in a file of options (--config)" if hasattr(options, "config") else ""
                self.error(f"{'MODEL' if name == 'model' else flag(name)} is missing: give it here{recipe}")

    def _verbs(self) -> list[str]:
        return [name for action in self._actions for name in (action.choices if action.dest == "verb" else None) or ()]


def _with_signs(args: list[str]) -> list[str]:
    """The arguments, values that begin with a sign and a digit joined to their options: argparse takes `-1MB`, and
    `-1e-3`, for options.

    >>> _with_signs(["--memory", "-1MB", "--sparsity", "-1", "--", "-1x"])
    ['--memory=-1MB', '--sparsity=-1', '--', '-1x']
    """
    found: list[str] = []
    for arg in args:
        if found and re.fullmatch(r"--[\w-]+", found[-1]) and re.match(r"-\.?\d", arg):
            found[-1] += f"={arg}"
        else:
            found.append(arg)
    return found


class VerbParser(CommandParser):
    """The parser of one verb, with the same headings in the same order for all; empty ones are not shown."""

    @cached_property  # of the verb that was chosen alone
    def headings(self) -> dict[str, argparse._ActionsContainer]:
        groups = {title: self.add_argument_group(title) for title in OPTIONS if title != "options"}
        return {"options": self, **groups}

    def add_model(self, *which: str, form: str = "a Hub id or a checkpoint folder") -> None:
        """MODEL, and the options that tell which one it is."""
        self.add_argument("model", metavar="MODEL", nargs="?", help=form)
        self.needed.append("model")
        self.add_options(*which)

    def add_option(self, heading: str, name: str, **settings: Any) -> None:
        """An option spelled as the name is, with dashes."""
        self.headings[heading].add_argument(f"--{name.replace('_', '-')}", **settings)
        if settings.get("metavar") == "SPEC":
            self.headings[heading].description = _SPEC

    def add_options(self, *names: str, **changes: Any) -> None:
        """Rows of the table. Args: changes: settings that these have in this verb alone."""
        if changes.pop("required", False):
            self.needed.extend(names)
        for name in names:
            heading = next(heading for heading, rows in OPTIONS.items() if name in rows)
            self.add_option(heading, name, **(OPTIONS[heading][name] | changes))


def given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The options that were set on the command line."""
    return {name: getattr(options, name) for name in names if getattr(options, name, None) is not None}


def shows_progress(options: argparse.Namespace) -> bool:
    """Whether bars are drawn: on a terminal. In a file each stage is announced by the line that the log has of it."""
    return not options.quiet and sys.stderr.isatty()
