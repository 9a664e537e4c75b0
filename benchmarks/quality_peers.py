"""The rows of `quality.py` that llm-compressor makes: the same windows are handed to `peer.py`, in its environment."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from gradprobe_hf.data.batches import Batches

SCRIPT = Path(__file__).parent / "peer.py"


@dataclass(frozen=True)
class PeerTask:
    """What a peer is asked for.

    Attributes:
        python: of an environment that has llm-compressor.
        model: a folder.
        method: `"sparsegpt"` or `"wanda"`.
        column: a sparsity, or n:m.
        sparsity: what the other cells of the column have.
    """

    python: str
    model: str
    dtype: str
    method: str
    column: str
    sparsity: float

    def run(self, batches: Batches) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The pruned matrices `[out, in]` by parameter; and the seconds, peak_bytes and versions of the run."""
        with tempfile.TemporaryDirectory() as scratch:
            windows, changed = Path(scratch, "windows.safetensors"), Path(scratch, "changed.safetensors")
            save_file({"input_ids": torch.cat([batch["input_ids"] for batch in batches])}, windows)
            command: list[str | Path] = [self.python, SCRIPT, self.model, windows, changed, "--method", self.method]
            command += ["--dtype", self.dtype, "--sparsity", str(self.sparsity)]
            command += ["--pattern", self.column] if ":" in self.column else []
            subprocess.run(command, check=True, stdout=sys.stderr)
            with safe_open(changed, "pt") as file:
                about = json.loads(file.metadata()["about"])
            return load_file(changed), about
