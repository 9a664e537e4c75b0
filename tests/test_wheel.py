"""The wheel works away from the checkout: it has every package, and the card's template."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

SCRIPT = """
import sys
from pathlib import Path
import gradprobe_hf
from gradprobe_hf import metrics
from gradprobe_hf.cli import main
assert Path(gradprobe_hf.__file__).is_relative_to(sys.argv[1]), gradprobe_hf.__file__
assert Path(metrics.path("perplexity")).is_relative_to(sys.argv[1])
sys.exit(main(["prune", sys.argv[2], "--output", "out", "--num-samples", "4", "--sequence-length", "16", "--quiet"]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built with the setuptools that is installed: a build in isolation would fetch one."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a build leaves folders behind in what it builds
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "tests"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    built = subprocess.run(
        [*command, "--wheel-dir", str(folder), str(source)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, f"the wheel cannot be built; its build needs setuptools >= 77:\n{built.stderr}"
    return next(folder.glob("*.whl"))


def test_the_wheel_has_every_module_and_the_template(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "gradprobe_hf").rglob("*.py")}
    others = {"py.typed", *(f"model_cards/{name}" for name in ("__init__.py", "template.md", "recovered.md"))}
    assert names == modules | {f"gradprobe_hf/{name}" for name in others}


@pytest.mark.slow
def test_an_unpacked_wheel_prunes_and_writes_a_card(wheel, checkpoint, tmp_path):
    """Started by a process that takes a gigabyte, which is not to count as its own."""
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    started = "import subprocess, sys; held = b'.' * 2**30; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
    ran = subprocess.run(
        [sys.executable, "-c", started, sys.executable, "-c", SCRIPT, str(site), str(checkpoint)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "# " in (tmp_path / "out" / "README.md").read_text()
    report = json.loads((tmp_path / "out" / "gradprobe_report.json").read_text())
    assert 10**7 < report["memory"]["peak_resident_bytes"] < 2**30
