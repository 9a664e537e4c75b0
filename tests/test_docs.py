"""The pages show options and commands that exist."""

from __future__ import annotations

import ast
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from gradprobe_hf import GradProbeConfig
from gradprobe_hf.cli.main import parser

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(language):
    """(page:line, text) of every fenced block of a language."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in re.finditer(rf"^```{language}\n(.*?)^```", text, flags=re.M | re.S):
            yield f"{page.relative_to(ROOT)}:{text[: found.start()].count(chr(10)) + 2}", found[1]


def commands():
    for where, text in blocks("bash"):
        for line in text.replace("\\\n", " ").splitlines():
            if line.startswith("gradprobe "):
                yield pytest.param(shlex.split(line, comments=True)[1:], id=f"{where} {line[:40]}")


@pytest.mark.parametrize("arguments", list(commands()))
def test_commands_parse(arguments):
    parser(arguments[0]).parse_args(arguments)


@pytest.mark.parametrize(("where", "text"), [pytest.param(*block, id=block[0]) for block in blocks("python")])
def test_snippets_use_what_there_is(where, text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("gradprobe_hf"):
            assert all(hasattr(import_module(node.module), alias.name) for alias in node.names), where
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "GradProbeConfig":
            known = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
            GradProbeConfig(**{name: ast.literal_eval(value) for name, value in known.items()})
