"""Stand-ins: what makes a pass over a model on the meta device keep and compute what the engine's pass would.

Each is a context manager that leaves the model as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from gradprobe_hf.model.families import block_of, expert_parameters, is_fused_experts
from gradprobe_hf.model.targets import Target


@contextmanager
def gradients_required(model: nn.Module, targets: Sequence[Target]) -> Iterator[None]:
    """Targets require a gradient: autograd keeps their inputs and makes their gradients, which are let go at once."""
    parameters = {target.parameter: model.get_parameter(target.parameter) for target in targets}
    with ExitStack() as undo:
        for parameter in parameters.values():
            undo.callback(parameter.requires_grad_, parameter.requires_grad)
            undo.callback(_let_gradient_go(parameter.requires_grad_()).remove)
        yield


@contextmanager
def recomputed_blocks(model: nn.Module) -> Iterator[None]:
    """Every block is computed again in backward. transformers' own switch does nothing in eval mode."""
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    blocks = blocks or [
        module for name, module in model.named_modules() if name and name == block_of(model, name)
    ]  # of an architecture without such layers: what its lists hold

    def recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with WithoutData():  # backward runs without the modes of its caller
                return forward(*args, **kwargs)

        return lambda *args, **kwargs: checkpoint(
            partial(run, **kwargs), *args, use_reentrant=False, preserve_rng_state=False, early_stop=False
        )

    with _forwards({block: recomputed(block.forward) for block in blocks}):
        yield


@contextmanager
def balanced_experts(model: nn.Module) -> Iterator[None]:
    """Experts that share their tokens evenly: which goes where depends on data, how many rows there are does not.

    All rows pass one expert's matrices, which is as much memory and work as equal parts passing each its own.
    """
    experts: dict[Any, Callable[..., Any]] = {
        module: partial(_one_expert, module) for module in model.modules() if is_fused_experts(module)
    }
    with _forwards(experts):
        yield


def _one_expert(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Shapes: hidden_states `[tokens, hidden]`, top_k_index and top_k_weights `[tokens, k]`."""
    tokens, chosen = top_k_index.shape
    up_name, down_name = expert_parameters(module)
    up = _expert_linear(module, up_name, hidden_states.repeat_interleave(chosen, dim=0))
    inner = module._apply_gate(up) if module.has_gate else module.act_fn(up)
    out = _expert_linear(module, down_name, inner) * top_k_weights.reshape(-1, 1)
    return out.view(tokens, chosen, -1).sum(1).to(hidden_states.dtype)


def _expert_linear(module: Any, name: str, x: Tensor) -> Tensor:
    fused = getattr(module, name)
    # A leaf of its own: the gradient of an element of the fused tensor would be as large as all experts.
    weight = fused.detach()[0].requires_grad_(fused.requires_grad)
    if weight.requires_grad and torch.is_grad_enabled():
        _let_gradient_go(weight)
    bias = getattr(module, f"{name}_bias").detach()[0] if module.has_bias else None
    return F.linear(x, weight.t() if module.is_transposed else weight, bias)


class WithoutData(TorchFunctionMode):
    """Calls that the meta device would answer unlike a real one, or not at all.

    Attention is a fused kernel: torch falls back to one that keeps `[tokens, tokens]` matrices. And what transformers
    asks of values is answered as for full windows: positions run on, so no mask is needed, and no token is padding.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _fused_attention(*args, **(kwargs or {}))
        if func is Tensor.__bool__ and args[0].is_meta:
            return True
        if func is Tensor.__contains__ and args[0].is_meta:
            return False
        return func(*args, **(kwargs or {}))


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if value.shape[-1] != query.shape[-1]:  # no fused kernel of the CPU takes this
        plain = F.scaled_dot_product_attention
        return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask, 0)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return attend(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


def _let_gradient_go(weight: Tensor) -> Any:
    return weight.register_post_accumulate_grad_hook(lambda leaf: setattr(leaf, "grad", None))


@contextmanager
def _forwards(replaced: dict[Any, Callable[..., Any]]) -> Iterator[None]:
    """Other forwards for the body of the `with`; a skeleton's modules have none of their own to put back."""
    try:
        for module, forward in replaced.items():
            module.forward = forward
        yield
    finally:
        for module in replaced:
            module.__dict__.pop("forward", None)
