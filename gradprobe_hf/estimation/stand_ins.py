"""Stand-ins: with them a pass over a model on the meta device keeps and computes what a probe would.

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
    """Targets require a gradient, so that autograd keeps their inputs; gradients are freed as soon as they are made."""
    parameters = {target.parameter: model.get_parameter(target.parameter) for target in targets}
    with ExitStack() as undo:
        for parameter in parameters.values():
            undo.callback(parameter.requires_grad_, parameter.requires_grad)
            undo.callback(_free_gradient(parameter.requires_grad_()).remove)
        yield


@contextmanager
def recomputed_blocks(model: nn.Module) -> Iterator[None]:
    """Every block is recomputed in backward."""
    # transformers' own switch, `gradient_checkpointing_enable`, does nothing in eval mode, which probes are in.
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    blocks = blocks or [
        module for name, module in model.named_modules() if name and name == block_of(model, name)
    ]  # an architecture without such layers: the elements of its lists

    def recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            # Autograd's engine recomputes without the function modes in which `backward` was called.
            with WithoutData():
                return forward(*args, **kwargs)

        # The options of model/patches.checkpointed, so that what is counted is what a run does.
        return lambda *args, **kwargs: checkpoint(
            partial(run, **kwargs), *args, use_reentrant=False, preserve_rng_state=False, early_stop=False
        )

    with _forwards({block: recomputed(block.forward) for block in blocks}):
        yield


@contextmanager
def balanced_experts(model: nn.Module) -> Iterator[None]:
    """Fused experts that get equal shares of the tokens.

    Which token goes where depends on data; how many rows all experts see together does not. Here all rows pass one
    expert's matrices, which takes as much memory and work as equal parts that each pass their own.
    """
    experts: dict[Any, Callable[..., Any]] = {
        module: partial(_one_expert, module) for module in model.modules() if is_fused_experts(module)
    }
    with _forwards(experts):
        yield


def _one_expert(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """An expert module's forward. hidden_states is `[tokens, hidden]`, top_k_index and top_k_weights `[tokens, k]`."""
    tokens, chosen = top_k_index.shape
    up_name, down_name = expert_parameters(module)
    up = _expert_linear(module, up_name, hidden_states.repeat_interleave(chosen, dim=0))
    inner = module._apply_gate(up) if module.has_gate else module.act_fn(up)
    out = _expert_linear(module, down_name, inner) * top_k_weights.reshape(-1, 1)
    return out.view(tokens, chosen, -1).sum(1).to(hidden_states.dtype)


def _expert_linear(module: Any, name: str, x: Tensor) -> Tensor:
    """The first expert's linear map of `[rows, in]`."""
    fused = getattr(module, name)
    # A leaf of its own: the gradient of one expert's slice of the fused tensor would be as large as all experts.
    weight = fused.detach()[0].requires_grad_(fused.requires_grad)
    if weight.requires_grad and torch.is_grad_enabled():
        _free_gradient(weight)
    bias = getattr(module, f"{name}_bias").detach()[0] if module.has_bias else None
    return F.linear(x, weight.t() if module.is_transposed else weight, bias)


class WithoutData(TorchFunctionMode):
    """Answers calls that the meta device would answer unlike a real one, or not at all.

    A function mode sees calls of torch's Python API, before autograd and dispatch take them apart:

    - Attention. A real device has a fused kernel; on meta torch takes the composite one, which keeps matrices
      `[tokens, tokens]` for backward.
    - Truth values. transformers looks at positions and masks to see whether it can do without a mask. The answers are
      those of full windows: `bool(...)` of a comparison is True (positions run on, nothing is masked), and `in` is
      False (no token is padding). Meta tensors have no values and would raise.
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
    **options: Any,
) -> Tensor:
    """`F.scaled_dot_product_attention`, with its arguments, by the CPU's fused kernel: the one that runs on meta."""
    biased = attn_mask is not None and attn_mask.requires_grad  # positions that are learned
    if value.shape[-1] != query.shape[-1] or biased:  # no fused kernel of the CPU takes these
        plain = F.scaled_dot_product_attention
        return plain(query, key, value, attn_mask, dropout_p, is_causal, **options)
    # The kernel takes additive masks alone, and broadcasts keys of grouped queries by itself.
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask, 0)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return attend(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=options.get("scale"))[0]


def _free_gradient(weight: Tensor) -> Any:
    """Drop the gradient of a leaf when it has been made, as a probe does once it has folded it. The hook's handle."""
    return weight.register_post_accumulate_grad_hook(lambda leaf: setattr(leaf, "grad", None))


@contextmanager
def _forwards(replaced: dict[Any, Callable[..., Any]]) -> Iterator[None]:
    """Replace `forward` of some modules for the body of the `with`."""
    try:
        for module, forward in replaced.items():
            module.forward = forward
        yield
    finally:
        for module in replaced:  # a skeleton's modules have no instance attribute of that name to restore
            module.__dict__.pop("forward", None)
