"""Adapters of a recovery: a model that trains -> the same with LoRA on the matrices that have a mask."""

from __future__ import annotations

import warnings

from torch import nn
from transformers import PreTrainedModel

from gradprobe_hf.model.families import is_taken_by_kernels
from gradprobe_hf.model.loading.adapters import ignore_old_names, imported_peft
from gradprobe_hf.model.targets import Target

LORA_ALPHA = 2  # times the rank: the scale of the product


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
        and not is_taken_by_kernels(student, target.name)  # PEFT refuses to adapt these
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
