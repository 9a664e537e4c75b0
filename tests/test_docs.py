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


# Pages that Sphinx does not read as they are: it looks at their links with other files around them, or not at all.
OUTSIDE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "model_cards" / "README.md"]


def anchors(page):
    """What a link to a heading of a page is called on GitHub."""
    for title in re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), flags=re.M):
        yield re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", OUTSIDE, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for link in (link for link in links if "://" not in link):
        file, _, heading = link.partition("#")
        there = page.parent / file if file else page
        assert there.exists(), link
        assert not heading or heading in anchors(there), link


def test_make_has_every_target_that_is_named():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    for page in {*PAGES, *OUTSIDE}:
        text = page.read_text(encoding="utf-8")
        named = re.findall(r"`make ([\w-]+)", text)
        for block in re.findall(r"^```bash\n(.*?)^```", text, flags=re.M | re.S):
            named += re.findall(r"^make ([\w-]+)", block, flags=re.M)
        assert set(named) <= targets, page
