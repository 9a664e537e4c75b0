"""Prune a model to the 2:4 pattern and share it on the Hub, card and all. Log in first: `hf auth login`.

usage: python examples/push_to_hub.py MODEL USER/NAME
"""

from __future__ import annotations

import sys

from gradprobe_hf import GradProbeConfig, prune_pretrained

if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    model, repository = sys.argv[1:]
    # 32 windows of 64 tokens are enough to try it. Leave these three options out for a model that will be used.
    config = GradProbeConfig(pattern="2:4", num_samples=32, sequence_length=64, evaluation_samples=16)
    # The token is checked and the repository created before anything is probed.
    result = prune_pretrained(model, config, push_to_hub=repository)
    print(f"{repository}: {result.report.sparsity:.2%} zeros")
