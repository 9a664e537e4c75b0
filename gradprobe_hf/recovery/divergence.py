"""How far the predictions of a model are from its teacher's: of a batch of a step, and on rows that are held out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from transformers import PreTrainedModel

from gradprobe_hf.evaluation.divergence_loss import SummedDivergence
from gradprobe_hf.model.parameters import input_device
from gradprobe_hf.model.passes.patches import eval_mode
from gradprobe_hf.recovery.teacher import Teacher
from gradprobe_hf.recovery.text import COUNTED, Layout, RecoveryText, Row, collated
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.tasks.columns import IGNORED


def summed_divergence(
    model: nn.Module, batch: Mapping[str, Tensor], teacher: Teacher, layout: Layout, *, bf16: bool = False
) -> tuple[Tensor, Tensor]:
    """`KL(p_teacher || p_model)` in nats, summed over the predictions of a batch that count; and how many they are.

    Args:
        batch: that `text.collated` made, where the model is.
        bf16: compute in bfloat16 (autocast); the teacher computes as it is stored.
    """
    counted = (batch[COUNTED] != IGNORED).flatten()
    with torch.no_grad():
        predicted = teacher.predictions(batch)
    # Not by `bf16` of Trainer's arguments: Accelerate would make float32 of all logits, which are the largest tensor of
    # a step, and the loss does so of a few at a time.
    # Without its cache of rounded weights. It is cleared where the outermost autocast ends, and there is one around
    # all steps, `plain_computation`: every step would compute with the weights of before the first.
    with torch.autocast(counted.device.type, torch.bfloat16, enabled=bf16, cache_enabled=False):
        logits = layout.flat(model(**layout.inputs(batch), **layout.call).logits, batch[COUNTED])
    return SummedDivergence.apply(logits, predicted, counted), counted.sum()


@torch.no_grad()
def mean_divergence(
    rows: Sequence[Row], size: int, summed: Callable[[list[Row]], tuple[Tensor, Tensor]], processes: Processes
) -> float:
    """Of a prediction, however rows are batched and dealt to the processes.

    A mean over batches of their means would weigh a token by the length of its neighbours.

    Args:
        size: rows of a batch.
        summed: of a batch, as `summed_divergence`.
    """
    sums = torch.zeros(2, dtype=torch.float64)
    for part in processes.mine([list(rows[first : first + size]) for first in range(0, len(rows), size)]):
        sums += torch.tensor([float(value) for value in summed(part)], dtype=torch.float64)
    total, terms = processes.sum_(sums).tolist()
    return total / terms


def divergence_as_left(
    model: PreTrainedModel, text: RecoveryText, size: int, teacher: Teacher, processes: Processes
) -> float:
    """On the held-out rows, of a model as it will be used: in its own type, without Trainer, autocast or adapters."""
    device = input_device(model)

    def summed(rows: list[Row]) -> tuple[Tensor, Tensor]:
        batch = send_to_device(collated(rows, text.layout), device)
        return summed_divergence(model, batch, teacher, text.layout)

    with eval_mode(model):
        return mean_divergence(text.kept_back, size, summed, processes)
