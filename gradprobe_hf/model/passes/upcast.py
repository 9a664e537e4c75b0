"""Matrix products of bfloat16 and float16 models on a CPU that has no units for them: computed in float32.

PyTorch multiplies half precision through oneDNN where that has kernels for the CPU, and else in a scalar loop, which
takes many times as long as float32 (docs/memory.md, `make bench-upcast`). Operands that are widened, multiplied in
float32 and rounded are what the units compute, which add in float32 too; sums come in another order, and attention
keeps its probabilities in float32 between its two products.
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
# Those that a model's forward and backward passes arrive at, in all their overloads. What has parts arrives as them.
_PRODUCTS = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::addbmm",
    "aten::_grouped_mm",  # of experts
    "transformers::grouped_mm_fallback",  # where torch has no such product
    "transformers::grouped_mm_fallback_backward",
    "aten::convolution",
    "aten::convolution_backward",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
}
# Where their operands are of which one has a row for each token.
_ROWS_AT = {"aten::mm": 0, "aten::addmm": 1}
# So many rows take less time in the loop than the copy of a weight (docs/memory.md). A copy beyond 32 MiB takes the
# longest: glibc asks the system for its memory each time.
_FEW_ROWS, _FEW_ROWS_OF_LARGE, _LARGE_COPY = 4, 12, 32 * 2**20
# The log of the sum of the exponentials, which backward wants in float32 whatever the queries are.
_STAYS_WIDE = {"aten::_scaled_dot_product_flash_attention_for_cpu": 1}


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
    *models: PreTrainedModel, device: torch.device | None = None, autocast: torch.dtype | None = None
) -> Iterator[None]:
    """In the body of the `with`, products of half precision on the CPU are computed in float32 where it is slow at
    half precision. On any other CPU, and where none of the models computes in it, nothing changes.

    A dispatch mode sees every operation below autograd and autocast, those of a backward pass too. It is one thread's.

    Args:
        device: that the models compute on; None: the one their batches go to.
        autocast: a dtype that they will compute in, whatever their weights are.
    """
    is_needed = not _is_active() and any(_to_widen(model, device, autocast) for model in models)
    del models  # one of them may be let go in the body
    if not is_needed:
        yield
        return
    with _Upcast():
        yield


@contextmanager
def native_products() -> Iterator[None]:
    """In the body of the `with`, the model computes as it does without this package, to be timed."""
    with _disable_current_modes():
        yield


def upcast_note(model: PreTrainedModel) -> str | None:
    """What a report says of it; None: nothing is upcast."""
    names = [str(dtype).removeprefix("torch.") for dtype in _to_widen(model)]
    return f"in float32, because this CPU has no units for {' and '.join(sorted(names))}" if names else None


class _Upcast(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name not in _PRODUCTS:
            return self._of_parts(func, args, kwargs)
        dtype = next((value.dtype for value in args if _is_half(value)), None)
        if dtype is None or _has_few_rows(name, args):
            return func(*args, **kwargs)
        wide = func(*tree_map(_widened, args), **tree_map(_widened, kwargs))
        if isinstance(wide, Tensor):
            return wide.to(dtype)
        narrow = _STAYS_WIDE.get(name, len(wide))
        return tuple(
            value.to(dtype) if number < narrow and isinstance(value, Tensor) else value
            for number, value in enumerate(wide)
        )

    def _of_parts(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation that may be made of others: inference_mode hands it on as a whole."""
        with self:
            made = func.decompose(*args, **kwargs)
        return func(*args, **kwargs) if made is NotImplemented else made


def _has_few_rows(name: str, args: Any) -> bool:
    """Whether it is a few rows by a weight: dot products, a loop that takes less time than to widen the weight."""
    if name not in _ROWS_AT:
        return False
    rows, weight = args[_ROWS_AT[name] : _ROWS_AT[name] + 2]
    few = _FEW_ROWS_OF_LARGE if 4 * weight.numel() > _LARGE_COPY else _FEW_ROWS
    return bool(weight.stride(0) == 1 and len(rows) <= few)


def _widened(value: Any) -> Any:
    return value.float() if _is_half(value) else value


def _is_half(value: Any) -> bool:
    # On the meta device it is a pass that stands for one of this CPU (estimation/passes.py).
    return isinstance(value, Tensor) and value.device.type in ("cpu", "meta") and value.dtype in _HALF


def _to_widen(
    model: PreTrainedModel, device: torch.device | None = None, autocast: torch.dtype | None = None
) -> set[torch.dtype]:
    """The dtypes that the model computes in, of which products are to be in float32."""
    if (device or input_device(model)).type != "cpu":
        return set()
    dtypes = {parameter.dtype for parameter in model.parameters()}
    return {dtype for dtype in dtypes | {autocast} if dtype is not None and needs_upcast(dtype)}


def _is_active() -> bool:
    return any(isinstance(mode, _Upcast) for mode in _get_current_dispatch_mode_stack())
