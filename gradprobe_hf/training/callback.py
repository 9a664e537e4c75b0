"""The callback: something that looks at gradients before an optimizer step, or at weights after it.

One class for both worlds. A `Trainer` calls it through its events; any other loop has it `attached` to its optimizer.
Steps are optimizer steps, counted from 1; a resumed run goes on counting.

A Trainer that fails tells its callbacks nothing. So hooks on a model are there only from the beginning of a pass until
its graph is gone: a forward pass that raises takes them away, and whatever raises after it takes the graph along, and
the graph the hooks. As a context manager around `trainer.train()` the callback takes them away even where somebody
holds on to the error.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

logger = logging.getLogger(__name__)

# Which callbacks run on which optimizer, so that two that contradict each other find out.
_running: weakref.WeakKeyDictionary[Optimizer, weakref.WeakSet[StepCallback]] = weakref.WeakKeyDictionary()


class StepCallback(TrainerCallback):
    """The base of the package's callbacks; a subclass overrides what it needs of `begin` to `restore`.

    Attributes:
        model: the model that trains, out of any wrapper.
        optimizer: torch's own, out of Accelerate's wrapper.
        step: optimizer steps taken.
    """

    decides_zeros = False  # whether it says which weights are zero: no two such callbacks at once

    model: nn.Module
    optimizer: Optimizer

    def __init__(self) -> None:
        self.step = 0
        self._handles: list[RemovableHandle] = []
        weakref.finalize(self, _remove, self._handles).atexit = False
        self._graphs: list[None] = []  # one entry for each graph of a forward pass that is alive

    def begin(self) -> None:
        """Training begins; `model`, `optimizer` and `step` are set. Raises what makes it impossible."""

    def watch(self) -> list[RemovableHandle]:
        """Put up what has to see gradients as they are made."""
        return []

    def before_step(self) -> None:
        """The gradients are complete (and clipped); `step` is the number of this step."""

    def after_step(self) -> None:
        """The optimizer has taken step number `step`."""

    def end(self) -> None:
        """Training ended; a Trainer may have loaded the best model since."""

    def save(self, folder: Path) -> None:
        """Keep in the folder of a checkpoint what `restore` needs."""

    def restore(self, folder: Path) -> None:
        """Go on from a checkpoint; called after `begin`. Files may be missing: it was trained without this callback."""

    def start(self, model: nn.Module, optimizer: Any, step: int = 0) -> None:
        """Everything that is true of every callback when training begins."""
        self.close()  # of an earlier run that failed
        _check(self, model, optimizer)
        self.model = extract_model_from_parallel(model, keep_torch_compile=False)
        self.optimizer, self.step = getattr(optimizer, "optimizer", optimizer), step
        running = _running.setdefault(self.optimizer, weakref.WeakSet())
        for other in running if self.decides_zeros else ():
            if other is not self and other.decides_zeros:
                raise ValueError(
                    f"{type(self).__name__} and {type(other).__name__} both say which weights are zero: one keeps its "
                    "masks as they are, the other would change them. Use one at a time; StatePruningCallback keeps its "
                    "mask by itself after end_step."
                )
        self.begin()
        running.add(self)

    def open(self) -> None:
        """Watch gradients until `close`."""
        if not self._handles:
            self._handles += self.watch()

    def close(self) -> None:
        """Leave no hook behind. Called at the right times; harmless at any other."""
        _remove(self._handles)

    def _open_for_a_pass(self, args: TrainingArguments) -> None:
        self.open()
        if self._handles and not args.torch_compile:  # which would compile this hook too, at every step
            self._handles.append(self.model.register_forward_hook(self._bind_to_graph, always_call=True))

    def _bind_to_graph(self, _module: nn.Module, _arguments: Any, output: Any) -> None:
        """A forward hook: the hooks are gone when the last graph of this step is.

        Torch calls it even for a pass that raised, from where it caught the exception.
        """
        if sys.exc_info()[0] is not None:
            self.close()
            return
        values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else [output]
        nodes = [value.grad_fn for value in values if isinstance(value, Tensor) and value.grad_fn is not None]
        if nodes:
            life, metadata = _Life(), cast(dict[str, Any], nodes[0].metadata)  # torch's stubs take it for a method
            metadata["gradprobe_hf"] = life
            self._graphs.append(None)
            weakref.finalize(life, _graph_gone, self._graphs, self._handles).atexit = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.finish()

    def finish(self) -> None:
        """Training is over, one way or another."""
        self.close()
        for running in _running.values():
            running.discard(self)

    # The events of a Trainer, in the order of a training run.

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.start(kwargs["model"], kwargs["optimizer"], state.global_step)
        if state.global_step:
            self.restore(_checkpoint(args, state))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._open_for_a_pass(args)

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._open_for_a_pass(args)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.close()
        self.step = state.global_step + 1
        self.before_step()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.after_step()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        folder = _checkpoint(args, state)
        if folder.is_dir():
            self.save(folder)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.end()
        self.finish()


@contextmanager
def attached(callback: StepCallback, model: nn.Module, optimizer: Any, step: int = 0) -> Iterator[StepCallback]:
    """Run a callback in a training loop of one's own: `loss.backward(); optimizer.step()` inside of the `with`.

    Args:
        model: as it trains, wrapped or not.
        optimizer: torch's, or what `accelerator.prepare` made of it.
        step: optimizer steps taken before, of a resumed run.

    Example:
        >>> import torch
        >>> class Counting(StepCallback):
        ...     def after_step(self): print("step", self.step)
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with attached(Counting(), model, optimizer):
        ...     model(torch.ones(2)).sum().backward()
        ...     optimizer.step()
        step 1
    """
    callback.start(model, optimizer, step)

    def before(*_: Any) -> None:
        callback.step += 1
        callback.before_step()

    def after(*_: Any) -> None:
        callback.after_step()
        callback.open()  # it may have something to watch from now on

    callback.open()
    hooks = [callback.optimizer.register_step_pre_hook(before), callback.optimizer.register_step_post_hook(after)]
    try:
        yield callback
        callback.end()
    finally:
        for hook in hooks:
            hook.remove()
        callback.finish()


class _Life:
    """Something that lives as long as what holds it."""


def _graph_gone(graphs: list[None], handles: list[RemovableHandle]) -> None:
    graphs.pop()
    if not graphs:
        _remove(handles)


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    """Where a Trainer keeps its checkpoint of this step."""
    return Path(args.output_dir or ".") / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _check(callback: StepCallback, model: nn.Module, optimizer: Any) -> None:
    name = type(callback).__name__
    if "DeepSpeed" in type(optimizer).__name__ or any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ValueError(
            f"{name} cannot work under DeepSpeed, which steps inside of backward and keeps weights and their state in "
            "flat partitions of its own. Use FSDP2 (examples/accelerate_fsdp2.yaml) or DDP."
        )
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ValueError(f"{name} needs weights with a shape, which FSDP1 flattens. Set fsdp_version: 2.")
    if not isinstance(getattr(optimizer, "optimizer", optimizer), Optimizer):
        raise TypeError(f"{name} needs a torch.optim.Optimizer, not {type(optimizer).__name__}.")
