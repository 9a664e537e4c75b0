"""The engine: forward and backward passes over the batches. Each leaves the model exactly as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from gradprobe_hf.data.batches import Batches, row_count
from gradprobe_hf.model.fsdp import resharded, telling
from gradprobe_hf.model.parameters import input_device
from gradprobe_hf.model.passes.block_cache import BlockOutputCache
from gradprobe_hf.model.passes.loss import Batch, LossFunction, forward_only, summed_loss
from gradprobe_hf.model.passes.patches import checkpointed, checkpointed_layers, eval_mode, frozen, own_draws
from gradprobe_hf.model.targets import Target, go_alone
from gradprobe_hf.probe.maps.attachment import instrumented, shrinking
from gradprobe_hf.probe.maps.folding import Folding
from gradprobe_hf.probe.maps.serving import ServedWeights
from gradprobe_hf.probe.statistics import Statistics
from gradprobe_hf.probe.steps import own_steps
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.runtime.stopwatch import batch_done


@dataclass
class Tally:
    """How far a pass has got: the summed loss of each batch so far, in nats, and the number of its terms.

    Scalars stay on their device until the pass ends: reading one would wait for the accelerator in every batch.
    """

    losses: list[Tensor] = field(default_factory=list)
    terms: list[Tensor] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.losses)

    def add(self, loss: Tensor, terms: Tensor | None) -> None:
        self.losses.append(loss.detach())
        self.terms.append(torch.tensor(0) if terms is None else terms)


@dataclass(frozen=True)
class ProbeLoss:
    """The calibration loss of one probe: its sum in nats, and its terms: tokens, or examples; None: not known."""

    total: float
    terms: int | None

    @property
    def mean(self) -> float:
        return self.total / self.terms if self.terms else self.total


@dataclass(frozen=True)
class Workload:
    """What every pass of a run has in common.

    Attributes:
        batches: mappings for `model(**batch)`; those of all processes together.
        loss_fn: `loss_fn(model, batch)` returns the *summed* loss; None: the model's own.
        checkpointing: recompute each block in backward instead of keeping its activations.
        processes: the processes that share the batches.
        progress: show progress bars.
    """

    model: PreTrainedModel
    batches: Batches | Sequence[Batch]
    loss_fn: LossFunction | None = None
    checkpointing: bool = False
    processes: Processes = field(default_factory=Processes)
    progress: bool = True

    def telling(self) -> AbstractContextManager[None]:
        """What fails in the passes of one process fails in all."""
        return telling(self.model, self.processes)


@dataclass(frozen=True)
class ProbePass:
    """One probe.

    Attributes:
        targets: the matrices to measure.
        statistics: of these targets; the probe adds to them.
        shrunk: masks, bool `[out, in]`, of the weights that are multiplied by `factor` while probing; None: none.
        pruned: further targets, and masks of their weights that are zero while probing; these are not measured.
        new_weights: of these further targets, values to probe with in place of the model's.
        cache: outputs of finished blocks, which are not computed again; its batches are this process's own.
        spike_limit: how many times its energy in probe 0 a sequence's gradient may have at a matrix in probe 1, before
            it is scaled down to that; 0: no limit (`spikes.py`).
        tally: of an interrupted pass, which continues behind its last batch; filled by the pass, so that a `ProbePass`
            serves once.
        after_batch: called when a batch is folded and tallied.
        refuses_flat: whether a loss without any gradient is an error. Not of one batch alone, or of the matrices of one
            step, which may have none: a block that begins at zero, say.
        label: for the progress bar.
    """

    targets: Sequence[Target]
    statistics: Statistics
    shrunk: Mapping[str, Tensor] | None = None
    factor: float = 1.0
    pruned: tuple[Sequence[Target], Mapping[str, Tensor]] = ((), {})
    new_weights: Mapping[str, Tensor] = field(default_factory=dict)
    cache: BlockOutputCache | None = None
    spike_limit: float = 0.0
    tally: Tally = field(default_factory=Tally)
    after_batch: Callable[[], None] = lambda: None
    refuses_flat: bool = False
    label: str = "probe"


def run_probe(work: Workload, one: ProbePass) -> ProbeLoss:
    """One forward and backward pass over this process's share of the batches, folded into `one.statistics`.

    The model is restored on exit, also after an exception or a KeyboardInterrupt.

    Returns:
        The calibration loss over the batches of all processes.

    Raises:
        ValueError: a loss that is not finite or has no gradient, or sequences that cannot be told apart.
    """
    tally, resumed = one.tally, len(one.tally) > 0
    steps = one.cache.steps if one.cache else own_steps(work.model, one.targets, work.batches, work.processes)
    device = input_device(work.model)
    # Sequences are numbered through the pass: the spike limit compares each with itself in probe 0. A resumed pass goes
    # on with the number that its interrupted part has reached.
    first_sequence = sum(row_count(batch) for batch, _ in steps[: len(tally)])
    with work.telling(), _measuring(work, one, first_sequence) as folding:
        bar = tqdm(
            total=len(steps), initial=len(tally), desc=one.label, unit="batch", disable=not work.progress, leave=False
        )
        # Resharded once more inside: `frozen` restores its flags before the outer `resharded` exits, and must set them
        # on the shards, not on gathered parameters.
        with bar, resharded(work.model), own_draws(device) as draw:
            for batch, counted in steps[len(tally) :]:
                draw(len(tally))
                batch = send_to_device(batch, device)
                folding.start_batch(batch, counted)
                if one.cache is not None:
                    one.cache.start_batch(len(tally))
                # A batch that does not count is differentiated all the same, for the collectives in it.
                loss, terms = _differentiated(work, batch, folding, is_first=not len(tally), label=one.label)
                folding.finish_batch()
                tally.add(loss if counted else torch.zeros_like(loss), terms if counted else None)
                bar.update()
                one.after_batch()
                batch_done(work.model, batch)
    total = _total_loss(work, tally, one.label)
    if one.refuses_flat:
        _check_moved(work, one.targets, folding.moved or resumed, total, one.label)
    return total


@contextmanager
def _measuring(work: Workload, one: ProbePass, first_sequence: int) -> Iterator[Folding]:
    """Yield where the pass folds, with the model instrumented, frozen and in eval mode.

    Contexts exit in the opposite order, and the order matters: parameters have to be shards before anything looks at
    them, and maps have to be in place before the layers around them are wrapped for recomputation.
    """
    model = work.model
    layers = checkpointed_layers(model) if work.checkpointing else []
    folding = Folding(one.statistics, model, one.spike_limit, first_sequence)
    with ExitStack() as stack:
        stack.enter_context(resharded(model))
        shrunk = stack.enter_context(shrinking(model, one.targets, one.shrunk, one.factor))
        stack.enter_context(frozen(model))
        stack.enter_context(eval_mode(model))
        served = ServedWeights(shrunk, one.factor)
        stack.enter_context(instrumented(model, one.targets, served, folding, recomputed=layers))
        # Matrices that are not measured here but are pruned already are served through maps too: nothing is written to
        # the model, so nothing has to be restored, and weights on disk need no copy.
        masks = stack.enter_context(shrinking(model, *one.pruned, factor=0.0))
        pruned = ServedWeights(masks, factor=0.0, new_weights=one.new_weights)
        stack.enter_context(instrumented(model, one.pruned[0], pruned, recomputed=layers))
        stack.enter_context(checkpointed(model, layers, folding.recomputing))
        stack.enter_context(one.cache.skipping() if one.cache else nullcontext())
        stack.enter_context(torch.enable_grad())  # the caller may be within `no_grad`
        yield folding


def _differentiated(
    work: Workload, batch: Batch, folding: Folding, is_first: bool, label: str
) -> tuple[Tensor, Tensor | None]:
    """The loss of one batch after its backward pass, detached: its graph is freed before the next batch builds one."""
    loss, terms = (work.loss_fn(work.model, batch), None) if work.loss_fn else summed_loss(work.model, batch)
    # A loss of the user's own may have forgotten the model.
    _check_loss(loss, work.model, is_flat=not folding.was_used and work.loss_fn is None)
    if is_first:  # most bad losses are bad from the start: one synchronisation here can save a whole pass
        _check_finite(loss.detach(), label)
    if loss.grad_fn is not None:
        loss.backward()
    return loss.detach(), terms


def _total_loss(work: Workload, tally: Tally, label: str) -> ProbeLoss:
    # Summed as Python floats: what a snapshot has restored is on the CPU, the rest on the model's device.
    sums = [sum(map(float, values)) for values in (tally.losses, tally.terms)]
    total = work.processes.sum_(torch.tensor(sums, dtype=torch.float64))
    _check_finite(total[0], label)
    return ProbeLoss(float(total[0]), None if work.loss_fn else int(total[1]))


@torch.no_grad()
def observe_inputs(work: Workload, targets: Sequence[Target], statistics: Statistics) -> None:
    """One forward pass that folds the inputs' marginal of every target: `sum_t x_t^2`, `[in]`, all that Wanda needs."""
    model = work.model
    steps = own_steps(model, targets, work.batches, work.processes)
    folding = Folding(statistics, model)
    maps = instrumented(model, targets, ServedWeights(), on_input=folding.fold_inputs)
    device = input_device(model)
    with work.telling(), resharded(model), eval_mode(model), maps, own_draws(device) as draw:
        bar = tqdm(steps, desc="inputs", unit="batch", disable=not work.progress, leave=False)
        for number, (batch, counted) in enumerate(bar):
            draw(number)
            batch = send_to_device(batch, device)
            folding.start_batch(batch, counted)
            forward_only(model, batch)
            batch_done(model, batch)


@torch.no_grad()
def reached_inputs(work: Workload, targets: Sequence[Target]) -> set[str]:
    """Names of the targets that a forward pass over the batches gives an input."""
    model, reached = work.model, set[str]()
    maps = instrumented(model, targets, ServedWeights(), on_input=lambda target, *_: reached.add(target.name))
    device = input_device(model)
    with resharded(model), eval_mode(model), maps, own_draws(device) as draw:
        for number, batch in enumerate(work.batches):
            draw(number)
            forward_only(model, send_to_device(batch, device))
    return reached


def _check_moved(work: Workload, targets: Sequence[Target], moved: bool, total: ProbeLoss, label: str) -> None:
    """Refuse a loss that is flat: all scores would be 0, and the first matrices would go whole."""
    if not int(work.processes.max_(torch.tensor(int(moved)))):
        several = "needs several of them: choose a larger batch_size"
        if go_alone(work.model, targets):
            several = f"has nothing to compare here, since those of a {type(work.model).__name__} go one at a time"
        raise ValueError(
            f"{label}: every gradient of the loss ({total.mean:.4g}) is 0, so nothing tells one weight from another. A "
            f"loss that compares the rows of a batch (CLIP's) {several}. Otherwise look at the labels, or at loss_fn."
        )


def _check_loss(loss: Tensor, model: PreTrainedModel, is_flat: bool) -> None:
    """Args: `is_flat`: whether a batch may have no part in the matrices, as a text without an image in a tower."""
    if not isinstance(loss, Tensor) or loss.ndim != 0 or (loss.grad_fn is None and not is_flat):
        raise ValueError(
            f"the loss of {type(model).__name__} must be a scalar that depends on the matrices to prune, got "
            f"{_described(loss)}; check loss_fn, include, and that the calibration reaches what include names."
        )


def _described(loss: object) -> str:
    if not isinstance(loss, Tensor):
        return type(loss).__name__
    return f"a tensor of shape {tuple(loss.shape)}" + ("" if loss.grad_fn else " that depends on none of them")


def _check_finite(loss: Tensor, label: str) -> None:
    if not torch.isfinite(loss):
        raise ValueError(
            f"the calibration loss is {loss.item()} in {label}. Nothing was changed. Look for NaN in the model's "
            "weights, a dtype that overflows (float16: try bfloat16), or batches without a single label."
        )
