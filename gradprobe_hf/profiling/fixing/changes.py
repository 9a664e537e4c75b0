"""What can be changed in a run from outside, one at a time. A change is a row; no other code asks which one it is.

Each is a context manager that changes what the script makes while it is entered: loaders, optimizers, models. It yields
a list, to which it adds a sentence for each thing that it has changed: a change that changed nothing was not tried.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from gradprobe_hf.profiling.observing.observation import Observation

Done = list[str]
_WORKERS = 2
_FLASH = "flash_attention_2"
_PREFETCHED = 8  # batches of each worker; torch's default is 2
_WAITS = 0.01  # share of a step from which on workers are worth a try


@dataclass(frozen=True)
class Change:
    """Attributes:
    needless: why there is nothing to try in a run that was observed; None if there is.
    made: the change, while it is entered.
    remedy: how to make it in the script.
    kinds: of findings that it may mend.
    same_batches: whether each step has the batch that it had, so that losses are comparable.
    """

    needless: Callable[[Observation], str | None]
    made: Callable[[], AbstractContextManager[Done]]
    remedy: str
    kinds: tuple[str, ...] = ()
    same_batches: bool = True


@contextmanager
def _workers() -> Iterator[Done]:
    def change(values: dict[str, Any]) -> str | None:
        if values["num_workers"] or isinstance(values["dataset"], IterableDataset):
            return None  # an iterable data set would have to divide its rows among them
        values.update(num_workers=_WORKERS, persistent_workers=True)
        return f"num_workers={_WORKERS}"

    with _loaders(change) as done:
        yield done


@contextmanager
def _prefetch() -> Iterator[Done]:
    def change(values: dict[str, Any]) -> str | None:
        if not values["num_workers"]:
            return None
        values["prefetch_factor"] = _PREFETCHED
        return f"prefetch_factor={_PREFETCHED}"

    with _loaders(change) as done:
        yield done


@contextmanager
def _pinned() -> Iterator[Done]:
    def change(values: dict[str, Any]) -> str | None:
        if values["pin_memory"]:
            return None
        values["pin_memory"] = True
        return "pin_memory=True"

    with _loaders(change) as done:
        yield done


@contextmanager
def _larger_batch(times: int) -> Iterator[Done]:
    def change(values: dict[str, Any]) -> str | None:
        if not values["batch_size"] or values["batch_sampler"] is not None:
            return None
        values["batch_size"] *= times
        return f"batch_size={values['batch_size']}"

    with _loaders(change) as done:
        yield done


@contextmanager
def _loaders(change: Callable[[dict[str, Any]], str | None]) -> Iterator[Done]:
    """Change the arguments of each `DataLoader` that is made."""
    done: Done = []
    original = DataLoader.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        # Accelerate makes a loader of its own class out of one that was changed already.
        if type(self) is DataLoader and (said := change(bound.arguments)):
            done.append(said)
        original(*bound.args, **bound.kwargs)

    with _replaced(DataLoader, "__init__", made):
        yield done


@contextmanager
def _fused() -> Iterator[Done]:
    done: Done = []
    original = Optimizer.__init__

    @functools.wraps(original)
    def made(self: Any, params: Any, defaults: dict[str, Any]) -> None:
        if "fused" in defaults and not defaults["fused"]:
            defaults.update(fused=True, foreach=None)
            done.append(f"{type(self).__name__}(fused=True)")
        original(self, params, defaults)

    with _replaced(Optimizer, "__init__", made):
        yield done


@contextmanager
def _autocast() -> Iterator[Done]:
    """Around each call of an outermost module."""
    done: Done = []
    open_: list[Any] = []
    depth = 0

    def before(module: nn.Module, _: Any) -> None:
        nonlocal depth
        depth += 1
        if depth == 1:
            first = next(module.parameters(), None)
            device = first.device.type if first is not None else "cpu"
            open_.append(torch.autocast(device, torch.bfloat16))
            open_[-1].__enter__()
            done[:] = ["forward under torch.autocast in bfloat16"]

    def after(*_: Any) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            open_.pop().__exit__(None, None, None)

    handles = [register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)]
    try:
        yield done
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _first_called(change: Callable[[nn.Module], str | None]) -> Iterator[Done]:
    """Change the first module that is called to be trained: a teacher's or a reference's passes have no gradients."""
    done: Done = []

    def before(module: nn.Module, _: Any) -> None:
        if not torch.is_grad_enabled() or not any(one.requires_grad for one in module.parameters()):
            return
        handle.remove()
        if said := change(module):
            done.append(said)

    handle = register_module_forward_pre_hook(before)
    try:
        yield done
    finally:
        handle.remove()


def _attention(implementation: str, module: nn.Module) -> str | None:
    models = [one for one in module.modules() if isinstance(one, PreTrainedModel)]
    if not models or models[0].config._attn_implementation == implementation:
        return None
    models[0].set_attn_implementation(implementation)
    return f"attn_implementation={implementation!r}"


def _checkpointing(module: nn.Module) -> str | None:
    model = next((one for one in module.modules() if isinstance(one, PreTrainedModel)), None)
    if model is None or not model.supports_gradient_checkpointing:
        return None
    if any(getattr(one, "gradient_checkpointing", False) for one in model.modules()):
        model.gradient_checkpointing_disable()
        return "gradient checkpointing off"
    model.gradient_checkpointing_enable()
    return "gradient checkpointing on"


def _compile(module: nn.Module) -> str | None:
    if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
        return None
    module.compile()
    return "model.compile()"


@contextmanager
def _not_compiled() -> Iterator[Done]:
    with torch.compiler.set_stance("force_eager"):
        yield ["torch.compile switched off"]


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _no_waiting(seen: Observation) -> str | None:
    if not seen.loaders:
        return "no torch DataLoader was used"
    waited = sum(one.seconds for one in seen.loaders)
    return "the loader is not waited for" if waited < _WAITS * sum(seen.timed) else None


def _no_lone_loader(seen: Observation) -> str | None:
    return _no_waiting(seen) or ("it has workers" if any(one.workers for one in seen.loaders) else None)


def _no_workers(seen: Observation) -> str | None:
    return _no_waiting(seen) or (None if any(one.workers for one in seen.loaders) else "it has no workers")


def _no_copies(seen: Observation) -> str | None:
    return _no_waiting(seen) or ("there is no accelerator to copy to" if seen.device == "cpu" else None)


def _no_loader(seen: Observation) -> str | None:
    if not seen.loaders:
        return "no torch DataLoader was used"
    return None if seen.contents else "how many samples a step has is not known"


def _no_eager(seen: Observation) -> str | None:
    return None if seen.setup and seen.setup.attention.get("eager") else "attention is not eager"


def _flash_is_missing(seen: Observation) -> str | None:
    """Why FlashAttention cannot be measured; None if it can."""
    if seen.device.partition(":")[0] != "cuda":
        return f"FlashAttention has kernels for CUDA alone, and this run is on {seen.device}"
    if not is_flash_attn_2_available():
        return "the package flash-attn is not installed"
    half = seen.setup is not None and seen.setup.asked
    return None if half else "FlashAttention computes in half precision, and this run does not"


def _no_flash(seen: Observation) -> str | None:
    if not seen.setup or not seen.setup.attention:
        return "no model of transformers with more than one implementation was seen"
    return "it is in use" if set(seen.setup.attention) == {_FLASH} else _flash_is_missing(seen)


def _no_float32(seen: Observation) -> str | None:
    return f"the run is in {seen.setup.asked}" if seen.setup and seen.setup.asked else None


def _no_transformers(seen: Observation) -> str | None:
    known = seen.setup and (seen.setup.attention or seen.setup.checkpointed)
    return None if known else "no model of transformers was seen"


def _no_loop(seen: Observation) -> str | None:
    slow = seen.setup and seen.setup.steps_by == "one by one" and seen.setup.has_fused
    return None if slow else "the optimizer does not step tensor by tensor, or cannot be fused"


def _compiled(seen: Observation) -> str | None:
    return "it is compiled" if seen.compiles else None


def _eager(seen: Observation) -> str | None:
    return None if seen.compiles else "nothing is compiled"


_ARGUMENTS = "in TrainingArguments"


def _batch(times: int) -> Change:
    remedy = f"{times} times the batch; the learning rate may need a change"
    kinds = ("batch headroom", "idle device")
    return Change(_no_loader, partial(_larger_batch, times), remedy, kinds, same_batches=False)


_LOADING = ("data loading",)
CHANGES: dict[str, Change] = {
    "workers": Change(
        _no_lone_loader,
        _workers,
        f"DataLoader(num_workers=2); dataloader_num_workers=2 {_ARGUMENTS}. Random rows are others there",
        _LOADING,
    ),
    "prefetch": Change(
        _no_workers, _prefetch, f"DataLoader(prefetch_factor=8); dataloader_prefetch_factor=8 {_ARGUMENTS}", _LOADING
    ),
    "pinning": Change(
        _no_copies,
        _pinned,
        "DataLoader(pin_memory=True) and .to(device, non_blocking=True); the Trainer does both",
        _LOADING,
    ),
    "batch-size": _batch(2),
    "batch-size-4x": _batch(4),
    "attention": Change(
        _no_eager,
        partial(_first_called, partial(_attention, "sdpa")),
        "attn_implementation='sdpa' in from_pretrained",
        ("eager attention",),
    ),
    "flash": Change(
        _no_flash,
        partial(_first_called, partial(_attention, _FLASH)),
        f"attn_implementation={_FLASH!r} in from_pretrained",
        ("eager attention", "flash attention"),
    ),
    "precision": Change(
        _no_float32,
        _autocast,
        f"torch.autocast(device, torch.bfloat16); bf16=True {_ARGUMENTS}",
        ("float32 precision",),
    ),
    "checkpointing": Change(
        _no_transformers,
        partial(_first_called, _checkpointing),
        f"gradient_checkpointing {_ARGUMENTS}",
        ("checkpointing",),
    ),
    "fused": Change(_no_loop, _fused, f"fused=True; for AdamW, optim='adamw_torch_fused' {_ARGUMENTS}", ("optimizer",)),
    "compile": Change(
        _compiled,
        partial(_first_called, _compile),
        f"model.compile(); torch_compile=True {_ARGUMENTS}",
        ("idle device",),
    ),
    "no-compile": Change(
        _eager,
        _not_compiled,
        f"leave torch.compile out; torch_compile=False {_ARGUMENTS}",
        ("recompilation", "graph break"),
    ),
}
MENDED = frozenset(kind for row in CHANGES.values() for kind in row.kinds)  # kinds that something from outside may mend
LARGEST = "largest-batch"  # which one that is, batch_sizes.py finds out
_LARGER = re.compile(r"batch-size-([1-9]\d{0,3})x")


def change_named(name: str) -> Change | None:
    """A row of the table, or a batch so many times as large, `batch-size-8x`; None: there is no such change."""
    if name not in CHANGES and (found := _LARGER.fullmatch(name)):
        return _batch(int(found[1]))
    return CHANGES.get(name)


def of_batch(times: int) -> str:
    """The name of a larger batch."""
    return "batch-size" if times == 2 else f"batch-size-{times}x"
