"""Training with zeros kept by masks, under torch.compile, which has to compile again and again.

    gradprobe profile script examples/masked_training.py
    gradprobe profile script examples/masked_training.py -- --mended lengths reading

Batches have the length of their longest row, and the compiler was told that lengths do not change; the sparsity is read
in the forward pass, where the graph has to end. The report names both lines. Whether compiling pays at all is one more
change, `eager`, that `benchmarks/profiling.py` measures like the others.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, ROWS = 256, 128, 8
LENGTHS = tuple(range(128, 257, 16))  # one more than torch.compile keeps
CHANGES = ("lengths", "reading", "eager")


class Masked(nn.Module):
    """A linear map with half of its weights at zero."""

    def __init__(self, inner: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, inner) * inner**-0.5)
        self.mask: Tensor
        self.register_buffer("mask", torch.rand(out, inner) > 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * self.mask)


class Model(nn.Module):
    """Predicts a token from the one before."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(Masked(WIDTH, 4 * WIDTH), nn.GELU(), Masked(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH))
        self.head = Masked(WIDTH, VOCABULARY)
        self.reads, self.sparsity = reads, 0.0

    def forward(self, ids: Tensor) -> Tensor:
        if self.reads:
            self.sparsity = 1 - self.head.mask.float().mean().item()
        return self.head(self.layers(self.embed(ids)))


def train(changes: Collection[str]) -> Iterator[int]:
    """With these changes. Yields the tokens of each step."""
    torch.manual_seed(0)
    model = Model(reads="reading" not in changes)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    called: Any = model if "eager" in changes else torch.compile(model, dynamic=False)
    for step in range(100_000):
        length = 192 if "lengths" in changes else LENGTHS[step % len(LENGTHS)]
        ids = torch.randint(VOCABULARY, (ROWS, length + 1))
        logits = called(ids[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield ids[:, 1:].numel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--mended", nargs="*", default=[], choices=CHANGES)
    options = parser.parse_args()
    for _ in zip(range(options.steps), train(options.mended), strict=False):
        pass
