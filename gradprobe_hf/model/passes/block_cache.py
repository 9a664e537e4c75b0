"""The block output cache: passes that start behind the blocks that are finished.

A pass for a later block need not compute the earlier ones again. `BlockOutputCache` stores, for every batch, the output
of the last finished block of each stack. While it is `skipping`, finished blocks return that output at once, and the
model's own forward does the rest: embeddings, attention masks, positions, head and loss need no code here, whatever the
model's family. A stack is an `nn.ModuleList` of blocks: a decoder has one, an encoder-decoder two.

Some models read more than the end of a stack: SegFormer's head the output of every stage, LLaVA's projector one from
the middle of the vision tower. `BlockSequence.of` finds these blocks, and their outputs are stored, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

from gradprobe_hf.model.families import stack_of
from gradprobe_hf.model.fsdp import forget_pass
from gradprobe_hf.model.parameters import input_device
from gradprobe_hf.model.passes.loss import Batch, forward_only
from gradprobe_hf.model.passes.patches import eval_mode, frozen, own_draws, replace_forward
from gradprobe_hf.model.targets import Target


@dataclass(frozen=True)
class BlockSequence:
    """The blocks that hold targets.

    Attributes:
        names: in the order in which a forward pass runs them.
        read_later: those whose output is read when another block of their stack has already run, or by the head though
            they are not the last of their stack.
    """

    names: tuple[str, ...]
    read_later: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: PreTrainedModel, targets: Sequence[Target], batch: Batch) -> BlockSequence:
        """What one pass over a batch shows.

        Raises:
            ValueError: a block that does not run exactly once.
        """
        wanted = list(dict.fromkeys(target.block for target in targets))
        trace = _Trace()
        with ExitStack() as undo:
            undo.enter_context(eval_mode(model))
            undo.enter_context(frozen(model))
            for name in wanted:
                module = model.get_submodule(name)
                replace_forward(module, partial(trace.run, name, module.forward), undo)
            undo.enter_context(torch.enable_grad())  # not for gradients: the graph tells who reads what
            device = input_device(model)
            undo.enter_context(own_draws(device))(0)
            trace.read(forward_only(model, send_to_device(batch, device)))
        for name in wanted:
            if trace.ran.count(name) != 1:
                raise ValueError(
                    f"{name} runs {trace.ran.count(name)} times in a forward pass, so the blocks cannot be pruned one "
                    f"after the other. Leave its matrices out, exclude=['{name.rpartition('.')[0]}.*'], or use "
                    "order='joint' and update='none'."
                )
        return cls(tuple(trace.ran), frozenset(trace.read_later))


class _Trace:
    """Which blocks run, and which outputs are read later than the cache would have them.

    Every output is marked in autograd's graph, and what reads it is found with the mark behind it.
    """

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.read_later: set[str] = set()
        self._latest: dict[str, str] = {}  # stack -> the block of it that has run last

    def run(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A block's forward."""
        self.read((args, kwargs))
        self.ran.append(name)
        self._latest[stack_of(name)] = name
        with torch.no_grad():
            output = original(*args, **kwargs)
        return tree_map(partial(_marked, name), output)

    def read(self, values: Any) -> None:
        for value in tree_leaves(values):
            if isinstance(value, Tensor) and value.grad_fn is not None:
                for name in _marks_behind(value):
                    if self._latest[stack_of(name)] != name:
                        self.read_later.add(name)


class _Mark(torch.autograd.Function):
    """The identity; its node in the graph has the name of a block."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, name: str) -> Tensor:
        ctx.block = name
        return output.clone()  # a tensor of its own: some models add to a block's output in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:  # noqa: ARG004 - autograd's signature
        raise AssertionError("no gradient is asked for")


def _marked(name: str, output: Any) -> Any:
    if not isinstance(output, Tensor) or not output.is_floating_point():
        return output
    return _Mark.apply(output.detach().requires_grad_(), name)


def _marks_behind(value: Tensor) -> set[str]:
    """The blocks whose output a tensor was made of, not by way of another block."""
    found, seen, nodes = set(), set(), [value.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "block"):
            found.add(node.block)
        nodes += [before for before, _ in node.next_functions]
    return found


class _StopForward(Exception):  # noqa: N818 - it is no error
    """Ends a forward behind the last block that is needed."""


class BlockOutputCache:
    """Outputs of the last finished block of each stack: `[sequences, tokens, hidden]` for every batch.

    Args:
        batches: this process's own, in the order in which they are started.
        blocks: the ones that the model has, finished or not.
    """

    def __init__(self, model: PreTrainedModel, batches: Sequence[Batch], blocks: BlockSequence) -> None:
        self.model, self.batches, self.blocks = model, batches, blocks
        self.finished: list[str] = []
        # Of each batch, stack -> output, and block -> output for those that are read later.
        self._outputs: list[dict[str, Any]] = [{} for _ in batches]
        self._current: dict[str, Any] = {}  # of the batch that was started

    @property
    def steps(self) -> list[tuple[Batch, bool]]:
        """The batches, each of which counts, as `own_steps` gives them."""
        return [(batch, True) for batch in self.batches]

    @property
    def share(self) -> float:
        """The fraction of the blocks that are finished."""
        return len(self.finished) / len(self.blocks.names)

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Finished blocks return their stored outputs of the batch that was started."""
        # All but the last of a stack could return anything: the last one ignores what it is called with.
        with ExitStack() as undo:
            for name in self.finished:
                replace_forward(self.model.get_submodule(name), partial(self._output_of, name), undo)
            yield

    def _output_of(self, name: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002 - a block's arguments
        return self._current[name if name in self._current else stack_of(name)]

    def start_batch(self, number: int) -> None:
        self._current = self._outputs[number]

    def run(self, number: int, last: str) -> dict[str, Any]:
        """Run one batch from the finished blocks to the end of block `last`, for the maps attached between them.

        Returns:
            Its outputs there, for `finish`.
        """
        with self._capturing({last}, last) as outputs:
            self._forward(number)
        return self._stored(outputs)

    def advance(self, blocks: Sequence[str]) -> None:
        """Finish these blocks, the next in their order: store their outputs under the weights that are served now."""
        ends = {stack_of(name): name for name in blocks}  # the last block of each stack
        outputs: list[dict[str, Any]] = []
        with self._capturing({*ends.values(), *self.blocks.read_later.intersection(blocks)}, blocks[-1]) as captured:
            for number in range(len(self.batches)):
                captured.clear()  # not every batch runs every block: a text without an image has no vision tower
                self._forward(number)
                outputs.append(self._stored(captured))
        self.finish(blocks, outputs)

    def _stored(self, captured: dict[str, Any]) -> dict[str, Any]:
        """What is stored of a batch, given the outputs of its latest pass in the order in which they were made."""
        latest = {stack_of(name): output for name, output in captured.items()}
        return self._current | latest | {name: captured[name] for name in captured if name in self.blocks.read_later}

    def finish(self, blocks: Sequence[str], outputs: list[dict[str, Any]]) -> None:
        """Finish these blocks, given the outputs of each batch (as `run` returns them)."""
        self._outputs = outputs
        self.finished += blocks

    def _forward(self, number: int) -> None:
        device = input_device(self.model)
        batch = send_to_device(self.batches[number], device)
        self.start_batch(number)
        with own_draws(device) as draw:
            draw(number)
            try:
                forward_only(self.model, batch)
            except _StopForward:
                forget_pass(self.model)

    @contextmanager
    def _capturing(self, ends: set[str], last: str) -> Iterator[dict[str, Any]]:
        """Yield the outputs of the blocks `ends` in the latest pass; passes stop behind block `last`."""
        outputs: dict[str, Any] = {}

        def forward(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            outputs[name] = original(*args, **kwargs)
            if name == last:  # the head, and its logits over the vocabulary, are not needed
                raise _StopForward
            return outputs[name]

        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(eval_mode(self.model))
            stack.enter_context(self.skipping())
            for name in ends:
                module = self.model.get_submodule(name)
                replace_forward(module, partial(forward, name, module.forward), stack)
            yield outputs
