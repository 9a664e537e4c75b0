"""The engine: passes over the batches, each of which leaves the model as it was.

Routed experts see tokens of any sequence in any order, so a model that has them is probed one sequence at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from gradprobe_hf.data.batches import Batches, row_count
from gradprobe_hf.model.block_cache import BlockOutputCache
from gradprobe_hf.model.fsdp import is_sharded, resharded
from gradprobe_hf.model.loss import Batch, LossFunction, forward_only, summed_loss
from gradprobe_hf.model.parameters import input_device
from gradprobe_hf.model.patches import checkpointed, checkpointed_layers, eval_mode, frozen
from gradprobe_hf.model.targets import Target, is_routed
from gradprobe_hf.probe.attachment import instrumented, shrinking
from gradprobe_hf.probe.folding import Probe
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


@dataclass(frozen=True)
class Workload:
    """What every pass of a run has in common.

    Attributes:
        batches: mappings for `model(**batch)`, of all processes.
        loss_fn: `loss_fn(model, batch)` returns the *summed* loss in place of the model's own.
        checkpointing: recompute each block in backward instead of keeping its activations.
        processes: who shares the batches.
        progress: show progress bars.
    """

    model: PreTrainedModel
    batches: Batches | Sequence[Batch]
    loss_fn: LossFunction | None = None
    checkpointing: bool = False
    processes: Processes = field(default_factory=Processes)
    progress: bool = True


@dataclass(frozen=True)
class ProbePass:
    """One probe.

    Attributes:
        targets: what is measured.
        statistics: added to.
        shrunk: masks `[out, in]` of the candidates that are served multiplied by `factor`; None: no candidates.
        pruned: further targets, which are served with the weights under these masks at zero, and not measured.
        cache: finished blocks that are not computed again; its batches are this process's share of the workload's.
        spike_limit: how many times its energy in probe 0 a sequence's gradient may have at a matrix in probe 1, before
            it is scaled down to that; 0: no limit, and energies are not remembered.
        tally: of a pass that was begun before, which goes on where it stopped.
        after_batch: called when a batch is folded and tallied.
        label: what the progress bar says.
    """

    targets: Sequence[Target]
    statistics: Statistics
    shrunk: Mapping[str, Tensor] | None = None
    factor: float = 1.0
    pruned: tuple[Sequence[Target], Mapping[str, Tensor]] = ((), {})
    cache: BlockOutputCache | None = None
    spike_limit: float = 0.0
    tally: Tally = field(default_factory=Tally)
    after_batch: Callable[[], None] = lambda: None
    label: str = "probe"


def run_probe(work: Workload, one: ProbePass) -> ProbeLoss:
    """One forward and backward pass over this process's share of the batches, folded into `one.statistics`.

    The model itself is left as it was, whatever happens.

    Returns:
        The calibration loss of all processes.

    Raises:
        ValueError: a loss that is not finite or has no gradient, or sequences that cannot be told apart.
    """
    tally = one.tally
    steps = one.cache.steps if one.cache else own_steps(work.model, one.targets, work.batches, work.processes)
    device = input_device(work.model)
    with _measuring(work, one, begun=sum(row_count(batch) for batch, _ in steps[: len(tally)])) as probe:
        bar = tqdm(
            total=len(steps), initial=len(tally), desc=one.label, unit="batch", disable=not work.progress, leave=True
        )
        with bar, resharded(work.model):  # before the frozen parameters get their flags back
            for batch, counted in steps[len(tally) :]:
                batch = send_to_device(batch, device)
                probe.start_batch(batch, counted)
                if one.cache is not None:
                    one.cache.start_batch(len(tally))
                loss, terms = _differentiated(work, batch, is_first=not len(tally), label=one.label)
                probe.finish_batch()
                tally.add(loss if counted else torch.zeros_like(loss), terms if counted else None)
                bar.update()
                one.after_batch()
    return _summed(work, tally, one.label)


@contextmanager
def _measuring(work: Workload, one: ProbePass, begun: int) -> Iterator[Probe]:
    """The model with its targets measured and served as the pass asks, for the body of the `with`.

    Entered from the outside in, and left in the opposite order: the shards of FSDP2 come first, because all that
    follows looks at parameters; maps are attached before the layers that recompute them.
    """
    model = work.model
    layers = checkpointed_layers(model) if work.checkpointing else []
    with ExitStack() as stack:
        stack.enter_context(resharded(model))
        served = stack.enter_context(shrinking(model, one.targets, one.shrunk, one.factor))
        probe = Probe(
            one.statistics,
            served,
            one.factor,
            model.config.is_encoder_decoder,
            spike_limit=one.spike_limit,
            begun=begun,
        )
        stack.enter_context(frozen(model))
        stack.enter_context(eval_mode(model))
        stack.enter_context(instrumented(model, one.targets, probe, recomputed=layers))
        gone = Probe(shrunk=stack.enter_context(shrinking(model, *one.pruned, 0.0)), factor=0.0)
        stack.enter_context(instrumented(model, one.pruned[0], gone, recomputed=layers))
        stack.enter_context(checkpointed(model, layers, probe.recomputing))
        stack.enter_context(one.cache.skipping() if one.cache else nullcontext())
        stack.enter_context(torch.enable_grad())
        yield probe


def _differentiated(work: Workload, batch: Batch, is_first: bool, label: str) -> tuple[Tensor, Tensor | None]:
    """The loss of one batch after its backward pass, without its graph: the next batch makes another."""
    loss, terms = (work.loss_fn(work.model, batch), None) if work.loss_fn else summed_loss(work.model, batch)
    _check_loss(loss, work.model)
    if is_first:  # most bad losses are bad at once: one synchronisation here saves a long wait
        _check_finite(loss.detach(), label)
    loss.backward()
    return loss.detach(), terms


def _summed(work: Workload, tally: Tally, label: str) -> ProbeLoss:
    sums = [sum(map(float, values)) for values in (tally.losses, tally.terms)]  # what was recalled is on the CPU
    total = work.processes.sum_(torch.tensor(sums, dtype=torch.float64))
    _check_finite(total[0], label)
    return ProbeLoss(float(total[0]), None if work.loss_fn else int(total[1]))


@torch.no_grad()
def observe_inputs(work: Workload, targets: Sequence[Target], statistics: Statistics) -> None:
    """One forward pass that sums the squared inputs of every target: all that Wanda needs."""
    model = work.model
    steps = own_steps(model, targets, work.batches, work.processes)
    probe = Probe(statistics, has_encoder=model.config.is_encoder_decoder)
    with resharded(model), eval_mode(model), instrumented(model, targets, probe, on_input=probe.fold_inputs):
        for batch, counted in tqdm(steps, desc="inputs", unit="batch", disable=not work.progress):
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
