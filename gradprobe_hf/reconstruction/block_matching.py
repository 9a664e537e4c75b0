"""Block matching: a block's kept weights trained, its mask fixed, until it does what the dense block did.

    min over theta of  mean_t ||b(x'_t; theta) - y_t||^2 / ||y_t||^2,   y = (1 - tau) b_dense(x') + tau b_dense(x)

`x'_t` is what the pruned blocks before give the block for token t, x what the dense ones gave. theta are the kept
weights of its matrices and its vectors: the gains of norms, and biases. What a weight update cannot do, because it sees
one matrix at a time, happens here: the matrices of a block make up for each other, through its nonlinearities. So a
block may correct the error of those before it once (tau), where every one of its matrices would have corrected it anew.

An error counts relative to the size of its token's output: the next block begins with a norm, and a few tokens (the
first, mostly) are a hundred times as large as the others.

A step is over whole windows of a fixed number, whatever the batch size; several processes each have their share of
them, and sum their gradients. So they all make the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

from gradprobe_hf.data.batches import Batches, row_count
from gradprobe_hf.model.passes.loss import Batch
from gradprobe_hf.model.passes.patches import eval_mode, frozen, replaced_forward
from gradprobe_hf.model.sites import Site
from gradprobe_hf.model.targets import Target, block_vectors
from gradprobe_hf.probe.maps.attachment import instrumented
from gradprobe_hf.probe.maps.serving import ServedWeights
from gradprobe_hf.probe.padding import BatchLayout
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.updates.refinement import Refinement


@dataclass(frozen=True)
class Example:
    """One batch at one block.

    Attributes:
        arguments: of the block's call in the model as pruned so far, positional and by name.
        target: the output that is aimed at, `[sequences, tokens, hidden]`.
        weight: of each token's squared error, `[sequences, tokens]`: 1 / ||y||^2; 0 for padding, and for a token of
            which the block hands on nothing: next to that any error is without bound.
    """

    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    target: Tensor
    weight: Tensor


@dataclass(frozen=True)
class Matched:
    """How the training of a block went.

    Attributes:
        before: mean relative squared error of a token on the windows that were held out, before it.
        after: the same behind it; never more.
        epochs: that were trained.
        kept: the one whose state was kept; 0: the state before.
    """

    before: float
    after: float
    epochs: int
    kept: int


@dataclass(frozen=True)
class Call:
    """A call of a block: its arguments, positional and by name, and the hidden states that it returned."""

    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    output: Tensor


class BlockExamples:
    """What a block is called with and what it should return, collected batch by batch.

    Args:
        dense_target: the tau of the module's formula.
    """

    def __init__(self, model: PreTrainedModel, block: str, dense_target: float) -> None:
        self.examples: list[Example | None] = []  # None: the block has no part in the batch, a text among images say
        self._model, self._block, self._dense_target = model, block, dense_target
        self._call: Call | None = None  # the latest of this batch
        self._dense: Tensor | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Calls of the block are noted."""
        module = self._model.get_submodule(self._block)
        with replaced_forward(module, partial(self._run, module.forward)):
            yield

    def _run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        self._call = Call((args, kwargs), _hidden(result))
        return result

    def take_dense(self) -> None:
        """What was called since was the dense model's, on the batch that is taken next."""
        self._dense, self._call = None if self._call is None else self._call.output, None

    def take(self, batch: Batch) -> None:
        """What was called since was the model as pruned so far, on this batch; this block itself was dense."""
        call, dense, self._call, self._dense = self._call, self._dense, None, None
        self.examples.append(None if call is None else self._example(batch, call, dense))

    def _example(self, batch: Batch, call: Call, dense: Tensor | None) -> Example:
        target = call.output if dense is None else torch.lerp(call.output, dense, self._dense_target)
        size = _wide(target).square().sum(-1)
        is_something = size > size.mean() * torch.finfo(size.dtype).eps ** 2
        weight = torch.where(is_something, size.reciprocal(), 0)
        layout = BatchLayout.of(batch, self._model)
        mask = layout.token_mask(Site(self._block, "linear"), layout.by_sequence(target, 1, self._block))
        before = next((one.arguments for one in reversed(self.examples) if one is not None), None)
        arguments = tree_map(partial(_shared, _tensors(before)), call.arguments)
        return Example(arguments, target, weight if mask is None else weight * mask.view_as(weight))


@dataclass(frozen=True)
class Matching:
    """What is trained, on what and how.

    Attributes:
        matrices: the block's targets.
        examples: of this process, in the order of its batches; None for one that the block has no part in.
        seed: of the order of the steps.
    """

    model: PreTrainedModel
    block: str
    matrices: Sequence[Target]
    examples: Sequence[Example | None]
    settings: Refinement
    processes: Processes
    seed: int


def in_step_sizes(batches: Batches | Sequence[Batch], settings: Refinement) -> Batches | Sequence[Batch]:
    """The same rows in batches that a step is a whole number of, none larger than it was."""
    if not isinstance(batches, Batches):
        return batches
    largest, windows = max(map(row_count, batches)), _windows_in_step(settings, batches.samples)
    return batches.in_batches_of(math.gcd(windows, 2 ** int(math.log2(largest))))


def _windows_in_step(settings: Refinement, rows: int) -> int:
    """As many as the settings say; of few rows at most half, so that a step can be held out."""
    return settings.windows if rows > settings.windows else max(1, rows // 2)


def match_block(
    task: Matching, values: Mapping[str, Tensor], masks: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor], Matched]:
    """Train a block. The model is left as it was.

    Args:
        values: of each of its matrices, `[out, in]`, zero where they are pruned.
        masks: of the same, bool, True where pruned.

    Returns:
        New values of the matrices; of the vectors, by parameter (none if nothing was gained); and how it went.
    """
    module = task.model.get_submodule(task.block)
    vectors = block_vectors(task.model, task.block)
    start = {**values, **{vector.name: vector.matrix(task.model) for vector in vectors}}
    trainer = _Trainer(task, start, masks)
    served = ServedWeights(new_weights=trainer.weights, trained=True)
    with instrumented(task.model, [*task.matrices, *vectors], served), eval_mode(module), frozen(module):
        matched = trainer.train()
    new = {name: trainer.best[name].to(value.device, value.dtype) for name, value in start.items()}
    return (
        {name: new[name] for name in values},
        {vector.name: new[vector.name] for vector in vectors if matched.kept},
        matched,
    )


class _Trainer:
    """Adam on float32 copies of a block's weights, and the best state that it came by.

    Args:
        start: the values that training begins with, by name; those with a mask are zero where it is True.
    """

    def __init__(self, task: Matching, start: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> None:
        self._task, self._settings = task, task.settings
        self._module = task.model.get_submodule(task.block)
        self._masks = {name: masks[name].to(start[name].device) for name in masks}
        self.weights = {name: _wide(value.detach()).clone().requires_grad_() for name, value in start.items()}
        self.best = self._copy()
        self._scale = self._typical_size()

    def train(self) -> Matched:
        settings = self._settings
        training, held_out = self._split()
        # Adam moves every weight by about the rate, whatever its gradient: so it is a fraction of what weights are.
        groups = [{"params": [w], "lr": settings.rate * self._magnitude(name)} for name, w in self.weights.items()]
        optimizer = torch.optim.Adam(groups, betas=settings.betas)
        rate = partial(_rate, settings.epochs * len(training), settings.last_rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        generator = torch.Generator().manual_seed(self._task.seed)
        before = least = self._error(held_out)
        kept = epoch = 0
        for epoch in range(1, settings.epochs + 1):
            for index in torch.randperm(len(training), generator=generator).tolist():
                self._accumulate_gradients(training[index])
                optimizer.step()
                schedule.step()
            error = self._error(held_out)
            if error < least:
                least, kept, self.best = error, epoch, self._copy()
            elif epoch - kept >= settings.patience:
                break
        return Matched(before, least, epoch, kept)

    def _split(self) -> tuple[list[list[int]], list[list[int]]]:
        """Steps to train on and steps that are held out, the last ones; the same where there is one window.

        Each is a list of batches, by their number among those of all processes, that the block has a part in: a text
        without an image has none in a vision tower.
        """
        processes, examples = self._task.processes, self._task.examples
        rows = [0 if example is None else len(example.target) for example in examples]
        total, windows = processes.sum_(torch.tensor([len(rows), sum(rows)])).tolist()
        largest = int(processes.max_(torch.tensor(max(rows, default=1))))
        size = max(1, _windows_in_step(self._settings, windows) // max(1, largest))
        there = torch.zeros(total)
        there[[number * processes.count + processes.rank for number, count in enumerate(rows) if count]] = 1
        numbers = processes.sum_(there).nonzero().flatten().tolist()
        steps = [numbers[start : start + size] for start in range(0, len(numbers), size)]
        held_out = max(1, round(self._settings.held_out * len(steps)))
        return (steps[:-held_out], steps[-held_out:]) if len(steps) > 1 else (steps, steps)

    def _mine(self, numbers: Sequence[int]) -> list[Example]:
        """This process's among these batches, as `Processes.mine` deals them."""
        rank, count = self._task.processes.rank, self._task.processes.count
        mine = [self._task.examples[number // count] for number in numbers if number % count == rank]
        return [example for example in mine if example is not None]

    def _accumulate_gradients(self, numbers: Sequence[int]) -> None:
        """Those of a step, over all processes: sums over tokens, because Adam does not mind their scale."""
        for weight in self.weights.values():
            weight.grad = torch.zeros_like(weight)  # not None: every process has to join in every collective
        for example in self._mine(numbers):
            (self._scale * self._loss(example)).backward()
        for name, weight in self.weights.items():
            assert weight.grad is not None, "it was set"
            self._task.processes.sum_(weight.grad)
            if name in self._masks:
                weight.grad.masked_fill_(self._masks[name], 0)  # moments and weight stay exactly zero

    def _loss(self, example: Example) -> Tensor:
        """The summed relative error of a batch."""
        args, kwargs = example.arguments
        output = _hidden(self._module(*args, **kwargs))
        return ((_wide(output) - _wide(example.target)).square().sum(-1) * example.weight).sum()

    @torch.no_grad()
    def _error(self, steps: Sequence[Sequence[int]]) -> float:
        """The mean of a token, the same in all processes."""
        examples = [example for numbers in steps for example in self._mine(numbers)]
        sums = [(self._loss(example).double(), (example.weight > 0).sum().double()) for example in examples]
        own = [sum(float(pair[part]) for pair in sums) for part in (0, 1)]
        error, tokens = self._task.processes.sum_(torch.tensor(own, dtype=torch.float64)).tolist()
        return error / max(tokens, 1.0)

    def _typical_size(self) -> float:
        """||y||^2 of a token, the same in all processes.

        Errors are multiplied by it where they are differentiated: relative ones are so small that their gradients would
        vanish in the activations of a float16 model.
        """
        weights = [example.weight for example in self._task.examples if example is not None]
        pairs = [(weight.sum(), (weight > 0).sum()) for weight in weights]
        own = torch.tensor([sum(float(pair[part]) for pair in pairs) for part in (0, 1)], dtype=torch.float64)
        inverses, tokens = self._task.processes.sum_(own).tolist()
        return tokens / inverses if inverses else 1.0

    def _magnitude(self, name: str) -> float:
        """The root mean square of what is kept of a weight; 1 of one that is zero, a bias say."""
        kept = self.weights[name].numel() - (int(self._masks[name].sum()) if name in self._masks else 0)
        return float(self.weights[name].detach().square().sum().div(max(1, kept)).sqrt()) or 1.0

    def _copy(self) -> dict[str, Tensor]:
        return {name: weight.detach().clone() for name, weight in self.weights.items()}


def _rate(steps: int, last: float, step: int) -> float:
    """What the rates are multiplied by: a cosine from 1 to `last`, behind a short warm-up."""
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    return last + (1 - last) * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def _wide(values: Tensor) -> Tensor:
    """In float32 (float64 of a float64 model): errors are much smaller than the outputs they are differences of."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _hidden(output: Any) -> Tensor:
    """What a block hands on: alone, or before the attention weights that some return with it."""
    return output if isinstance(output, Tensor) else output[0]


def _tensors(arguments: Any) -> list[Tensor]:
    return [value for value in tree_leaves(arguments) if isinstance(value, Tensor)]


def _shared(known: Sequence[Tensor], value: Any) -> Any:
    """A known tensor that is equal, in place of this one: masks and rotary embeddings are those of every batch."""
    if isinstance(value, Tensor):
        for other in known:
            if other.shape == value.shape and other.dtype == value.dtype and torch.equal(other, value):
                return other
    return value
