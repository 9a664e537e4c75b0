"""The block output cache: passes that start behind the blocks that are finished.

A pass for a later block need not compute the earlier ones again. `BlockOutputCache` stores, for every batch, the output
of the last finished block of each stack. While it is `skipping`, finished blocks return that output at once, and the
model's own forward does the rest: embeddings, attention masks, positions, head and loss need no code here, whatever the
model's family. A stack is an `nn.ModuleList` of blocks: a decoder has one, an encoder-decoder two.
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
from gradprobe_hf.model.patches import eval_mode, restore_slot
from gradprobe_hf.model.targets import Target


class _StopForward(Exception):  # noqa: N818 - it is no error
    """Ends a forward behind the last block that is needed."""


class BlockOutputCache:
    """Outputs of the last finished block of each stack: `[sequences, tokens, hidden]` for every batch.

    Args:
        batches: this process's own, in the order in which they are started.
        blocks: how many the model has, finished or not.
    """

    def __init__(self, model: PreTrainedModel, batches: Sequence[Batch], blocks: int) -> None:
        self.model, self.batches, self.blocks = model, batches, blocks
        self.finished: list[str] = []
        self._outputs: list[dict[str, Any]] = [{} for _ in batches]  # of each batch, stack -> output
        self._current: dict[str, Any] = {}  # of the batch that was started

    @property
    def steps(self) -> list[tuple[Batch, bool]]:
        """The batches, each of which counts, as `own_steps` gives them."""
        return [(batch, True) for batch in self.batches]

    @property
    def share(self) -> float:
        """The fraction of the blocks that are finished."""
        return len(self.finished) / self.blocks

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Finished blocks return their stored outputs of the batch that was started."""
        # All but the last of a stack could return anything: the last one ignores what it is called with.
        with ExitStack() as undo:
            for name in self.finished:
                _replace_forward(self.model.get_submodule(name), partial(self._output_of, stack_of(name)), undo)
            yield

    def _output_of(self, stack: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002 - a block's arguments
        return self._current[stack]

    def start_batch(self, number: int) -> None:
        self._current = self._outputs[number]

    def run(self, number: int, last: str, before_batch: Callable[[Batch], None]) -> dict[str, Any]:
        """Run one batch from the finished blocks to the end of block `last`, for the maps attached between them.

        Returns:
            Its outputs there, for `finish`.
        """
        with self._capturing({last}, last) as outputs:
            self._forward(number, before_batch)
        return self._current | {stack_of(last): outputs[last]}

    def advance(self, blocks: Sequence[str]) -> None:
        """Finish these blocks, the next in their order: store their outputs under the weights that are served now."""
        ends = {stack_of(name): name for name in blocks}  # the last block of each stack
        outputs: list[dict[str, Any]] = []
        with self._capturing(set(ends.values()), blocks[-1]) as captured:
            for number in range(len(self.batches)):
                self._forward(number)
                outputs.append(self._current | {stack_of(name): captured[name] for name in captured})
        self.finish(blocks, outputs)

    def finish(self, blocks: Sequence[str], outputs: list[dict[str, Any]]) -> None:
        """Finish these blocks, given the outputs of each batch (as `run` returns them)."""
        self._outputs = outputs
        self.finished += blocks

    def _forward(self, number: int, before_batch: Callable[[Batch], None] = lambda batch: None) -> None:  # noqa: ARG005
        batch = send_to_device(self.batches[number], input_device(self.model))
        self.start_batch(number)
        before_batch(batch)
        with suppress(_StopForward):
            forward_only(self.model, batch)

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
                _replace_forward(module, partial(forward, name, module.forward), stack)
            yield outputs


def blocks_in_order(model: PreTrainedModel, targets: Sequence[Target], batch: Batch) -> list[str]:
    """The blocks that hold targets, in the order in which a forward pass runs them.

    Raises:
        ValueError: a block that does not run exactly once.
    """
    wanted = list(dict.fromkeys(target.block for target in targets))
    ran: list[str] = []
    with ExitStack() as undo:
        for name in wanted:
            hook = partial(_record, ran, name)
            undo.callback(model.get_submodule(name).register_forward_pre_hook(hook).remove)
        undo.enter_context(torch.no_grad())
        undo.enter_context(eval_mode(model))
        forward_only(model, send_to_device(batch, input_device(model)))
    for name in wanted:
        if ran.count(name) != 1:
            raise ValueError(
                f"{name} runs {ran.count(name)} times in a forward pass, so the blocks cannot be pruned one after the "
                "other. Use order='joint' and update='none'."
            )
    return ran


def _record(ran: list[str], name: str, module: nn.Module, args: Any) -> None:  # noqa: ARG001 - a hook's arguments
    ran.append(name)


def _replace_forward(module: nn.Module, forward: Callable[..., Any], undo: ExitStack) -> None:
    # `forward`, not `_old_forward`: a finished block of an offloaded model does not even load its weights.
    undo.callback(restore_slot, module, "forward", module.__dict__.get("forward"))
    module.__dict__["forward"] = forward
