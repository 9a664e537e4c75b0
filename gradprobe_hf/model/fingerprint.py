"""Fingerprint: whether a model is the one that it was, by a few rows of each of its weights."""

from __future__ import annotations

import json
from hashlib import sha256

import torch
from torch import nn
from transformers import PreTrainedModel

from gradprobe_hf.model.parameters import own_parameters, read_weight
from gradprobe_hf.model.passes.rescaling import restore_scale

SAMPLED_ROWS = 8  # of each matrix, or a few more: enough to tell two models apart, and not to read 14 GB


# What a configuration says of where a model is from, and how it is run, and not of what it computes.
_NOT_COMPUTED = ("_name_or_path", "_commit_hash", "transformers_version", "gradprobe", "architectures")


def model_fingerprint(model: PreTrainedModel) -> str:
    """`weights_fingerprint`, and what the configuration says: another `rope_theta` makes another model of them."""
    values = {name: value for name, value in model.config.to_dict().items() if name not in _NOT_COMPUTED}
    said = json.dumps(values, sort_keys=True, default=str)
    return sha256(f"{weights_fingerprint(model)} {said}".encode()).hexdigest()


def weights_fingerprint(model: nn.Module) -> str:
    """What tells a model from others: a hash of its vectors, and of some rows of everything larger.

    It is the same where the model is offloaded; of a sharded model it is of this process's shards.
    """
    restore_scale(model)  # that it has divided some is not that it was changed
    digest = sha256()
    for name, _ in own_parameters(model):
        values = read_weight(model, name)
        digest.update(f"{name} {tuple(values.shape)} {values.dtype}".encode())
        if values.dim() > 1:
            rows = values.flatten(0, -2)
            # From all over it: the first rows of an embedding are those of tokens that hardly occur.
            values = rows[:: max(1, len(rows) // SAMPLED_ROWS)]
        digest.update(values.contiguous().flatten().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
