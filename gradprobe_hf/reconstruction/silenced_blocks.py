"""Silenced blocks: those that go whole. Their matrices and biases are zero: they hand on what they are given."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gradprobe_hf.model.targets import Target, block_vectors
from gradprobe_hf.reconstruction.new_weights import NewWeights


def silent_biases(model: PreTrainedModel, block: str) -> dict[str, Tensor]:
    """Zeros for every bias of a block, `[n]`, by parameter."""
    found = {}
    for vector in bias_vectors(model, block):
        stored = model.get_parameter(vector.parameter)
        found[vector.name] = torch.zeros(stored.shape, dtype=stored.dtype)
    return found


def bias_vectors(model: PreTrainedModel, block: str) -> list[Target]:
    """The biases of a block."""
    return [vector for vector in block_vectors(model, block) if vector.name.endswith("bias")]


def silenced(model: PreTrainedModel, blocks: Iterable[str]) -> NewWeights:
    """New values of the biases of these blocks."""
    found = NewWeights()
    for block in blocks:
        zeros = silent_biases(model, block)
        for vector in bias_vectors(model, block):
            found.add_vector(vector, zeros[vector.name])
    return found
