"""The parser that the command-line page is made from."""

from __future__ import annotations

import argparse
from pathlib import Path

from gradprobe_hf.cli.main import VERBS
from gradprobe_hf.cli.main import whole_parser as parser_of_all

PAGE = Path(__file__).parent / "reference" / "command-line.md"


def whole_parser() -> argparse.ArgumentParser:
    """`gradprobe` with the options of every verb.

    Raises:
        ValueError: the page lacks a verb.
    """
    for name in VERBS:
        if f":path: {name}\n" not in PAGE.read_text(encoding="utf-8"):
            raise ValueError(f"{PAGE.name} has no section for `gradprobe {name}`.")
    return parser_of_all()
