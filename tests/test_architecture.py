"""The order of the folders, no cycle between files, and a wheel that ships every package."""

from __future__ import annotations

import ast
import configparser
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.breaks import BREAKS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "gradprobe_hf"

# A folder imports only from those above it.
ORDER = [
    "runtime",
    "tasks",
    "model",
    "data",
    "scores",
    "updates",
    "decisions",
    "structures",
    "config",
    "selection",
    "probe",
    "reconstruction",
    "evaluation",
    "estimation",
    "run",
    "memory",
    "report",
    "checkpoint",
    "bench",
    "comparison",
    "threshold_sweep",
    "training",
    "recovery",
    "pruning",
    "profiling",
    "cli",
]


def modules():
    """Dotted name -> file, of every file but the two that the package begins with."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent != PACKAGE or path.name not in ("__init__.py", "__main__.py"):
            found[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


def imported(name, path, known):
    """The modules of the package that a file imports anywhere in it, relative imports too."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{source}.{alias.name}"
                if whole in known or source in known:
                    yield whole if whole in known else source


def test_imports_are_found_in_every_form(tmp_path):
    known = {"gradprobe_hf.a", "gradprobe_hf.b", "gradprobe_hf.b.c", "gradprobe_hf.b.d"}
    text = "import gradprobe_hf.a\nfrom gradprobe_hf.b.c import x\nfrom . import d\nfrom .. import a\nfrom .c import y"
    (tmp_path / "e.py").write_text(text)
    assert list(imported("gradprobe_hf.b.e", tmp_path / "e.py", known)) == [
        "gradprobe_hf.a",
        "gradprobe_hf.b.c",
        "gradprobe_hf.b.d",
        "gradprobe_hf.a",
        "gradprobe_hf.b.c",
    ]


@pytest.mark.parametrize("name", modules())
def test_imports_point_upwards(name):
    known = modules()
    own = ORDER.index(name.split(".")[1])
    for other in imported(name, known[name], known):
        stage = other.split(".")[1]
        assert ORDER.index(stage) <= own, f"{name} imports {other}, and {stage} stands below it"


def test_no_file_imports_itself_through_others():
    known = modules()
    graph = {name: set(imported(name, path, known)) - {name} for name, path in known.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a cycle of imports: {' -> '.join(error.args[1])}")


def test_the_guide_lists_the_folders_in_this_order():
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("| stage |")[2].partition("\n\n")[0]
    first_cells = "".join(line.split("|")[1] for line in table.splitlines()[1:])
    assert re.findall(r"`(\w+)(?:\.py|/)`", first_cells) == ORDER


def test_the_wheel_lists_every_package():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = set(setup["options"]["packages"].split())
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in PACKAGE.rglob("__init__.py")}
    assert listed == found | {"gradprobe_hf.model_cards"}


def test_constraints_pin_what_the_package_needs():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    pinned = {
        line.split("==")[0]
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and line[0] != "#"
    }
    for requirement in setup["options"]["install_requires"].split("\n"):
        assert not requirement or requirement.split()[0] in pinned


def test_every_break_is_of_a_line_that_is_there():
    """tests/breaks.py is run by hand, and says so only then."""
    gone = [one.name for one in BREAKS if one.old not in (PACKAGE / one.file).read_text(encoding="utf-8")]
    assert gone == []
