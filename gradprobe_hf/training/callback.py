"""Callbacks: code that sees gradients before an optimizer step, and weights after it.

One class for both worlds: a `Trainer` calls it through its events, any other loop has it `attached` to its optimizer.
Steps are optimizer steps, counted from 1; a resumed run goes on counting.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from gradprobe_hf.training.pass_hooks import PassHooks

logger = logging.getLogger(__name__)

# Which callbacks run on which optimizer, which is all that two callbacks that contradict each other have in common.
# Weak on both sides: an entry keeps alive neither a callback nor an optimizer, whose state is twice the model.
_running: weakref.WeakKeyDictionary[Optimizer, weakref.WeakSet[StepCallback]] = weakref.WeakKeyDictionary()


class StepCallback(TrainerCallback):
    """Base of the package's callbacks. A subclass overrides what it needs of the methods from `begin` to `restore`.

    With a `Trainer` pass it in `callbacks=[...]`; in a loop of your own use `attached`. As a context manager around
    `trainer.train()` it removes its hooks even while the error of a failed run is kept.

    Attributes:
        model: the model in training, without wrappers (DDP, `torch.compile`).
        optimizer: torch's optimizer, without Accelerate's wrapper; the first of several.
        optimizers: all of them.
        stepped: in `after_step` of `attached`, which of them has taken one; else None.
        step: steps that the first optimizer has taken; in `before_step` and `after_step` the number of this step.

    Example:
        >>> class LargestGradient(StepCallback):
        ...     def before_step(self):
        ...         self.largest = max(float(p.grad.abs().max()) for p in self.model.parameters())
    """

    decides_zeros = False  # whether it chooses which weights are zero: at most one such callback can run
    leaves_out_gradients = False  # whether it drops gradients before the optimizer steps
    remembers = False  # whether a run that goes on needs what the one before has saved
    takes_several = False  # whether it can work with several optimizers of one model, each with a part of it

    model: nn.Module
    optimizer: Optimizer
    optimizers: tuple[Optimizer, ...]
    stepped: Optimizer | None = None

    def __init__(self) -> None:
        self.step = 0
        self._hooks = PassHooks()
        # A callback that is dropped takes its hooks along. Not at exit: the model goes with the interpreter.
        weakref.finalize(self, self._hooks.remove).atexit = False

    def begin(self) -> None:
        """Training begins: `model`, `optimizer` and `step` are set. Raise here what cannot work."""

    def gradient_hooks(self) -> list[RemovableHandle]:
        """Register hooks that have to see gradients as backward makes them, and return their handles."""
        return []

    def before_step(self) -> None:
        """Gradients are complete and clipped; the optimizer takes step number `step` next."""

    def after_step(self) -> None:
        """The optimizer has taken step number `step`."""

    def end(self) -> None:
        """Training ended without an error; a Trainer may have loaded the best model before this."""

    def save(self, folder: Path) -> None:
        """Write what `restore` needs into the folder of a checkpoint."""

    def restore(self, folder: Path) -> None:
        """Read what `save` wrote; called after `begin`. Nothing is there if that run had no such callback."""

    def start(self, model: nn.Module, optimizer: Any, step: int = 0) -> None:
        """Check what no callback can work with, and call `begin`.

        Args:
            model: as it trains, wrapped or not.
            optimizer: torch's, or Accelerate's around it; a list where several train the model.
            step: optimizer steps taken before.

        Raises:
            ValueError: DeepSpeed, FSDP1, nothing that trains, or another running callback that chooses zeros.
            TypeError: not an optimizer, or several for a callback that reads one.
        """
        self.remove_hooks()  # of an earlier run that failed
        optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        _check_supported(self, model, optimizers)
        self.model = extract_model_from_parallel(model, keep_torch_compile=False)
        self.optimizers = tuple(_unwrapped(one) for one in optimizers)
        self.optimizer, self.step = self.optimizers[0], step
        for one in self.optimizers:
            self._check_only_one_decides(_running.setdefault(one, weakref.WeakSet()))
        self.begin()
        for one in self.optimizers:
            _running[one].add(self)

    def add_hooks(self) -> None:
        """Register `gradient_hooks` until `remove_hooks`. Does nothing if they are registered."""
        if not self._hooks:
            self._hooks.add(self.gradient_hooks())

    def remove_hooks(self) -> None:
        """Leave no hook on the model. Harmless at any time."""
        self._hooks.remove()

    def finish(self) -> None:
        """Training is over, with or without an error."""
        self.remove_hooks()
        for running in _running.values():
            running.discard(self)

    def check_optimized(self, names: Iterable[str], remedy: str) -> None:
        """Raise ValueError where one of these parameters trains, and in none of the optimizers that this one sees."""
        held = {id(one) for optimizer in self.optimizers for one in parameters_of(optimizer)}
        for name in names:
            parameter = self.model.get_parameter(name)
            if parameter.requires_grad and id(parameter) not in held:
                raise ValueError(f"{type(self).__name__}: {name} is in no optimizer that was passed. {remedy}")

    def tell_of_rounding(self, names: Iterable[str]) -> None:
        """Warn where one of these parameters trains in half precision: at usual rates steps are less than its spacing.

        What other optimizers do is not known: some keep a copy in float32, or round at random.
        """
        dtypes = {one.dtype for one in map(self.model.get_parameter, names) if one.requires_grad and one.itemsize < 4}
        if dtypes and all(type(one).__module__.startswith("torch.optim") for one in self.optimizers):
            found = str(min(dtypes, key=str)).removeprefix("torch.")
            logger.warning(
                "the weights train in %s, which rounds nearly all of a step away where the learning rate is a usual "
                "one, 5e-5 say. Load the model with dtype='float32' to train it: bf16=True of TrainingArguments still "
                "computes in bfloat16",
                found,
            )

    def _check_only_one_decides(self, running: weakref.WeakSet[StepCallback]) -> None:
        """Refuse a second callback that chooses zeros. Others of the same optimizer work side by side."""
        for other in running if self.decides_zeros else ():
            if other is not self and other.decides_zeros:
                raise ValueError(
                    f"{type(self).__name__} and {type(other).__name__} both say which weights are zero: one keeps its "
                    "masks as they are, the other would change them. Use one at a time; StatePruningCallback keeps its "
                    "mask by itself after end_step. One whose run was interrupted is in the way until its finish() is "
                    "called."
                )

    def _add_hooks_for_pass(self, args: TrainingArguments) -> None:
        if self._hooks:  # already there: a graph of this step is alive and has them removed
            return
        self.add_hooks()
        # torch.compile compiles forward hooks with the model: one that comes and goes is compiled at every step. There,
        # hooks go when the gradients are clipped or, if a step fails, at the end of the `with`.
        if self._hooks and not args.torch_compile:
            self._hooks.remove_after_pass(self.model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.finish()

    # The events of a Trainer, in the order of a training run. Hooks are on the model from the beginning of a pass until
    # its gradients are clipped; `on_substep_end` lies between two passes of one accumulated step.

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.start(kwargs["model"], kwargs["optimizer"], state.global_step)
        if state.global_step:
            self.restore(_checkpoint(args, state))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._add_hooks_for_pass(args)

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._add_hooks_for_pass(args)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.remove_hooks()
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
        elif state.is_hyper_param_search and state.is_world_process_zero:
            logger.warning(
                "%s saves nothing in a search for hyperparameters, whose checkpoints are in folders of their trials: "
                "a trial that is resumed begins anew with it",
                type(self).__name__,
            )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.end()
        self.finish()


@contextmanager
def attached(
    callback: StepCallback, model: nn.Module, optimizer: Any, step: int = 0, checkpoint: str | Path | None = None
) -> Iterator[StepCallback]:
    """Run a callback in a training loop of your own: `loss.backward(); optimizer.step()` in the body of the `with`.

    Args:
        callback: any callback of this package, or a subclass of `StepCallback`.
        model: as it trains, wrapped or not.
        optimizer: torch's, or what `accelerator.prepare` made of it; a list of them for `SparsityCallback`, where each
            trains a part of the model.
        step: optimizer steps taken before, for a resumed run.
        checkpoint: the folder that the run before has saved into, with `callback.save(folder)` inside of its `with`.

    Yields:
        The callback, after its `begin`. Hooks are gone when the `with` ends, also by an error.

    Raises:
        ValueError: what the callback cannot work with; see its class. A checkpoint without a step, or of another run.

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
    if not isinstance(callback, StepCallback):
        raise TypeError(f"callback must be a StepCallback, got {type(callback).__name__}.")
    if checkpoint is not None and not step:
        raise ValueError(
            f"checkpoint={str(checkpoint)!r} is that of a run that goes on: say how many steps it took (step)."
        )
    callback.start(model, optimizer, step)
    if checkpoint is not None:
        try:
            callback.restore(Path(checkpoint))
        except BaseException:
            callback.finish()
            raise
    elif step and callback.remembers:
        logger.warning(
            "%s goes on at step %d and knows nothing of the steps before: call its save(folder) with each checkpoint, "
            "and pass checkpoint=folder to attached",
            type(callback).__name__,
            step,
        )
    left_out: set[Optimizer] = set()  # of the step that is under way: to ask again would wait for the device again

    def before(stepping: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _leaves_out(stepping):
            left_out.add(stepping)
            return None
        callback.step += stepping is callback.optimizer
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first of them is the optimizer
        if closure is None:
            callback.before_step()
            return None

        @torch.no_grad()
        def closed() -> Any:
            """What makes the gradients, as Lightning hands it over: they are complete behind it."""
            with torch.enable_grad():
                loss = closure()
            callback.before_step()
            return loss

        return (args[0], closed, *args[2:]), {name: value for name, value in kwargs.items() if name != "closure"}

    def after(stepping: Optimizer, *_: Any) -> None:
        if stepping in left_out:
            left_out.remove(stepping)
            return
        callback.stepped = stepping
        callback.after_step()
        callback.stepped = None
        callback.add_hooks()  # a mask that this step froze is one that gradients need from the next pass on

    callback.add_hooks()
    # On torch's optimizer, not on Accelerate's around it: that one's `step` does nothing while gradients accumulate.
    handles = [one.register_step_pre_hook(before) for one in callback.optimizers]
    handles += [one.register_step_post_hook(after) for one in callback.optimizers]
    try:
        yield callback
        callback.end()
    finally:
        for handle in handles:
            handle.remove()
        callback.finish()


def _leaves_out(optimizer: Optimizer) -> bool:
    """Whether a GradScaler has told this optimizer not to step, because gradients are no finite numbers.

    It tells a fused one, which leaves out the step itself; any other it does not call.
    """
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found.any())


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    """The folder of the Trainer's checkpoint of this step."""
    return Path(args.output_dir or ".") / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _unwrapped(optimizer: Any) -> Any:
    """Torch's optimizer in Accelerate's."""
    return getattr(optimizer, "optimizer", optimizer)


def parameters_of(optimizer: Any) -> list[nn.Parameter]:
    """What an optimizer holds, whether it trains now or not."""
    return [one for group in optimizer.param_groups for one in group["params"]]


def leaves_out_gradients(optimizer: Optimizer) -> bool:
    """Whether a callback that runs drops gradients that backward has made."""
    return any(one.leaves_out_gradients for one in _running.get(optimizer, ()))


def _check_supported(callback: StepCallback, model: nn.Module, optimizers: list[Any]) -> None:
    name = type(callback).__name__
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name} needs the model in training, not {model!r:.80}.")
    # ZeRO-3 marks its parameters with `ds_id`; the lower stages show in the optimizer's wrapper only.
    if any("DeepSpeed" in type(one).__name__ for one in optimizers) or any(
        hasattr(parameter, "ds_id") for parameter in model.parameters()
    ):
        raise ValueError(
            f"{name} cannot work under DeepSpeed, which steps inside backward and keeps weights and optimizer state in "
            "flat partitions of its own. Use FSDP2 (examples/accelerate_fsdp2.yaml) or DDP."
        )
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ValueError(f"{name} needs weights with a shape, which FSDP1 flattens. Set fsdp_version: 2.")
    if not all(isinstance(_unwrapped(one), Optimizer) for one in optimizers) or not optimizers:
        kinds = ", ".join(type(one).__name__ for one in optimizers)
        raise TypeError(f"{name} needs a torch.optim.Optimizer, not {kinds or 'an empty list'}.")
    if len(optimizers) > 1 and not callback.takes_several:
        raise TypeError(f"{name} works with one optimizer, got {len(optimizers)}: pass the one that it is to see.")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"{name}: no parameter of this {type(model).__name__} requires a gradient, as after a merge of adapters. "
            "Call model.requires_grad_(True), and make the optimizer after that."
        )
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(one) in own for optimizer in optimizers for one in parameters_of(optimizer)):
        raise ValueError(
            f"{name}: the optimizer trains none of this {type(model).__name__}'s parameters. Make it of the model that "
            "is passed, not of a copy, and no layer-wise one (GaLore's, APOLLO's), which steps inside backward."
        )
