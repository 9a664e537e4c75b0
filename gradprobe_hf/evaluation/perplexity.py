"""Evaluation: the mean loss of a model over batches, and its perplexity where the loss is a token loss."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from tqdm.auto import tqdm

from gradprobe_hf.data.batches import row_count
from gradprobe_hf.model.families import is_causal
from gradprobe_hf.model.fsdp import is_sharded, resharded
from gradprobe_hf.model.parameters import input_device
from gradprobe_hf.model.passes.block_cache import BlockOutputCache
from gradprobe_hf.model.passes.loss import summed_loss
from gradprobe_hf.model.passes.patches import eval_mode, own_draws
from gradprobe_hf.probe.engine import Workload
from gradprobe_hf.probe.steps import share


@dataclass(frozen=True)
class Measurement:
    """A mean loss.

    Attributes:
        loss: in nats per term.
        perplexity: exp(loss) for a causal language model with its own loss, else None.
        terms: tokens that were predicted; examples, of a model without a token loss; rows, with a `loss_fn`.
    """

    loss: float
    perplexity: float | None
    terms: int

    @property
    def metric(self) -> float:
        """The perplexity; the loss where there is none. Lower is better."""
        return self.loss if self.perplexity is None else self.perplexity

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def measure(
    work: Workload, label: str = "evaluation", allows_nan: bool = False, cache: BlockOutputCache | None = None
) -> Measurement:
    """Mean loss over all batches. For windows of text its exp is their perplexity.

    All processes share the batches and return the same result.

    Args:
        label: for the progress bar and for errors.
        allows_nan: return a loss that is NaN, as a model that was pruned too far has.
        cache: of this process's share of the batches; passes begin behind the blocks that are finished there.

    Raises:
        ValueError: no term was counted, or the loss is NaN. An infinite loss is a result.
    """
    model, loss_fn = work.model, work.loss_fn
    device, losses, counts = input_device(model), [], []
    # FSDP2 keeps the root's parameters gathered after a forward pass without backward; `resharded` shards them again.
    skipping = nullcontext() if cache is None else cache.skipping()
    with work.telling(), resharded(model), eval_mode(model), own_draws(device) as draw, skipping:
        steps = share(list(work.batches), work.processes, is_sharded(model)) if cache is None else cache.steps
        bar = tqdm(steps, desc=label, unit="batch", disable=not work.progress, leave=False)
        for number, (batch, counted) in enumerate(bar):
            draw(number)
            if cache is not None:
                cache.start_batch(number)
            batch = send_to_device(batch, device)
            loss, count = (loss_fn(model, batch), row_count(batch)) if loss_fn else summed_loss(model, batch)
            if not isinstance(loss, Tensor) or loss.ndim:
                shown = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
                raise ValueError(f"loss_fn must return a scalar, the summed loss of a batch, got {shown}.")
            if counted:
                losses.append(loss)
                counts.append(count)
    # Read once, behind the loop: `float` waits for the device. In float64 on the host, which every machine has.
    totals = torch.tensor([sum(map(float, losses)), sum(map(float, counts))], dtype=torch.float64)
    total, terms = work.processes.sum_(totals).tolist()
    return measurement(total, int(terms), label, is_causal(model) and loss_fn is None, allows_nan)


def measurement(total: float, terms: int, label: str, is_perplexity: bool, allows_nan: bool = False) -> Measurement:
    """That of a summed loss. Raises: as `measure`."""
    if not terms or (math.isnan(total) and not allows_nan):
        raise ValueError(f"{label}: the loss over {terms} terms is {total}; nothing can be concluded from it.")
    mean = total / terms
    return Measurement(mean, exp(mean) if is_perplexity else None, terms)


def exp(loss: float) -> float:
    """`math.exp`, and infinity where that overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
