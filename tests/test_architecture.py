"""The order of the modules: a file imports only from lines above its own. And the wheel ships every package."""

from __future__ import annotations

import ast
import configparser
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "gradprobe_hf"

# A call is a walk down this list.
ORDER = [
    "interrupts",
    "stopwatch",
    "recipes",
    "config",
    "sharding",
    "weights",
    "store",
    "masks",
    "updates",
    "processes",
    "targets",
    "thresholds",
    "checks",
    "modes",
    "loss",
    "blocks",
    "calibration",
    "scores",
    "selection",
    "obs",
    "least_squares",
    "probe",
    "reconstruction",
    "resume",
    "decision",
    "setting",
    "trial",
    "schedule",
    "sequential",
    "evaluation",
    "verdict",
    "application",
    "metrics",
    "report",
    "accounting",
    "plots",
    "loading",
    "shards",
    "estimation",
    "inspection",
    "card",
    "hub",
    "result",
    "preparation",
    "execution",
    "study",
    "comparison",
    "tuning",
    "pruning",
    "training",
    "cli",
]


def stages():
    return sorted(
        path
        for path in PACKAGE.rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py") or path.parent != PACKAGE
    )


def stage_of(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_stages(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names]
                if node.module == "gradprobe_hf"
                else [node.module]
            )
        for name in names:
            parts = name.split(".")
            if parts[0] == "gradprobe_hf" and len(parts) > 1:
                yield parts[1]


@pytest.mark.parametrize("path", stages(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_upwards(path):
    own = ORDER.index(stage_of(path))
    for stage in imported_stages(path):
        assert ORDER.index(stage) < own or stage == stage_of(path), f"{path.name} imports {stage}, which is below it"


def test_the_guide_lists_the_modules_in_this_order():
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
