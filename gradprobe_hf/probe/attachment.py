"""Attachment: a model whose targets are routed through measured maps, for the body of a `with`.

Under a hook of Accelerate a module's `forward` is the hook's, and what it wraps is `_old_forward`: the maps go there,
inside the hook, so that it still loads the weight before and lets it go after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from gradprobe_hf.model.families import expert_parameters
from gradprobe_hf.model.fsdp import is_sharded, reshard
from gradprobe_hf.model.patches import put_back
from gradprobe_hf.model.targets import Site, Target
from gradprobe_hf.probe.folding import Probe
from gradprobe_hf.probe.measured import MeasuredEmbedding, MeasuredLinear
from gradprobe_hf.runtime.interrupts import uninterrupted
from gradprobe_hf.selection.packed_masks import SavedValues, multipliers_of

OnInput = Callable[[Target, Site, Tensor], None]


@contextmanager
def serving(
    model: PreTrainedModel,
    targets: Sequence[Target],
    masks: Mapping[str, Tensor],
    factor: float = 0.0,
    replaced: Mapping[str, Tensor] | None = None,
) -> Iterator[None]:
    """Run the model as if its masked weights were multiplied by `factor`, and matrices `replaced`: forward only."""
    with ExitStack() as stack:
        served = stack.enter_context(shrinking(model, targets, masks, factor))
        stack.enter_context(instrumented(model, targets, Probe(shrunk=served, factor=factor, replaced=replaced)))
        stack.enter_context(torch.no_grad())
        yield


@contextmanager
def shrinking(
    model: PreTrainedModel, targets: Sequence[Target], masks: Mapping[str, Tensor] | None, factor: float
) -> Iterator[Mapping[str, Tensor] | None]:
    """What measured maps have to shrink in what they serve, for the body of the `with`.

    Only FSDP2 shrinks the weights themselves: a map is given whole matrices, and the masks of whole matrices are
    nowhere. The shards get their original bits back, whatever happens.
    """
    if masks is None or not is_sharded(model):
        yield masks
        return
    targets = [target for target in targets if target.name in masks]
    reshard(model)
    originals = SavedValues({target.name: target.matrix(model) for target in targets}, masks)
    try:
        with torch.no_grad():
            for target in targets:
                weight = target.matrix(model)
                weight.mul_(multipliers_of(masks, target.name, slice(None), factor, weight.dtype, weight.device))
        yield None
    finally:
        with uninterrupted(), torch.no_grad():
            reshard(model)
            originals.give_back()


@contextmanager
def instrumented(
    model: PreTrainedModel,
    targets: Sequence[Target],
    probe: Probe,
    on_input: OnInput | None = None,
    recomputed: Sequence[str] = (),
) -> Iterator[None]:
    """Replace the forward of every module that uses a target; put all of them back at the end.

    Args:
        on_input: called with every input when gradients are off.
        recomputed: the blocks that checkpointing computes again in backward.
    """
    used: dict[Site, list[Target]] = {}
    for target in targets:
        for site in target.sites:
            used.setdefault(site, []).append(target)
    with ExitStack() as undo:
        for site, owned in used.items():
            module: Any = model.get_submodule(site.module)
            slot = "_old_forward" if "_old_forward" in module.__dict__ else "forward"
            make = _experts_forward if site.kind == "experts" else _single_forward
            undo.callback(put_back, module, slot, module.__dict__.get(slot))
            # A recomputed weight is loaded when its block is; any other offloaded one is fetched again in backward.
            fetches = any(model.get_parameter(target.parameter).is_meta for target in owned) and not any(
                site.module.startswith(f"{block}.") for block in recomputed
            )
            setattr(module, slot, make(module, owned, _Router(model, probe, site, on_input, fetches)))
        yield


class _Router:
    """Sends a use of a target's matrix through its measured map; without gradients, through what is served."""

    def __init__(
        self, model: PreTrainedModel, probe: Probe, site: Site, on_input: OnInput | None, fetches: bool
    ) -> None:
        self.model, self.probe, self.site, self.on_input, self.fetches = model, probe, site, on_input, fetches
        self.anchor = torch.zeros((), requires_grad=probe.statistics is not None)

    def __call__(self, target: Target, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        embedding = self.site.kind == "embedding"
        if torch.is_grad_enabled():
            self.probe.count_use(target)
            if embedding:
                return MeasuredEmbedding.apply(x, weight, self.anchor, self.probe, target, self.site)
            fetch = self._fetch(target, weight) if self.fetches else None
            return MeasuredLinear.apply(x, weight, bias, self.anchor, self.probe, target, self.site, fetch)
        if self.on_input is not None:
            self.on_input(target, self.site, x)
        weight = self.probe.served(target, weight)
        return F.embedding(x, weight) if embedding else F.linear(x, weight, bias)

    def _fetch(self, target: Target, like: Tensor) -> Callable[[], Tensor]:
        device, dtype = like.device, like.dtype  # not `like` itself: the point is to let it go
        return lambda: target.matrix(self.model).to(device, dtype)


def _single_forward(module: Any, owned: list[Target], route: _Router) -> Callable[[Tensor], Tensor]:
    (target,) = owned

    def forward(x: Tensor) -> Tensor:
        return route(target, x, target.view(module.weight), getattr(module, "bias", None))

    return forward


def _experts_forward(module: Any, owned: list[Target], route: _Router) -> Callable[..., Tensor]:
    """The experts of transformers/integrations/moe.py, one after the other, each of its maps measured.

    Shapes: hidden_states `[tokens, hidden]`, top_k_index and top_k_weights `[tokens, k]`.
    """
    of = {(target.parameter.rsplit(".", 1)[1], target.expert): target for target in owned}
    up_name, down_name = expert_parameters(module)

    def linear(name: str, expert: int, x: Tensor) -> Tensor:
        parameter = getattr(module, name)
        bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
        if target := of.get((name, expert)):
            return route(target, x, target.view(parameter), bias)
        return F.linear(x, parameter[expert].t() if module.is_transposed else parameter[expert], bias)

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(module.num_experts):
            token, slot = (top_k_index == expert).nonzero(as_tuple=True)
            if not len(token):
                continue
            up = linear(up_name, expert, hidden_states[token])
            inner = module._apply_gate(up) if module.has_gate else module.act_fn(up)
            y = linear(down_name, expert, inner)
            if getattr(module, "has_post_expert_norm", False):
                y = module.post_expert_norm(y)
            out = out.index_add(0, token, (y * top_k_weights[token, slot, None]).to(out.dtype))
        return out

    return forward
