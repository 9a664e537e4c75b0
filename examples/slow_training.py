"""A training loop that wastes time in six ways, and the same loop without them, for `gradprobe profile`.

gradprobe profile script examples/slow_training.py
gradprobe profile script examples/slow_training.py -- --mended
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

VOCABULARY, WIDTH, LONGEST = 256, 96, 96


class Documents(Dataset[dict[str, Tensor]]):
    """Rows of random tokens, most of them short. Tokenized anew each time, or beforehand."""

    def __init__(self, beforehand: bool) -> None:
        self.beforehand = beforehand

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not self.beforehand:
            time.sleep(1e-3)  # a tokenizer at work
        length = LONGEST if index % 8 == 0 else LONGEST // 4
        return {"input_ids": torch.randint(1, VOCABULARY, (length,))}


def to_longest(rows: list[dict[str, Tensor]], longest: int = LONGEST) -> dict[str, Tensor]:
    """A batch padded to a length."""
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    for at, row in enumerate(rows):
        ids[at, : len(row["input_ids"])] = row["input_ids"]
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def packed(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The same tokens, one document behind the other, in as many rows as they fill."""
    tokens = torch.cat([row["input_ids"] for row in rows])
    ids = tokens[: len(tokens) // LONGEST * LONGEST].view(-1, LONGEST)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


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


def train(steps: int, mended: bool) -> None:
    torch.manual_seed(0)
    model = Model(keeps_mask=mended)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    rows = DataLoader(Documents(beforehand=mended), batch_size=8, collate_fn=packed if mended else to_longest)
    total = torch.zeros(())
    for step, batch in zip(range(steps), rows, strict=False):
        logits = model(batch["input_ids"])
        targets = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        if mended:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            total += loss.detach()
        else:
            norm = sum(parameter.grad.norm() ** 2 for parameter in model.parameters() if parameter.grad is not None)
            total += loss.item()
            print(step, loss, norm)
        optimizer.step()
        optimizer.zero_grad()
    print(f"mean loss {float(total) / steps:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--mended", action="store_true", help="the loop without its faults")
    options = parser.parse_args()
    train(options.steps, options.mended)
