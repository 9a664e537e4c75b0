"""Decoding on a CPU: with the cache that grows, a model computes what it does without one."""

from __future__ import annotations

import pytest
import torch

from gradprobe_hf.model.families import cache_name
from gradprobe_hf.model.passes import decoding
from gradprobe_hf.model.passes.decoding import growing_cache
from tests import cases


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_cache_grows_in_pieces_and_hides_what_is_not_filled(name, monkeypatch):
    monkeypatch.setattr(decoding, "SLOTS", 4)
    model, ids = cases.build(name), torch.arange(20).reshape(2, 10)
    cache, slots, logits = growing_cache(model, 10), [], []
    for first, last in ((0, 3), *((token, token + 1) for token in range(3, 10))):
        logits.append(model(ids[:, first:last], **{cache_name(model): cache}).logits)
        slots.append(cache.layers[0].keys.shape[2])
    torch.testing.assert_close(torch.cat(logits, 1), model(ids).logits)
    assert slots == [4, 4, 8, 8, 8, 8, 10, 10]


def test_a_sliding_window_that_is_shorter_than_the_text_forgets_as_before():
    model = cases.build("mixtral")
    model.config.sliding_window, model.config.layer_types = 4, ["sliding_attention"] * 2
    kinds = {length: {type(layer).__name__ for layer in growing_cache(model, length).layers} for length in (4, 5)}
    assert kinds == {4: {"_GrowingLayer"}, 5: {"StaticSlidingWindowLayer"}}
