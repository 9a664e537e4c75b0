"""A training loop that wastes time in six ways, and the same loop without them, for `gradprobe profile`.

gradprobe profile script examples/slow_training.py
gradprobe profile script examples/slow_training.py -- --mended
gradprobe profile script examples/slow_training.py -- --mended loader item

`benchmarks/profiling.py` mends one at a time and measures what that gains.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

VOCABULARY, WIDTH, LONGEST = 256, 96, 96
FAULTS = ("loader", "padding", "mask", "item", "norms", "print")


TEXT = "some words of a long document " * 300
PIECES = {TEXT[at : at + 2]: at for at in range(30)}


def tokenized(text: str) -> list[int]:
    """A tokenizer at work."""
    return [PIECES.get(text[at : at + 2], 0) for at in range(0, len(text), 2)]


class Documents(Dataset[dict[str, Tensor]]):
    """Rows of random tokens, most of them short. Whole documents are tokenized anew each time, or nothing is."""

    def __init__(self, beforehand: bool) -> None:
        self.beforehand = beforehand

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not self.beforehand:
            tokenized(TEXT)
        length = LONGEST if index % 8 == 0 else LONGEST // 4
        return {"input_ids": torch.randint(1, VOCABULARY, (length,))}


def to_longest(rows: list[dict[str, Tensor]], longest: int = LONGEST) -> dict[str, Any]:
    """A batch padded to a length. `tokens`: those that are no padding."""
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    for at, row in enumerate(rows):
        ids[at, : len(row["input_ids"])] = row["input_ids"]
    tokens = sum(len(row["input_ids"]) for row in rows)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "tokens": tokens}


def packed(rows: list[dict[str, Tensor]]) -> dict[str, Any]:
    """The same tokens, one document behind the other, in as many rows as they fill."""
    tokens = torch.cat([row["input_ids"] for row in rows])
    ids = tokens[: len(tokens) // LONGEST * LONGEST].view(-1, LONGEST)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "tokens": ids.numel()}


class Model(nn.Module):
    """One attention layer."""

    def __init__(self, keeps_mask: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.keeps_mask = keeps_mask
        self.register_buffer("mask", torch.triu(torch.ones(LONGEST, LONGEST, dtype=torch.bool), 1), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        mask: Any = self.mask
        if not self.keeps_mask:
            mask = torch.triu(torch.ones(LONGEST, LONGEST, dtype=torch.bool), 1)
        return self.head(self.layer(self.embed(ids), src_mask=mask))


def train(mended: Collection[str]) -> Iterator[int]:
    """Without these faults. Yields the tokens of each step that are no padding."""
    torch.manual_seed(0)
    model = Model(keeps_mask="mask" in mended)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    collate = packed if "padding" in mended else to_longest
    rows = DataLoader(Documents(beforehand="loader" in mended), batch_size=8, collate_fn=collate)
    total, norm = torch.zeros(()), torch.zeros(())
    for step, batch in enumerate(rows, 1):
        logits = model(batch["input_ids"])
        targets = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        if "item" in mended:
            total += loss.detach()
        else:
            total += loss.item()
        if "norms" in mended:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        else:
            norm = sum(parameter.grad.norm() ** 2 for parameter in model.parameters() if parameter.grad is not None)
        if "print" not in mended:
            print(step, loss, norm)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step}: mean loss {float(total) / step:.3f}, norm {float(norm):.3f}")
        yield batch["tokens"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--mended", nargs="*", choices=FAULTS, help="without these faults; alone: without any")
    options = parser.parse_args()
    without = () if options.mended is None else options.mended or FAULTS
    for _ in zip(range(options.steps), train(without), strict=False):
        pass
