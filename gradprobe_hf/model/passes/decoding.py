"""Decoding: without the options of a checkpoint, and on a CPU with a cache whose buffers grow in pieces.

Keys and values are `[texts, heads, slots, width]`. A cache that grows by every token is copied for each, and a static
one is attended to whole, filled or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache, GenerationConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

from gradprobe_hf.model.parameters import is_offloaded

SLOTS = 64  # by which a cache grows
_TOKENS = ("bos_token_id", "eos_token_id", "decoder_start_token_id")


@contextmanager
def plain_generation(model: PreTrainedModel) -> Iterator[None]:
    """Greedy, and without the options of the checkpoint's generation config, which would forbid words, sharpen the
    distribution, run the model twice for a token or return something else. Arguments of `generate` do not cover them
    all."""
    own = model.generation_config
    model.generation_config = GenerationConfig(**{name: getattr(own, name, None) for name in _TOKENS})
    try:
        yield
    finally:
        model.generation_config = own


def growing_cache(model: PreTrainedModel, length: int) -> Cache | None:
    """For texts of `length` tokens; None for a model that needs a cache of its own kind."""
    # What transformers asks before it takes a static cache.
    if not getattr(model, "_can_compile_fullgraph", False) or is_offloaded(model):
        return None
    cache = StaticCache(config=model.config, max_cache_len=length)
    cache.layers = [_GrowingLayer(length) if _keeps_all(layer, length) else layer for layer in cache.layers]
    return cache


def _keeps_all(layer: Any, length: int) -> bool:
    """Whether it is of keys and values alone, and forgets none of so many, as a sliding window may."""
    return type(layer) in (StaticLayer, StaticSlidingWindowLayer) and layer.max_cache_len == length


class _GrowingLayer(StaticLayer):
    """Keys and values in buffers that are enlarged when they are full."""

    max_cache_len: int
    keys: Any  # None before the first update
    values: Any

    def __init__(self, length: int) -> None:
        super().__init__(max_cache_len=0)
        self.length = length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        slots = self._slots(key_states.shape[2])
        if self.is_initialized and slots > self.max_cache_len:
            more = (0, 0, 0, slots - self.max_cache_len)
            self.keys, self.values = pad(self.keys, more), pad(self.values, more)
        self.max_cache_len = slots
        return super().update(key_states, value_states, *args, **kwargs)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._slots(query_length), 0

    def get_max_length(self) -> int:
        return self.length

    def _slots(self, new: int) -> int:
        """That there will be with so many tokens more. The mask hides those that are not filled."""
        filled = int(self.cumulative_length) + new
        return min(-(-filled // SLOTS) * SLOTS, self.length)
