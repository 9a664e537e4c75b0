"""Silenced blocks: those that go whole. Their matrices and biases are zero: they hand on what they are given."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gradprobe_hf.model.targets import block_biases
from gradprobe_hf.reconstruction.new_weights import NewWeights


def silent_biases(model: PreTrainedModel, block: str) -> dict[str, Tensor]:
    """Zeros for every bias of a block, by parameter and of its shape."""
    found = {}
    for bias in block_biases(model, block):
        stored = model.get_parameter(bias.parameter)
        found[bias.name] = torch.zeros(stored.shape, dtype=stored.dtype)
    return found


def silenced(model: PreTrainedModel, blocks: Iterable[str]) -> NewWeights:
    """New values of the biases of these blocks."""
    found = NewWeights()
    for block in blocks:
        zeros = silent_biases(model, block)
        for bias in block_biases(model, block):
            found.add_vector(bias, zeros[bias.name])
    return found
