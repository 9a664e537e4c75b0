"""Steps: which batches this process runs, in which order, and which of them count.

Routed experts see tokens of any sequence in any order, and maps of relative places those of all: a model that has
such is probed one sequence at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor
from transformers import PreTrainedModel

from gradprobe_hf.data.batches import Batches, row_count
from gradprobe_hf.model.fsdp import is_sharded
from gradprobe_hf.model.passes.loss import Batch
from gradprobe_hf.model.targets import Target, go_alone
from gradprobe_hf.probe.padding import BatchLayout
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.tasks.embeddings import DIRECTION

Item = TypeVar("Item")


def own_steps(
    model: PreTrainedModel, targets: Sequence[Target], batches: Iterable[Batch], processes: Processes
) -> list[tuple[Batch, bool]]:
    """This process's batches in the order of every pass, each with whether it counts."""
    return share(all_steps(model, targets, batches), processes, is_sharded(model))


def all_steps(model: PreTrainedModel, targets: Sequence[Target], batches: Iterable[Batch]) -> list[Batch]:
    """The batches of all processes."""
    if go_alone(model, targets):
        # A router sends the tokens of all sequences to an expert in one tensor `[tokens, hidden]`, say, from which no
        # gradient of a single sequence could be told.
        return [single for batch in batches for single in single_rows(model, batch)]
    return list(batches)


def step_count(model: PreTrainedModel, targets: Sequence[Target], batches: Batches) -> int:
    """How many steps there are for all processes to share."""
    return batches.samples if go_alone(model, targets) else len(batches)


def most_rows(model: PreTrainedModel, targets: Sequence[Target], batches: Batches, processes: Processes) -> int:
    """The most of these rows in a batch that leave every process a step; 1 where they are too few for that."""
    return batches.samples if go_alone(model, targets) else max(1, batches.samples // processes.count)


def share(batches: Sequence[Item], processes: Processes, in_step: bool) -> list[tuple[Item, bool]]:
    """This process's batches, each with whether it counts.

    Args:
        in_step: every process has to make the same number of passes. FSDP2 gathers weights from all processes in each
            of them, and would wait for ever; a process that has run out repeats a batch that does not count.
    """
    mine = [(batch, True) for batch in processes.mine(batches)]
    rounds = -(-len(batches) // processes.count)  # of the process that has the most
    return mine + [(batches[0], False)] * (rounds - len(mine)) if in_step else mine


def single_rows(model: PreTrainedModel, batch: Batch) -> Iterator[Batch]:
    """One sequence at a time, its padding cut off: an expert that is sent padding cannot tell it from text.

    Raises:
        ValueError: images of which it cannot be told whose they are.
    """
    layout, rows = BatchLayout.of(batch, model), row_count(batch)
    pixels = batch.get("pixel_values")
    if rows > 1 and isinstance(pixels, Tensor) and len(pixels) != rows:  # the patches of all rows in one
        raise ValueError(
            f"{type(model).__name__} takes pixel_values of shape {tuple(pixels.shape)} with {rows} sequences, whose "
            "images cannot be told apart; set batch_size=1 (or give batches of one row)."
        )
    for row in range(rows):
        # What has no row for each sequence, positions `[1, tokens]` say, is for all of them.
        single = {
            name: value[row : row + 1] if isinstance(value, Tensor) and value.ndim and len(value) == rows else value
            for name, value in batch.items()
        }
        yield {name: _without_padding(model, layout, row, name, value) for name, value in single.items()}


def _without_padding(model: PreTrainedModel, layout: BatchLayout, row: int, name: str, value: Any) -> Any:
    """What a batch has of one row under a name, without padding: `[1, tokens]`; anything else as it is."""
    of_decoder = model.config.is_encoder_decoder and (name == "labels" or name.startswith("decoder_"))
    mask = layout.decoder_mask if of_decoder else layout.encoder_mask
    # Whatever has the shape of the mask has a column for each token: ids, labels, token types. An embedding may have it
    # by chance.
    is_embedding = name in ("labels", DIRECTION) and isinstance(value, Tensor) and value.is_floating_point()
    if mask is None or is_embedding or not isinstance(value, Tensor) or value.shape != mask[:1].shape:
        return value
    if not of_decoder:
        return value[:, mask[row]]
    # A label that does not count may stand between others, and is the decoder's next input all the same.
    counted = mask[row].nonzero()
    return value[:, : int(counted[-1]) + 1] if len(counted) else value
