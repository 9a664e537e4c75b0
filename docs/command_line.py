"""The parser that the command-line page is made from."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gradprobe_hf.cli.main import parser

PAGE = Path(__file__).parent / "reference" / "command-line.md"


def whole_parser() -> argparse.ArgumentParser:
    """`gradprobe` with the options of every verb. The command itself gives options only to the verb that was chosen.

    Raises:
        ValueError: the page lacks a verb.
    """
    top = parser()
    verbs = _verbs(top)
    for name in list(verbs):
        if f":path: {name}\n" not in PAGE.read_text(encoding="utf-8"):
            raise ValueError(f"{PAGE.name} has no section for `gradprobe {name}`.")
        verbs[name] = _verbs(parser(name))[name]
    return top


def _verbs(top: argparse.ArgumentParser) -> dict[str, Any]:
    return next(action.choices for action in top._actions if isinstance(action, argparse._SubParsersAction))
