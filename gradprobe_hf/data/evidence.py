"""Evidence: whether a loss over batches can tell anything, from their labels alone."""

from __future__ import annotations

from transformers import PreTrainedModel

from gradprobe_hf.data.batches import Batches
from gradprobe_hf.model.families import ignored_label, is_causal
from gradprobe_hf.model.passes.loss import Batch, counted_labels, next_token_labels
from gradprobe_hf.tasks.columns import IGNORED


def check_evidence(model: PreTrainedModel, batches: Batches, part: str) -> None:
    """Raise ValueError where no label counts: the loss would be 0, or not a number, whatever the weights are.

    transformers' losses are means over the labels of a batch, which are not a number over none; ours, of causal
    language models, are sums: there a batch without labels adds nothing and does no harm.

    Args:
        part: what the batches are for: the name of an argument.
    """
    counts = [_counted(model, batch) for batch in batches]
    empty = [number for number, count in enumerate(counts, start=1) if count == 0]
    if not empty or (is_causal(model) and len(empty) < len(counts)):
        return
    where = "no batch has" if len(empty) == len(counts) else f"batch {empty[0]} of {len(counts)} does not have"
    raise ValueError(
        f"{part} ({batches.source}): {where} a label that counts: all are {ignored_label(model)}, or padding, so "
        "there is no loss to measure. Look at how labels and masks are made: answers that are cut off at the end of a "
        "row leave none."
    )


def _counted(model: PreTrainedModel, batch: Batch) -> int | None:
    """How many labels count; without labels those are the tokens themselves, where a mask leaves any."""
    if batch.get("labels") is None and "input_ids" in batch and is_causal(model):
        return int((next_token_labels(batch, model) != IGNORED).sum())
    return counted_labels(model, batch)
