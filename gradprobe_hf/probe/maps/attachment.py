"""Attachment: the modules of a model routed through measured maps, inside a `with` block.

Accelerate's `add_hook_to_module` puts the hook's function into `module.forward` and the function it wraps into
`module._old_forward`. The maps go into the inner slot, so that the hook still loads an offloaded weight before them and
lets it go after them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from gradprobe_hf.model.families import expert_parameters
from gradprobe_hf.model.fsdp import is_sharded, reshard
from gradprobe_hf.model.passes.block_cache import BlockSequence
from gradprobe_hf.model.passes.loss import Batch
from gradprobe_hf.model.passes.patches import restore_slot
from gradprobe_hf.model.sites import Site
from gradprobe_hf.model.targets import Target
from gradprobe_hf.probe.maps.folding import Folding
from gradprobe_hf.probe.maps.measured import MeasuredEmbedding, MeasuredLinear, MeasuredUse
from gradprobe_hf.probe.maps.serving import ServedWeights
from gradprobe_hf.runtime.interrupts import uninterrupted
from gradprobe_hf.selection.masked_values import SavedValues
from gradprobe_hf.selection.packed_masks import multipliers_of

OnInput = Callable[[Target, Site, Tensor], None]


@contextmanager
def serving(
    model: PreTrainedModel,
    targets: Sequence[Target],
    masks: Mapping[str, Tensor],
    factor: float = 0.0,
    new_weights: Mapping[str, Tensor] | None = None,
) -> Iterator[None]:
    """Run the model as if its masked weights were multiplied by `factor`: forward passes only, no weight is written.

    Args:
        masks: target name -> bool `[out, in]`.
        new_weights: target name -> values `[out, in]` to use in place of the model's.
    """
    with ExitStack() as stack:
        if new_weights and is_sharded(model):
            stack.enter_context(_exchanged_shards(model, targets, new_weights))
            new_weights = None
        masks_to_serve = stack.enter_context(shrinking(model, targets, masks, factor))
        served = ServedWeights(masks_to_serve, factor, new_weights)
        stack.enter_context(instrumented(model, targets, served))
        stack.enter_context(torch.no_grad())
        yield


def blocks_in_order(model: PreTrainedModel, targets: Sequence[Target], batches: Iterable[Batch]) -> BlockSequence:
    """As `BlockSequence.of`, through measured maps: transformers' own products of experts take no float64.

    Args:
        batches: of which that one tells which has most inputs: a text without an image runs no vision tower.
    """
    with serving(model, targets, {}):
        return BlockSequence.of(model, targets, max(batches, key=len))


@contextmanager
def _exchanged_shards(
    model: PreTrainedModel, targets: Sequence[Target], new_weights: Mapping[str, Tensor]
) -> Iterator[None]:
    """This process's shards are those of `new_weights` meanwhile: FSDP2 hands a map the whole matrix."""
    targets = [target for target in targets if target.name in new_weights]
    reshard(model)  # a parameter that is still gathered would hide what its shard is given
    before = {target.name: target.matrix(model).clone() for target in targets}
    try:
        _write_shards(model, targets, new_weights)
        yield
    finally:
        with uninterrupted():
            reshard(model)
            _write_shards(model, targets, before)


@torch.no_grad()
def _write_shards(model: PreTrainedModel, targets: Sequence[Target], values: Mapping[str, Tensor]) -> None:
    for target in targets:
        target.matrix(model).copy_(values[target.name])


@contextmanager
def shrinking(
    model: PreTrainedModel, targets: Sequence[Target], masks: Mapping[str, Tensor] | None, factor: float
) -> Iterator[Mapping[str, Tensor] | None]:
    """Yield the masks that measured maps have to apply when they serve a weight.

    A sharded model is the exception, and None is yielded: FSDP2 hands a map the whole matrix, while each process knows
    the mask of its own rows only. So the shards themselves are shrunk, and restored bit for bit on exit.
    """
    if masks is None or not is_sharded(model):
        yield masks
        return
    targets = [target for target in targets if target.name in masks]
    reshard(model)  # a parameter that is still gathered would hide what its shard is given
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
            originals.restore()


@contextmanager
def instrumented(
    model: PreTrainedModel,
    targets: Sequence[Target],
    served: ServedWeights,
    folding: Folding | None = None,
    on_input: OnInput | None = None,
    recomputed: Sequence[str] = (),
) -> Iterator[None]:
    """Route every use of a target through a measured map; restore all forwards on exit.

    Args:
        served: the weights that the maps multiply with.
        folding: where they fold what they measure; None: they only serve.
        on_input: called with every input while gradients are off.
        recomputed: blocks that checkpointing computes again in backward.
    """
    used: dict[Site, list[Target]] = {}  # a tied target has several sites; an experts module serves many targets
    for target in targets:
        for site in target.sites:
            used.setdefault(site, []).append(target)
    with ExitStack() as undo:
        # Vectors last: theirs go around the forwards that serve matrices, of the same module maybe.
        for site, owned in sorted(used.items(), key=lambda item: item[0].kind == "vector"):
            module: Any = model.get_submodule(site.module)
            slot = "_old_forward" if "_old_forward" in module.__dict__ else "forward"
            make = _FORWARDS.get(site.kind, _single_forward)
            # Registered before the slot is replaced, so that no exception can come between the two.
            undo.callback(restore_slot, module, slot, module.__dict__.get(slot))
            # Recomputing a block loads its weights again; an offloaded weight outside is fetched by its map.
            fetches = any(model.get_parameter(target.parameter).is_meta for target in owned) and not any(
                site.module.startswith(f"{block}.") for block in recomputed
            )
            setattr(module, slot, make(module, owned, _Router(model, site, served, folding, on_input, fetches)))
        yield


class _Router:
    """Sends each use of a matrix at one site through its measured map, or without gradients through a plain product."""

    def __init__(
        self,
        model: PreTrainedModel,
        site: Site,
        served: ServedWeights,
        folding: Folding | None,
        on_input: OnInput | None,
        fetches: bool,
    ) -> None:
        self.model, self.site, self.served, self.folding = model, site, served, folding
        self.on_input, self.fetches = on_input, fetches
        self.anchor = torch.zeros((), requires_grad=folding is not None)  # see `measured.py`

    def __call__(self, target: Target, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        is_embedding = self.site.kind == "embedding"
        if torch.is_grad_enabled() and not self.served.trained:
            if self.folding is not None:
                self.folding.count_use(target)
            fetch = self._fetch(target, weight) if self.fetches and not is_embedding else None
            use = MeasuredUse(target, self.site, self.served, self.folding, fetch)
            if is_embedding:
                return MeasuredEmbedding.apply(x, weight, self.anchor, use)
            return MeasuredLinear.apply(x, weight, bias, self.anchor, use)
        if self.on_input is not None:
            self.on_input(target, self.site, x)
        weight = self.served.of(target, weight)
        return F.embedding(x, weight) if is_embedding else F.linear(x, weight, bias)

    def _fetch(self, target: Target, like: Tensor) -> Callable[[], Tensor]:
        device, dtype = like.device, like.dtype  # not `like` itself: a closure over it would keep the weight alive
        return lambda: target.matrix(self.model).to(device, dtype)


def _single_forward(module: Any, owned: list[Target], route: _Router) -> Callable[[Tensor], Tensor]:
    (target,) = owned

    def forward(x: Tensor) -> Tensor:
        # Looked up at each call: Accelerate and FSDP2 put another tensor there for every pass.
        return route(target, x, target.view(module.weight), getattr(module, "bias", None))

    return forward


def _experts_forward(module: Any, owned: list[Target], route: _Router) -> Callable[..., Tensor]:
    """The experts of transformers/integrations/moe.py, one after the other, each of their maps measured.

    transformers may multiply with all experts in one grouped product, in which no single matrix can be measured.

    Shapes: hidden_states `[tokens, hidden]`, top_k_index and top_k_weights `[tokens, k]`.
    """
    targets = {(target.parameter.rsplit(".", 1)[1], target.expert): target for target in owned}
    up_name, down_name = expert_parameters(module)

    def linear(name: str, expert: int, x: Tensor) -> Tensor:
        parameter = getattr(module, name)
        bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
        if target := targets.get((name, expert)):
            return route(target, x, target.view(parameter), bias)
        return F.linear(x, parameter[expert].t() if module.is_transposed else parameter[expert], bias)

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(module.num_experts):
            token, slot = (top_k_index == expert).nonzero(as_tuple=True)
            if not len(token):  # an expert without tokens has no gradient, and its matrices stay unreached
                continue
            up = linear(up_name, expert, hidden_states[token])
            inner = module._apply_gate(up) if module.has_gate else module.act_fn(up)
            y = linear(down_name, expert, inner)
            if getattr(module, "has_post_expert_norm", False):
                y = module.post_expert_norm(y)
            out = out.index_add(0, token, (y * top_k_weights[token, slot, None]).to(out.dtype))
        return out

    return forward


def _vector_forward(module: Any, owned: list[Target], route: _Router) -> Callable[..., Any]:
    """The module's own forward, on other gains and biases."""
    slot = "_old_forward" if "_old_forward" in module.__dict__ else "forward"
    inner = getattr(module, slot)
    names = {target.parameter.rsplit(".", 1)[1]: target for target in owned}

    def forward(*args: Any, **kwargs: Any) -> Any:
        # Replaced at each call, as Accelerate does, and past `__setattr__`, which takes nothing but a Parameter.
        own = {name: module._parameters[name] for name in names}
        try:
            module._parameters.update({name: route.served.of(names[name], own[name]) for name in names})
            return inner(*args, **kwargs)
        finally:
            module._parameters.update(own)

    return forward


# What a module runs in place of its forward, where it is not the plain use of one matrix.
_FORWARDS = {"experts": _experts_forward, "vector": _vector_forward}
