"""The pages show options and commands that exist."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from gradprobe_hf import GradProbeConfig
from gradprobe_hf.checkpoint import origin
from gradprobe_hf.cli.main import parser
from gradprobe_hf.model.loading import processing
from gradprobe_hf.model.loading import report as loading_report
from gradprobe_hf.recovery import distil
from gradprobe_hf.recovery import result as recovered
from gradprobe_hf.report import warnings
from gradprobe_hf.run import reach
from gradprobe_hf.run.request import foreseen, own_maps

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


def sentences(module):
    """Every text of a module that is long enough to be told, what is filled in left out; no docstrings."""
    tree = ast.parse(inspect.getsource(module))
    of_f = {id(part) for one in ast.walk(tree) if isinstance(one, ast.JoinedStr) for part in one.values}
    docs = {id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Expr)}
    for node in ast.walk(tree):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node] if id(node) not in of_f | docs else []
        said = "{}".join(part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str))
        if len(said) > 30:
            yield said


def test_the_page_of_warnings_has_all_of_a_run_and_no_others():
    page = (ROOT / "docs" / "guides" / "warnings.md").read_text(encoding="utf-8")
    quoted = [" ".join(one.split()) for one in re.findall(r"(?<![*\w])\*([^*]+)\*(?![*\w])", page)]
    # Those of a report; what is only logged is told where it happens.
    of_reports = [said for module in (warnings, foreseen) for said in sentences(module)]
    assert [said for said in of_reports if not any(one in said for one in quoted)] == []
    modules = (warnings, foreseen, own_maps, loading_report, processing, reach, distil, recovered, origin)
    every = [said for module in modules for said in sentences(module)]
    assert [one for one in quoted if not any(one in said for said in every)] == []


def test_make_has_every_target_that_is_named():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    for page in {*PAGES, *OUTSIDE}:
        text = page.read_text(encoding="utf-8")
        named = re.findall(r"`make ([\w-]+)", text)
        for block in re.findall(r"^```bash\n(.*?)^```", text, flags=re.M | re.S):
            named += re.findall(r"^make ([\w-]+)", block, flags=re.M)
        assert set(named) <= targets, page
