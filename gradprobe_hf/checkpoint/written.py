"""Written files: whether they hold the model, told by their headers before the folder takes its place.

transformers stores some families under other names, in other pieces, than they have in memory, and what a model was
loaded from has a part in that. So the files are loaded as a user would load them, with tensors that have no values.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from gradprobe_hf.model.files.saving import quiet
from gradprobe_hf.model.loading.report import missing_weights
from gradprobe_hf.model.pooler import without_pooler

logger = logging.getLogger(__name__)


def check_written(folder: Path, model: PreTrainedModel) -> None:
    """Raise RuntimeError unless names, shapes and types in the files of a folder are those of the model's tensors."""
    stored = _headers(folder)
    if (difference := _other_type(stored, model) or _other_names(folder, stored, model)) is not None:
        raise RuntimeError(
            f"what was written is another model than this {type(model).__name__}: {difference}. Nothing was kept of "
            "it; the result in memory is as it was measured."
        )


def _headers(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder's safetensors files, on the meta device."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118, a handle is no dict
                found[name] = torch.empty_like(handle.get_tensor(name), device="meta")  # mapped: no byte is read
    return found


def _other_type(stored: Mapping[str, Tensor], model: PreTrainedModel) -> str | None:
    own = {name: value.dtype for name, value in model.state_dict().items() if hasattr(value, "dtype")}
    for name, tensor in stored.items():
        # Of what is stored in other pieces than it has in memory, any of the model's.
        wanted = {own[name]} if name in own else set(own.values())
        if tensor.dtype not in wanted:
            return f"{name} is {tensor.dtype} in the files, and {', '.join(map(str, wanted))} in the model"
    return None


def _other_names(folder: Path, stored: Mapping[str, Tensor], model: PreTrainedModel) -> str | None:
    cls: Any = type(model)
    try:
        with quiet():
            made, loading = cls.from_pretrained(
                None,
                config=type(model.config).from_pretrained(folder),
                state_dict=dict(stored),
                device_map={"": "meta"},
                output_loading_info=True,
                **without_pooler(model),
                ignore_mismatched_sizes=True,  # or it would raise, with no name of ours in it
            )
    except Exception as error:  # a class of the user's own, say, that takes other arguments
        logger.info("whether the files of %s load was not tried: %s", cls.__name__, error)
        return None
    for name, found, wanted in sorted(loading["mismatched_keys"]):
        return f"{name} is {list(found)} in the files, and {list(wanted)} in the model"
    if missing := missing_weights(made, loading):
        return f"the files have no {missing[0]}"
    unknown = sorted(loading["unexpected_keys"])
    return f"the files have {unknown[0]}, which is none of its tensors" if unknown else None
