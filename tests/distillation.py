"""Tiny recoveries: random windows, a step of training towards the dense model, and its loss restated."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gradprobe_hf import RecoveryConfig
from gradprobe_hf.data.batches import Batches
from gradprobe_hf.recovery.distil import distil, teacher_of, workplace
from gradprobe_hf.recovery.text import RecoveryText
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.runtime.stopwatch import Stopwatch

DENSE = "llama"
LENGTHS = (12, 7, 12, 9, 12, 5, 12, 12, 10, 12, 3, 6, 12)


def text(lengths=LENGTHS, held_out=2):
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(256, (1, length), generator=generator) for length in lengths]
    return RecoveryText.of(Batches(tuple({"input_ids": row} for row in ids), "rows", len(ids), 0, "rows"), held_out)


def place(folder=None, processes=None):
    return workplace(folder, processes or Processes(), Stopwatch(), False)


def trained(student, dense, rows=None, folder=None, processes=None, **options):
    rows = rows or text()
    config = RecoveryConfig(**{"steps": 4, "batch_size": 2, "learning_rate": 1e-2, **options})
    with place(folder, processes) as here:
        return distil(student, teacher_of(dense, rows, config, here), rows, config, here)


def kl_of(dense, pruned, batch):
    """The mean divergence over the tokens of a padded batch, restated: unpadded, row by row, by torch's own."""
    found, count = 0, 0
    for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        ids = row[: int(mask.sum())][None]
        log_p, log_q = (model(input_ids=ids).logits[:, :-1].double().log_softmax(-1) for model in (dense, pruned))
        found = found + F.kl_div(log_q, log_p, log_target=True, reduction="sum")
        count += ids.shape[1] - 1
    return found / count, count


class KilledError(Exception):
    pass
