"""Adapters of a recovery: a model that trains -> the same with LoRA on the matrices that have a mask."""

from __future__ import annotations

import warnings

from torch import nn
from transformers import PreTrainedModel

from gradprobe_hf.model.adapters import ignore_old_names, imported_peft
from gradprobe_hf.model.targets import Target

LORA_ALPHA = 2  # times the rank: the scale of the product
_WITH_FUSED_KERNELS = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")  # types of configuration


def with_adapters(student: PreTrainedModel, targets: tuple[Target, ...], rank: int) -> nn.Module:
    """The model with LoRA adapters on every matrix that has a mask and is one of a linear module.

    Raises:
        ImportError: PEFT is not installed.
        ValueError: there is no such matrix.
    """
    peft = imported_peft()
    modules = [
        target.name.removesuffix(".weight")
        for target in targets
        if target.name == target.parameter
        and target.name.endswith(".weight")
        and not isinstance(student.get_submodule(target.name.removesuffix(".weight")), nn.Embedding)
        and not _read_past_its_module(student, target.name)
    ]
    if not modules:
        raise ValueError(
            f"lora_r={rank}: no matrix of the blocks of this {type(student).__name__} is one of a linear module; leave "
            "lora_r unset."
        )
    adapters = peft.LoraConfig(r=rank, lora_alpha=LORA_ALPHA * rank, lora_dropout=0.0, target_modules=modules)
    with warnings.catch_warnings():
        ignore_old_names()
        adapted: nn.Module = peft.get_peft_model(student, adapters)
    return adapted


def _read_past_its_module(model: PreTrainedModel, name: str) -> bool:
    """Whether fused kernels take a weight from its module, which then never runs: PEFT refuses to adapt it."""
    return model.config.model_type in _WITH_FUSED_KERNELS and name.split(".")[-2] in ("out_proj", "conv1d")
