"""Passes that begin where they have come to."""

from __future__ import annotations

import torch

from gradprobe_hf.model.passes.block_cache import BlockOutputCache, BlockSequence
from gradprobe_hf.model.targets import find_targets
from tests import cases


def test_a_prefix_starts_where_it_has_come_to():
    model = cases.build("t5").eval()
    batches = cases.batches("t5")
    targets = find_targets(model)
    sequence = BlockSequence.of(model, targets, batches[0])
    order = sequence.names
    assert order == tuple(f"{stack}.block.{i}" for stack in ("encoder", "decoder") for i in range(2))
    assert not sequence.read_later
    with torch.no_grad():
        wanted = [model(**batch).logits for batch in batches]
    for count in range(1, len(order) + 1):
        prefix = BlockOutputCache(model, batches, sequence)
        prefix.advance(order[:count])
        assert prefix.share == count / len(order)
        for number, batch in enumerate(batches):
            prefix.start_batch(number)
            with prefix.skipping(), torch.no_grad():
                assert torch.equal(model(**batch).logits, wanted[number])


def test_a_prefix_can_advance_step_by_step():
    model, batches = cases.build("llama"), cases.batches("llama")
    sequence = BlockSequence.of(model, find_targets(model), batches[0])
    prefix = BlockOutputCache(model, batches, sequence)
    for block in sequence.names:
        prefix.advance([block])
    prefix.start_batch(1)
    with torch.no_grad():
        wanted = model(**batches[1]).logits
        with prefix.skipping(), torch.no_grad():
            assert torch.equal(model(**batches[1]).logits, wanted)
