"""The wheel works away from the checkout, and brings the card's template."""

from __future__ import annotations

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


def test_an_unpacked_wheel_prunes_and_writes_a_card(checkpoint, tmp_path):
    source = tmp_path / "source"  # a build leaves folders behind in what it builds
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "tests"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode:
        pytest.skip(
            f"the wheel cannot be built here (its build needs setuptools from a registry): {built.stderr[-200:]}"
        )
    site = tmp_path / "site"
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    assert (site / "gradprobe_hf" / "model_cards" / "template.md").is_file()
    assert (site / "gradprobe_hf" / "py.typed").is_file()
    environment = {**os.environ, "PYTHONPATH": str(site)}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(site), str(checkpoint)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "# " in (tmp_path / "out" / "README.md").read_text()
