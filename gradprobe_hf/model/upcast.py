"""Matrix products of bfloat16 and float16 models on a CPU that has no units for them: computed in float32.

PyTorch multiplies half precision through oneDNN where that has kernels for the CPU, and else in a scalar loop, which
takes many times as long as float32 (docs/memory.md, `make bench-upcast`). Operands that are widened, multiplied in
float32 and rounded once are what the units compute, which add in float32 too: only the order of the sums is another, as
it is on any other machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from gradprobe_hf.model.parameters import input_device

_HALF = (torch.bfloat16, torch.float16)
_aten = torch.ops.aten
# Those that a model's forward and backward passes arrive at. The first six have parts, and are seen as a whole under
# inference_mode alone.
_PRODUCTS = frozenset(
    {
        _aten.linear.default,
        _aten.matmul.default,
        _aten.scaled_dot_product_attention.default,
        _aten.conv1d.default,
        _aten.conv2d.default,
        _aten.conv3d.default,
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.convolution.default,
        _aten.convolution_backward.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    }
)
# Where their operands are of which one has a row for each token.
_ROWS_AT = {_aten.linear.default: 0, _aten.mm.default: 0, _aten.addmm.default: 1}
_FEW_ROWS = 4
# The log of the sum of the exponentials, which backward wants in float32 whatever the queries are.
_STAYS_WIDE = {_aten._scaled_dot_product_flash_attention_for_cpu.default: 1}


def needs_upcast(dtype: torch.dtype) -> bool:
    """Whether the CPU of this process multiplies matrices of this dtype in a scalar loop."""
    # What ATen itself asks before it calls oneDNN (aten/src/ATen/native/mkldnn/Matmul.cpp).
    asked = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    if dtype not in asked:
        return False
    supported = getattr(torch.ops.mkldnn, asked[dtype], None)  # None: torch was built without oneDNN, as for macOS
    return supported is None or not supported()


@contextmanager
def upcast_products(
    model: PreTrainedModel, *, device: torch.device | None = None, autocast: torch.dtype | None = None
) -> Iterator[None]:
    """In the body of the `with`, products of half precision on the CPU are computed in float32 where it is slow at
    them. On any other CPU, and for any other model, nothing changes.

    A dispatch mode sees every operation below autograd and autocast, those of a backward pass too. It is one thread's.

    Args:
        device: that the model computes on; None: the one its batches go to.
        autocast: a dtype that it will compute in, whatever its weights are.
    """
    if _is_active() or not _looped(model, device, autocast):
        yield
        return
    with _Upcast():
        yield


@contextmanager
def own_products() -> Iterator[None]:
    """In the body of the `with`, the model computes as it does without this package, to be timed."""
    with _disable_current_modes():
        yield


def upcast_note(model: PreTrainedModel) -> str | None:
    """What a report says of it; None: nothing is upcast."""
    names = [str(dtype).removeprefix("torch.") for dtype in _looped(model)]
    return f"{' and '.join(sorted(names))} in float32: this CPU has no units for it" if names else None


class _Upcast(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _PRODUCTS or _has_few_rows(func, args):
            return func(*args, **kwargs)
        dtype = next((value.dtype for value in args if _is_half(value)), None)
        if dtype is None:
            return func(*args, **kwargs)
        wide = func(*tree_map(_widened, args), **tree_map(_widened, kwargs))
        if isinstance(wide, Tensor):
            return wide.to(dtype)
        narrow = len(wide) if func not in _STAYS_WIDE else _STAYS_WIDE[func]
        return tuple(
            value.to(dtype) if number < narrow and isinstance(value, Tensor) else value
            for number, value in enumerate(wide)
        )


def _has_few_rows(func: Any, args: Any) -> bool:
    """Whether it is a few rows by a weight: dot products, a loop that takes less time than to widen the weight."""
    if func not in _ROWS_AT:
        return False
    rows, weight = args[_ROWS_AT[func] : _ROWS_AT[func] + 2]
    is_transposed = func is _aten.linear.default or weight.stride(0) == 1
    return bool(is_transposed and rows.numel() <= _FEW_ROWS * rows.shape[-1])


def _widened(value: Any) -> Any:
    return value.float() if _is_half(value) else value


def _is_half(value: Any) -> bool:
    # On the meta device it is a pass that stands for one of this CPU (estimation/passes.py).
    return isinstance(value, Tensor) and value.device.type in ("cpu", "meta") and value.dtype in _HALF


def _looped(
    model: PreTrainedModel, device: torch.device | None = None, autocast: torch.dtype | None = None
) -> set[torch.dtype]:
    """The dtypes that the model computes in and that are multiplied in a scalar loop where it does so."""
    if (device or input_device(model)).type != "cpu":
        return set()
    dtypes = {parameter.dtype for parameter in model.parameters()}
    return {dtype for dtype in dtypes | {autocast} if dtype is not None and needs_upcast(dtype)}


def _is_active() -> bool:
    return any(isinstance(mode, _Upcast) for mode in _get_current_dispatch_mode_stack())
