"""Watch: bytes that are alive and floating-point operations while a piece of code runs, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

# glibc maps larger blocks one by one and unmaps them when they are freed; smaller ones come from its heap. 32 MiB is
# the limit that its threshold grows to as mapped blocks are freed (mallopt(3), M_MMAP_THRESHOLD).
LARGEST_HEAP_BLOCK = 32 * 2**20


class Watch(TorchDispatchMode):
    """Counts tensors and operations in the body of a `with`.

    A dispatch mode sees every operation below autograd, those of backward and of recomputation too. It counts storages,
    so that a view adds nothing, and a storage leaves the count when Python's last reference to it goes, which is when
    memory would be freed. On the meta device a storage has its size and no memory: the count is that of a real pass.

    Attributes:
        live: bytes of the storages made in the `with` and still alive.
        peak: the most that `live` has been.
        heap, heap_peak: the same of storages small enough for a CPU allocator's heap.
        flops: floating-point operations of matrix products, convolutions and attention.

    Example:
        >>> with Watch([]) as watch:
        ...     product = torch.ones(4, 8, device="meta") @ torch.ones(8, 2, device="meta")
        >>> watch.live, watch.peak, watch.flops
        (32, 224, 128)
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        """Args: known: tensors that are there already, whose bytes are not counted: weights, and the batch."""
        super().__init__()
        # Addresses of C++ storages: the storages themselves, in a set, would stay alive.
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}
        self.live = self.peak = self.flops = 0
        self.heap = self.heap_peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                self._add(value.untyped_storage())
        if (count := _FLOPS.get(func._overloadpacket)) is not None:
            self.flops += count(*args, **kwargs, out_val=out)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self._count(size, size < LARGEST_HEAP_BLOCK)
        # Torch keeps a storage's Python wrapper for as long as the storage: its finalizer runs when the last tensor or
        # graph that holds the storage is gone, also where only C++ held it.
        weakref.finalize(storage, self._remove, key, size).atexit = False

    def _remove(self, key: int, size: int) -> None:
        self._seen.discard(key)  # the next storage may get this address
        self._count(-size, size < LARGEST_HEAP_BLOCK)

    def _count(self, size: int, on_heap: bool) -> None:
        self.live += size
        self.heap += size * on_heap
        self.peak, self.heap_peak = max(self.peak, self.live), max(self.heap_peak, self.heap)


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Operations of `Q K^T` and `P V`; all are `[sequences, heads, tokens, width]`.

    Counted by query heads: grouped-query attention shares keys, not products.
    """
    sequences, heads, tokens, width = query.shape
    return 2 * sequences * heads * tokens * key.shape[2] * (width + value.shape[3])


def _attention_backward(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *___: Any, **__: Any) -> int:
    """`Q K^T` once more, and the gradients of Q, K, P and V: five products where forward has two."""
    return _attention(query, key, value) * 5 // 2


# `FlopCounterMode` has a formula for each of CUDA's fused attentions and none for the CPU's, which stands for all of
# them here (see stand_ins.py).
_FLOPS = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
