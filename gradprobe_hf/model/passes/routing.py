"""Routing: mixtures whose routers send tokens to some of their experts only, as if the others were not there.

A router that knows nothing of it would still choose an expert whose weights are zero. So while experts are gone, a
router runs its own code on the rows of those that stay: whatever that makes of the scores (softmax, groups, weights
that sum to one) is what the smaller model makes of them. Behind it experts have their old numbers again, and the
logits of those that are gone are minus infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradprobe_hf.model.config_names import router_counts
from gradprobe_hf.model.families import block_of, is_choosing, is_fused_experts
from gradprobe_hf.model.passes.patches import restore_slot


@dataclass(frozen=True)
class Mixture:
    """The fused experts of a block, and the router that chooses among them.

    Attributes:
        block: the transformer block around them.
        experts, router: names of the two modules.
        count: of experts.
        tensors: parameters and buffers that have a slice for each expert, with the dimension that counts them: of both
            modules, of what is inside of the router, and of the module around them, which may hand its router a bias.
    """

    block: str
    experts: str
    router: str
    count: int
    tensors: Mapping[str, int]


def mixtures(model: nn.Module) -> list[Mixture]:
    """Those of a model whose router is a module of its own beside the experts, in the model's order."""
    found = []
    for name, module in model.named_modules():
        if not is_fused_experts(module):
            continue
        parent, count = name.rpartition(".")[0], int(module.num_experts)
        beside = [f"{parent}.{child}" for child, _ in model.get_submodule(parent).named_children()]
        beside.remove(name)
        routers = [one for one in beside if _has_rows(model.get_submodule(one), count)]
        # Only of what is called a router: a shared expert may be as wide as there are experts.
        routers = routers or [one for one in beside if is_choosing(model, one) and _holders(model, one, count)]
        if len(routers) == 1:
            owners = (parent, name, *_holders(model, routers[0], count))
            tensors = {
                f"{owner}.{leaf}": dimension
                for owner in owners
                for leaf, dimension in _slices(model.get_submodule(owner), count).items()
            }
            found.append(Mixture(block_of(model, name), name, routers[0], count, tensors))
    return found


def _holders(model: nn.Module, router: str, count: int) -> list[str]:
    """Names of the modules in a router, itself among them, with tensors that have a slice for each expert."""
    inside = model.get_submodule(router).named_modules(prefix=router)
    return [name for name, module in inside if _slices(module, count)]


def _has_rows(module: nn.Module, count: int) -> bool:
    return 0 in _slices(module, count).values()


def _slices(module: nn.Module, count: int) -> dict[str, int]:
    """The module's own parameters and buffers that have a slice for each of so many experts -> their dimension."""
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    found = {leaf: 0 for leaf, tensor in own if tensor.ndim and len(tensor) == count}
    # A bias of one group of experts, `[1, experts]`: ERNIE.
    return found | {leaf: 1 for leaf, tensor in own if tensor.shape == (1, count)}


@contextmanager
def routed(model: nn.Module, gone: Mapping[str, Tensor], keep: bool = False) -> Iterator[None]:
    """No token is sent to these experts, for the body of the `with`.

    It stays so if `keep` is set and the body returns.

    Args:
        gone: name of a router -> which of its experts are gone, bool `[experts]`.
    """
    with ExitStack() as undo:
        for name, experts in gone.items():
            # Each module for itself, as Accelerate loads their weights.
            inside = [one for one in _holders(model, name, len(experts)) if one != name]
            for holder in (*inside, name):
                module: Any = model.get_submodule(holder)
                # Inside of Accelerate's hook, which loads an offloaded weight; see `probe/maps/attachment.py`.
                slot = "_old_forward" if "_old_forward" in module.__dict__ else "forward"
                before = module.__dict__.get(slot)
                undo.callback(restore_slot, module, slot, before)
                without = RouterWithout if holder == name else ModuleWithout
                module.__dict__[slot] = without(module, experts, before)
        yield
        if keep:
            undo.pop_all()


class ModuleWithout:
    """A module's forward with some experts gone. An object, so that a model that has it can be copied.

    Args:
        gone: bool `[experts]`.
        inner: what the module runs otherwise; None: its class's forward.
    """

    def __init__(self, module: nn.Module, gone: Tensor, inner: Callable[..., Any] | None) -> None:
        self.module, self.gone = module, gone.cpu()
        # Those that went before are among them.
        self.inner: Callable[..., Any] | None = inner.inner if isinstance(inner, ModuleWithout) else inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._without(self.kept):
            if self.inner is None:
                return type(self.module).forward(self.module, *args, **kwargs)
            return self.inner(*args, **kwargs)

    @property
    def kept(self) -> Tensor:
        """Numbers of the experts that stay."""
        return (~self.gone).nonzero()[:, 0]

    @contextmanager
    def _without(self, kept: Tensor) -> Iterator[None]:
        """The module has the slices of the experts that stay, and says that there are as many."""
        module, count = self.module, len(self.gone)
        leaves = _slices(module, count)
        # Past `__setattr__`, which takes nothing but a Parameter, and for one call: Accelerate puts others there.
        owners = [module._parameters if leaf in module._parameters else module._buffers for leaf in leaves]
        tensors = [owner[leaf] for owner, leaf in zip(owners, leaves, strict=True)]
        counts = [name for name in router_counts(module) if getattr(module, name) == count]
        try:
            for owner, (leaf, dimension), tensor in zip(owners, leaves.items(), tensors, strict=True):
                assert tensor is not None, "it has slices"
                owner[leaf] = tensor.index_select(dimension, kept.to(tensor.device))  # type: ignore[assignment]
            for name in counts:
                setattr(module, name, len(kept))
            yield
        finally:
            for owner, leaf, tensor in zip(owners, leaves, tensors, strict=True):
                owner[leaf] = tensor  # type: ignore[assignment]
            for name in counts:
                setattr(module, name, count)


class RouterWithout(ModuleWithout):
    """The router's: it is handed a bias of those that stay, and what it has chosen gets its old numbers again."""

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        kept, every = self.kept, (len(self.gone),)

        def narrowed(value: Any) -> Any:
            is_bias = isinstance(value, Tensor) and value.shape == every
            return value[kept.to(value.device)] if is_bias else value

        output = super().__call__(*map(narrowed, args), **{name: narrowed(value) for name, value in kwargs.items()})
        logits, scores, chosen = output  # as all routers of transformers have returned them since 5.0
        kept = kept.to(logits.device)
        whole = logits.new_full((*logits.shape[:-1], *every), -torch.inf)
        return whole.index_copy(-1, kept, logits), scores, kept[chosen]


def wrongly_routed(model: nn.Module, gone: Mapping[str, Tensor], run: Callable[[], Any]) -> str | None:
    """Why the model's code does not follow a router without these experts; None if it does.

    Args:
        run: a forward pass.
    """
    seen: dict[str, Tensor] = {}
    with ExitStack() as undo:
        for one in mixtures(model):
            if one.router in gone:

                def look(_: nn.Module, args: tuple[Any, ...], router: str = one.router) -> None:
                    seen[router] = args[1].flatten().cpu()

                undo.callback(model.get_submodule(one.experts).register_forward_pre_hook(look).remove)
        try:
            with routed(model, gone):
                run()
        except Exception as error:  # the family's own code, on fewer experts than it was told of
            return " ".join(str(error).split()) or type(error).__name__
    for router, experts in gone.items():
        if router not in seen:
            return f"its experts are not called with what {router} has chosen"
        if experts[seen[router]].any():
            return f"{router} is not what sends them tokens"
    return None
