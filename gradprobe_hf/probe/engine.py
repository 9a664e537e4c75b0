"""The engine: passes over the batches, each of which leaves the model as it was.

Routed experts see tokens of any sequence in any order, so a model that has them is probed one sequence at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from gradprobe_hf.data.batches import row_count
from gradprobe_hf.model.block_cache import BlockOutputCache
from gradprobe_hf.model.fsdp import is_sharded, resharded
from gradprobe_hf.model.loss import Batch, LossFunction, forward_only, summed_loss
from gradprobe_hf.model.parameters import input_device
from gradprobe_hf.model.patches import checkpointed, checkpointed_layers, eval_mode, frozen
from gradprobe_hf.model.targets import Target, is_routed
from gradprobe_hf.probe.attachment import instrumented, shrinking
from gradprobe_hf.probe.folding import Masks, Probe
from gradprobe_hf.probe.statistics import Statistics
from gradprobe_hf.runtime.processes import Processes


@dataclass
class Tally:
    """How far a pass has come: the loss of each batch of this process so far, in nats, and over how many terms."""

    losses: list[Tensor] = field(default_factory=list)
    terms: list[Tensor] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.losses)

    def add(self, loss: Tensor, terms: Tensor | None) -> None:
        self.losses.append(loss.detach())
        self.terms.append(torch.tensor(0) if terms is None else terms)


@dataclass(frozen=True)
class ProbeLoss:
    """The calibration loss of one probe: its sum in nats, and over how many tokens (or examples; None: unknown)."""

    total: float
    terms: int | None

    @property
    def mean(self) -> float:
        return self.total / self.terms if self.terms else self.total


def run_probe(
    model: PreTrainedModel,
    targets: Sequence[Target],
    batches: Iterable[Batch],
    statistics: Statistics,
    *,
    shrunk: Masks | None = None,
    factor: float = 1.0,
    pruned: tuple[Sequence[Target], Masks] = ((), {}),
    prefix: BlockOutputCache | None = None,
    spike_limit: float = 0.0,
    loss_fn: LossFunction | None = None,
    checkpointing: bool = False,
    processes: Processes | None = None,
    tally: Tally | None = None,
    after_batch: Callable[[], None] | None = None,
    label: str = "probe",
    progress: bool = True,
) -> ProbeLoss:
    """One forward and backward pass over this process's share of the batches, folded into `statistics`.

    Args:
        targets: what is measured.
        batches: mappings for `model(**batch)`.
        statistics: added to; the model itself is left as it was, whatever happens.
        shrunk: masks `[out, in]` of the candidates to multiply by `factor` in what is served.
        pruned: further targets, which are served with the weights under these masks at zero, and not measured.
        prefix: finished blocks that are not computed again; its batches are this process's share of these.
        spike_limit: how many times its energy in probe 0 a sequence's gradient may have at a matrix in probe 1, before
            it is scaled down to that; 0: no limit, and energies are not remembered.
        loss_fn: `loss_fn(model, batch)` returns the *summed* loss in place of the model's own.
        checkpointing: recompute each block in backward instead of keeping its activations.
        processes: who shares the batches; the loss that is returned is that of all of them.
        tally: of a pass that was begun before, which goes on where it stopped.
        after_batch: called when a batch is folded and tallied.
        label: what the progress bar says.

    Raises:
        ValueError: a loss that is not finite or has no gradient, or sequences that cannot be told apart.
    """
    processes, tally = processes or Processes(), Tally() if tally is None else tally
    steps = prefix.steps if prefix else own_steps(model, targets, batches, processes)
    device = input_device(model)
    layers = checkpointed_layers(model) if checkpointing else []
    with ExitStack() as stack:
        stack.enter_context(resharded(model))
        served = stack.enter_context(shrinking(model, targets, shrunk, factor))
        probe = Probe(
            statistics,
            served,
            factor,
            model.config.is_encoder_decoder,
            spike_limit=spike_limit,
            begun=sum(row_count(batch) for batch, _ in steps[: len(tally)]),
        )
        stack.enter_context(frozen(model))
        stack.enter_context(eval_mode(model))
        stack.enter_context(instrumented(model, targets, probe, recomputed=layers))
        gone = Probe(shrunk=stack.enter_context(shrinking(model, *pruned, 0.0)), factor=0.0)
        stack.enter_context(instrumented(model, pruned[0], gone, recomputed=layers))
        stack.enter_context(checkpointed(model, layers, probe.recomputing))
        stack.enter_context(prefix.skipping() if prefix else nullcontext())
        stack.enter_context(torch.enable_grad())
        bar = stack.enter_context(
            tqdm(total=len(steps), initial=len(tally), desc=label, unit="batch", disable=not progress)
        )
        stack.enter_context(resharded(model))  # before the frozen parameters get their flags back
        for batch, counted in steps[len(tally) :]:
            batch = send_to_device(batch, device)
            probe.start_batch(batch, counted)
            if prefix is not None:
                prefix.start_batch(len(tally))
            loss, terms = (loss_fn(model, batch), None) if loss_fn else summed_loss(model, batch)
            _check_loss(loss, model)
            if not len(tally):  # most bad losses are bad at once: one synchronisation here saves a long wait
                _check_finite(loss.detach(), label)
            loss.backward()
            probe.finish_batch()
            tally.add(loss if counted else torch.zeros_like(loss), terms if counted else None)
            del loss  # and its graph, before the next batch makes another
            bar.update()
            if after_batch is not None:
                after_batch()
    sums = [sum(map(float, values)) for values in (tally.losses, tally.terms)]  # what was recalled is on the CPU
    total = processes.sum_(torch.tensor(sums, dtype=torch.float64))
    _check_finite(total[0], label)
    return ProbeLoss(float(total[0]), None if loss_fn else int(total[1]))


@torch.no_grad()
def observe_inputs(
    model: PreTrainedModel,
    targets: Sequence[Target],
    batches: Iterable[Batch],
    statistics: Statistics,
    progress: bool,
    processes: Processes | None = None,
) -> None:
    """One forward pass that sums the squared inputs of every target: all that Wanda needs."""
    steps = own_steps(model, targets, batches, processes or Processes())
    probe = Probe(statistics, has_encoder=model.config.is_encoder_decoder)
    with resharded(model), eval_mode(model), instrumented(model, targets, probe, on_input=probe.fold_inputs):
        for batch, counted in tqdm(steps, desc="inputs", unit="batch", disable=not progress):
            batch = send_to_device(batch, input_device(model))
            probe.start_batch(batch, counted)
            forward_only(model, batch)


def own_steps(
    model: PreTrainedModel, targets: Sequence[Target], batches: Iterable[Batch], processes: Processes
) -> list[tuple[Batch, bool]]:
    """This process's batches in the order in which every pass goes through them, and whether each counts."""
    return share(list(_routable(batches, targets)), processes, is_sharded(model))


def share(steps: Sequence[Batch], processes: Processes, in_step: bool) -> list[tuple[Batch, bool]]:
    """This process's batches, and whether each counts.

    Args:
        in_step: every process has to make the same number of passes, because they gather weights from each other;
            one that has no batch left repeats one that does not count.
    """
    mine = [(step, True) for step in processes.mine(steps)]
    rounds = -(-len(steps) // processes.count)
    return mine + [(steps[0], False)] * (rounds - len(mine)) if in_step else mine


def _routable(batches: Iterable[Batch], targets: Sequence[Target]) -> Iterator[Batch]:
    """The batches; one sequence at a time where experts mix the tokens of a batch."""
    for batch in batches:
        if is_routed(targets):
            yield from single_rows(batch)
        else:
            yield batch


def single_rows(batch: Batch) -> Iterator[Batch]:
    """One sequence at a time, its padding cut off: an expert that is sent padding cannot tell it from text."""
    mask = batch.get("attention_mask")
    for row in range(row_count(batch)):
        single = {name: value[row : row + 1] if isinstance(value, Tensor) else value for name, value in batch.items()}
        if isinstance(mask, Tensor):
            kept = mask[row].bool()
            single = {
                k: v[:, kept] if isinstance(v, Tensor) and v.shape == mask[:1].shape else v for k, v in single.items()
            }
        yield single


def _check_loss(loss: Tensor, model: PreTrainedModel) -> None:
    if not isinstance(loss, Tensor) or loss.ndim != 0 or loss.grad_fn is None:
        raise ValueError(
            f"the loss of {type(model).__name__} must be a scalar that depends on the matrices to prune, got "
            f"{tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__}; check loss_fn and include."
        )


def _check_finite(loss: Tensor, label: str) -> None:
    if not torch.isfinite(loss):
        raise ValueError(
            f"the calibration loss is {loss.item()} in {label}. Nothing was changed. Look for NaN in the model's "
            "weights, a dtype that overflows (float16: try bfloat16), or batches without a single label."
        )
