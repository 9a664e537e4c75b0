"""Ties: what transformers lists as one weight of an offloaded model, and the files hold as two.

In memory transformers compares the two as it loads them, and takes them off its list where they differ. Of weights on
disk it takes the configuration's word (`PreTrainedModel.tie_weights`), while a pass reads each from where it is stored.
"""

from __future__ import annotations

import torch
from accelerate.utils import OffloadedWeightsLoader
from torch import nn

from gradprobe_hf.model.parameters import OffloadedParameter, offloaded_parameter


def forget_false_ties(model: nn.Module) -> None:
    """Take off the list of tied weights those that are offloaded with values of their own, as in memory."""
    listed: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    for name, other in list(listed.items()):
        one, two = _offloaded(model, name), _offloaded(model, other)
        if one is not None and two is not None and _differ(one, two):
            del listed[name]


def _offloaded(model: nn.Module, name: str) -> OffloadedParameter | None:
    """Where its values are, if they are outside the model now and under this name."""
    parameter = dict(model.named_parameters(remove_duplicate=False)).get(name)
    if parameter is None or not parameter.is_meta or (found := offloaded_parameter(model, name)) is None:
        return None
    store, key = found.store
    return found if key in list(store) else None  # `in store` would read it


def _differ(one: OffloadedParameter, two: OffloadedParameter) -> bool:
    if (place := _place(one)) is not None and place == _place(two):
        return False  # as is usual: nothing is read
    first, second = one.read(), two.read()
    return first.shape != second.shape or not torch.equal(first, second.to(first))


def _place(offloaded: OffloadedParameter) -> tuple[str, str] | None:
    """The safetensors file and the name in it; None: it is stored elsewhere, under its own name."""
    store, key = offloaded.store
    entry = store.index.get(key, {}) if isinstance(store, OffloadedWeightsLoader) else {}
    return (entry["safetensors_file"], entry["weight_name"]) if entry.get("safetensors_file") else None
