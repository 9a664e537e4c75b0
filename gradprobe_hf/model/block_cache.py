"""Blocks: the transformer blocks of a model one after the other, each on what the blocks before it have left.

A pass that is about a later block need not compute the earlier ones again. `BlockOutputCache` keeps, for every batch, what the
last finished block of each stack returned; while it is `skipping`, finished blocks return that at once, and the model's
own forward does all the rest. So embeddings, attention masks, positions, head and loss stay the model's own business,
whatever its family. A stack is an `nn.ModuleList` of blocks: a decoder has one, an encoder-decoder two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import nn
from transformers import PreTrainedModel

from gradprobe_hf.model.families import stack_of
from gradprobe_hf.model.loss import Batch, forward_only
from gradprobe_hf.model.parameters import input_device
from gradprobe_hf.model.patches import eval_mode, put_back
from gradprobe_hf.model.targets import Target


class _Reached(Exception):  # noqa: N818 - it is no error
    """The pass has come to the end of the block it is about."""


class BlockOutputCache:
    """The finished blocks, and where each batch has come to behind them.

    What is kept is `[sequences, tokens, hidden]` for every batch and stack, on the device of its block.

    Args:
        batches: this process's share, in the order in which they are started.
        blocks: how many there are, finished or not.
    """

    def __init__(self, model: PreTrainedModel, batches: Sequence[Batch], blocks: int) -> None:
        self.model, self.batches, self.blocks = model, batches, blocks
        self.finished: list[str] = []
        self._left: list[dict[str, Any]] = [{} for _ in batches]
        self._current: dict[str, Any] = {}

    @property
    def steps(self) -> list[tuple[Batch, bool]]:
        """The batches, each of which counts."""
        return [(batch, True) for batch in self.batches]

    @property
    def share(self) -> float:
        """Of the model, that is finished."""
        return len(self.finished) / self.blocks

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Finished blocks return what they have left of the batch that was started."""
        with ExitStack() as undo:
            for name in self.finished:
                _replace_forward(self.model.get_submodule(name), partial(self._left_by, stack_of(name)), undo)
            yield

    def _left_by(self, stack: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002 - what a block is called with
        return self._current[stack]

    def start_batch(self, number: int) -> None:
        self._current = self._left[number]

    def run(self, number: int, last: str, before_batch: Callable[[Batch], None]) -> dict[str, Any]:
        """One batch, from the finished blocks to the end of block `last`: for what is attached to the blocks.

        Returns what is left of it there, for `finish`.
        """
        with self._running({last}, last) as found:
            self._pass(number, before_batch)
        return self._current | {stack_of(last): found[last]}

    def advance(self, blocks: Sequence[str]) -> None:
        """Finish these blocks, the next in their order, as they are served now."""
        ends = {stack_of(name): name for name in blocks}
        left: list[dict[str, Any]] = []
        with self._running(set(ends.values()), blocks[-1]) as found:
            for number in range(len(self.batches)):
                self._pass(number)
                left.append(self._current | {stack_of(name): found[name] for name in found})
        self.finish(blocks, left)

    def finish(self, blocks: Sequence[str], left: list[dict[str, Any]]) -> None:
        """These blocks are finished, and have left this of each batch."""
        self._left = left
        self.finished += blocks

    def _pass(self, number: int, before_batch: Callable[[Batch], None] = lambda batch: None) -> None:  # noqa: ARG005
        batch = send_to_device(self.batches[number], input_device(self.model))
        self.start_batch(number)
        before_batch(batch)
        with suppress(_Reached):
            forward_only(self.model, batch)

    @contextmanager
    def _running(self, ends: set[str], last: str) -> Iterator[dict[str, Any]]:
        """Keep what the blocks `ends` return, and stop behind block `last`."""
        found: dict[str, Any] = {}

        def forward(name: str, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            found[name] = own(*args, **kwargs)
            if name == last:
                raise _Reached
            return found[name]

        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(eval_mode(self.model))
            stack.enter_context(self.skipping())
            for name in ends:
                module = self.model.get_submodule(name)
                _replace_forward(module, partial(forward, name, module.forward), stack)
            yield found


def blocks_in_order(model: PreTrainedModel, targets: Sequence[Target], batch: Batch) -> list[str]:
    """The blocks that hold targets, in the order in which a pass runs them.

    Raises:
        ValueError: a block that a pass runs never or more than once.
    """
    wanted = list(dict.fromkeys(target.block for target in targets))
    ran: list[str] = []
    with ExitStack() as undo:
        for name in wanted:
            undo.callback(model.get_submodule(name).register_forward_pre_hook(partial(_note, ran, name)).remove)
        undo.enter_context(torch.no_grad())
        undo.enter_context(eval_mode(model))
        forward_only(model, send_to_device(batch, input_device(model)))
    for name in wanted:
        if ran.count(name) != 1:
            raise ValueError(
                f"{name} runs {ran.count(name)} times in a forward pass: its blocks cannot be worked on one after the "
                "other. Use order='joint' without reconstruction."
            )
    return ran


def _note(ran: list[str], name: str, module: nn.Module, args: Any) -> None:  # noqa: ARG001 - what a hook is called with
    ran.append(name)


def _replace_forward(module: nn.Module, forward: Callable[..., Any], undo: ExitStack) -> None:
    undo.callback(put_back, module, "forward", module.__dict__.get("forward"))
    module.__dict__["forward"] = forward
