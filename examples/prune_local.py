"""Prune a model using your own text, look at the sparsity of each kind of matrix, then save.

usage: python examples/prune_local.py MODEL TEXT_FILE OUTPUT_DIR
"""

from __future__ import annotations

import sys
from pathlib import Path

from gradprobe_hf import GradProbeConfig, prune_pretrained

if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    model, text, output = sys.argv[1:]
    if Path(output).exists():  # or the work below would be for nothing
        sys.exit(f"{output} exists already: choose another folder.")
    # So few and short windows are enough to try it: leave the options for them out for a model that will be used.
    config = GradProbeConfig(
        sparsity=0.4, num_samples=16, sequence_length=64, evaluation_samples=8, exclude=["down_proj"]
    )
    # With apply=False the model stays dense in memory: look at the report first, then decide.
    result = prune_pretrained(model, config, calibration=text, evaluation="pydoc", apply=False)
    for group in result.report.by("role"):
        print(f"{group.label:24s} {group.sparsity:.1%}")
    result.save_pretrained(output)
