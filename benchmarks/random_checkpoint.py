"""A checkpoint of Mistral-7B's shape with random weights: what memory is measured on needs no trained ones."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import MistralConfig, PreTrainedModel

from gradprobe_hf.model.files.saving import LARGEST_SHARD
from gradprobe_hf.model.loading.load import load_config, skeleton


def mistral_config() -> MistralConfig:
    return MistralConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=32768,
        sliding_window=None,
        architectures=["MistralForCausalLM"],
        dtype="bfloat16",
    )


def write_random_checkpoint(folder: Path, config: MistralConfig) -> None:
    """Random bfloat16 weights, made shard by shard: the model is never in memory. Written whole, or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        whole = Path(scratch) / "whole"
        whole.mkdir()
        weight_map: dict[str, str] = {}
        for number, shapes in enumerate(_shards(skeleton(config))):
            name = f"model-{number:05d}.safetensors"
            save_file({key: _random(shape, generator) for key, shape in shapes.items()}, whole / name, {"format": "pt"})
            weight_map |= dict.fromkeys(shapes, name)
        index = {"metadata": {}, "weight_map": weight_map}
        (whole / "model.safetensors.index.json").write_text(json.dumps(index))
        config.save_pretrained(whole)
        whole.rename(folder)


def _shards(model: PreTrainedModel) -> Iterator[dict[str, torch.Size]]:
    shard: dict[str, torch.Size] = {}
    size = 0
    for name, parameter in model.named_parameters():
        shard[name] = parameter.shape
        size += parameter.nbytes
        if size >= LARGEST_SHARD:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard


def _random(shape: torch.Size, generator: torch.Generator) -> Tensor:
    if len(shape) == 1:  # a norm
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02, generator=generator)


def random_tokens(model: str, num_samples: int, sequence_length: int, batch_size: int) -> list[dict[str, Tensor]]:
    """Batches of random tokens, which mean as much as text to random weights."""
    vocabulary = load_config(model).vocab_size
    ids = torch.randint(vocabulary, (num_samples, sequence_length), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": rows} for rows in ids.split(batch_size)]
