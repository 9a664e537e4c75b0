"""Watch: the bytes that are alive and the operations that are done while a piece of code runs, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

# glibc maps larger blocks one by one and gives them back when they are freed (mallopt(3), M_MMAP_THRESHOLD).
LARGEST_HEAP_BLOCK = 32 * 2**20


class Watch(TorchDispatchMode):
    """Counts from the beginning to the end of the `with`.

    Attributes:
        live: bytes of the tensors made since, and not freed. A view adds nothing.
        peak: the most that `live` has been.
        heap_peak: the most that was alive at once in blocks that a CPU's allocator takes from its heap.
        flops: floating-point operations of matrix products, convolutions and attention.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        """Args: known: tensors that are there already, like the weights, whose bytes are not counted."""
        super().__init__()
        self._met = {tensor.untyped_storage()._cdata for tensor in known}
        self.live = self.peak = self.flops = 0
        self.heap = self.heap_peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                self._meet(value.untyped_storage())
        if (count := _FLOPS.get(func._overloadpacket)) is not None:
            self.flops += count(*args, **kwargs, out_val=out)
        return out

    def _meet(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._met:
            return
        self._met.add(key)
        self._count(size, size < LARGEST_HEAP_BLOCK)
        weakref.finalize(storage, self._let_go, key, size).atexit = False

    def _let_go(self, key: int, size: int) -> None:
        self._met.discard(key)
        self._count(-size, size < LARGEST_HEAP_BLOCK)

    def _count(self, size: int, on_heap: bool) -> None:
        self.live += size
        self.heap += size * on_heap
        self.peak, self.heap_peak = max(self.peak, self.live), max(self.heap_peak, self.heap)


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """`Q K^T` and `P V`, `[sequences, heads, tokens, width]`; every query head, also where several share their keys."""
    sequences, heads, tokens, width = query.shape
    return 2 * sequences * heads * tokens * key.shape[2] * (width + value.shape[3])


def _attention_backward(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *___: Any, **__: Any) -> int:
    """`Q K^T` once more, and the gradients of Q, K, P and V: five products where forward has two."""
    return _attention(query, key, value) * 5 // 2


# torch's own counter does not know the CPU's attention, which stands for every fused one here.
_FLOPS = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
