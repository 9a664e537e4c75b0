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
from gradprobe_hf.model.families import block_of, is_fused_experts
from gradprobe_hf.model.passes.patches import restore_slot


@dataclass(frozen=True)
class Mixture:
    """The fused experts of a block, and the router that chooses among them.

    Attributes:
        block: the transformer block around them.
        experts, router: names of the two modules.
        count: of experts.
        tensors: parameters and buffers of both that have a slice, or a row, for each expert.
    """

    block: str
    experts: str
    router: str
    count: int
    tensors: tuple[str, ...]


def mixtures(model: nn.Module) -> list[Mixture]:
    """Those of a model whose router is a module of its own beside the experts, in the model's order."""
    found = []
    for name, module in model.named_modules():
        if not is_fused_experts(module):
            continue
        parent, count = name.rpartition(".")[0], int(module.num_experts)
        beside = {f"{parent}.{child}": other for child, other in model.get_submodule(parent).named_children()}
        routers = [one for one, other in beside.items() if one != name and _rows(other, count)]
        if len(routers) == 1:
            tensors = [f"{one}.{leaf}" for one in (name, *routers) for leaf in _rows(beside[one], count)]
            found.append(Mixture(block_of(model, name), name, routers[0], count, tuple(tensors)))
    return found


def _rows(module: nn.Module, count: int) -> list[str]:
    """The module's own parameters and buffers that have a slice for each of so many experts."""
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return [leaf for leaf, tensor in own if tensor.ndim and len(tensor) == count]


@contextmanager
def routed(model: nn.Module, gone: Mapping[str, Tensor], keep: bool = False) -> Iterator[None]:
    """No token is sent to these experts, for the body of the `with`.

    It stays so if `keep` is set and the body returns.

    Args:
        gone: name of a router -> which of its experts are gone, bool `[experts]`.
    """
    with ExitStack() as undo:
        for name, experts in gone.items():
            module: Any = model.get_submodule(name)
            # Inside of Accelerate's hook, which loads an offloaded weight; see `probe/maps/attachment.py`.
            slot = "_old_forward" if "_old_forward" in module.__dict__ else "forward"
            before = module.__dict__.get(slot)
            undo.callback(restore_slot, module, slot, before)
            module.__dict__[slot] = RouterWithout(module, experts, before)
        yield
        if keep:
            undo.pop_all()


class RouterWithout:
    """A router's forward with some of its experts gone. An object, so that a model that has it can be copied.

    Args:
        gone: bool `[experts]`.
        inner: what the module runs otherwise; None: its class's forward.
    """

    def __init__(self, module: nn.Module, gone: Tensor, inner: Callable[..., Any] | None) -> None:
        self.module, self.gone = module, gone.cpu()
        # Those that went before are among them.
        self.inner: Callable[..., Any] | None = inner.inner if isinstance(inner, RouterWithout) else inner

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        kept = (~self.gone).nonzero()[:, 0]
        with self._without(kept):
            output = (
                type(self.module).forward(self.module, *args, **kwargs)
                if self.inner is None
                else self.inner(*args, **kwargs)
            )
        logits, scores, chosen = output  # as all routers of transformers have returned them since 5.0
        kept = kept.to(logits.device)
        every = logits.new_full((*logits.shape[:-1], len(self.gone)), -torch.inf)
        return every.index_copy(-1, kept, logits), scores, kept[chosen]

    @contextmanager
    def _without(self, kept: Tensor) -> Iterator[None]:
        """The module has the rows of the experts that stay, and says that there are as many."""
        module, count = self.module, len(self.gone)
        leaves = _rows(module, count)
        # Past `__setattr__`, which takes nothing but a Parameter, and for one call: Accelerate puts others there.
        owners = [module._parameters if leaf in module._parameters else module._buffers for leaf in leaves]
        tensors = [owner[leaf] for owner, leaf in zip(owners, leaves, strict=True)]
        counts = [name for name in router_counts(module) if getattr(module, name) == count]
        try:
            for owner, leaf, tensor in zip(owners, leaves, tensors, strict=True):
                assert tensor is not None, "it has rows"
                owner[leaf] = tensor[kept.to(tensor.device)]  # type: ignore[assignment]  # a plain tensor, see above
            for name in counts:
                setattr(module, name, len(kept))
            yield
        finally:
            for owner, leaf, tensor in zip(owners, leaves, tensors, strict=True):
                owner[leaf] = tensor  # type: ignore[assignment]
            for name in counts:
                setattr(module, name, count)


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
