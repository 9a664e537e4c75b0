"""A smaller checkpoint: structures are cut out while the shards are written, and the result is looked at.

What was written is loaded as a user would, by `from_pretrained`, and has to compute what the masked model does.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from gradprobe_hf.estimation.machine import fits
from gradprobe_hf.model.files.saving import Smaller, save_in_shards
from gradprobe_hf.model.parameters import is_offloaded
from gradprobe_hf.model.pooler import without_pooler
from gradprobe_hf.run.shapes.equality import MaskedOutputs
from gradprobe_hf.structures.removal import Removal
from gradprobe_hf.structures.shapes import smaller_config


def save_smaller(folder: Path, model: PreTrainedModel, removal: Removal) -> None:
    """Write what is left of a model whose masked weights are zero now.

    Raises:
        RuntimeError: what was written does not compute what the masked model does.
    """
    config = smaller_config(model.config, removal)
    save_in_shards(folder, model, smaller=Smaller(config, removal.name, removal.tensor))
    check_smaller(folder, model)


def is_written_again(model: PreTrainedModel) -> bool:
    """Whether looking at a smaller checkpoint takes its size on the disk once more: a model that is offloaded is loaded
    from there, and transformers writes what it does not read as it is stored, such as fused experts."""
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    return is_offloaded(model) and any(isinstance(one, WeightConverter) for one in conversions)


def check_smaller(folder: Path, model: PreTrainedModel) -> None:
    """Raise RuntimeError unless the checkpoint loads without a key too many or too few, and computes the same."""
    masked = MaskedOutputs.of(model)
    # The result of a long run is not lost because there is no room for a second model beside it.
    nbytes = sum(path.stat().st_size for path in folder.glob("*.safetensors")) * (2 if masked.wide else 1)
    from_disk = is_offloaded(model) or not fits(nbytes, torch.device("cpu"))
    # Where there is room (`check_room`): the system's folder for temporary files may be small, or in memory.
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.check-", dir=folder.parent) as scratch:
        placed: dict[str, Any] = {"device_map": {"": "disk"}, "offload_folder": scratch} if from_disk else {}
        cls: Any = type(model)
        loaded, info = cls.from_pretrained(
            folder,
            dtype=masked.dtype,
            attn_implementation=model.config._attn_implementation,
            output_loading_info=True,
            **without_pooler(model),
            **placed,
        )
        wrong = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
        if wrong:
            raise RuntimeError(f"the smaller model does not load as it was written: {wrong}. Nothing was kept of it.")
        devices = {parameter.device for parameter in model.parameters()}
        if not from_disk and len(devices) == 1 and fits(nbytes, *devices):
            loaded = loaded.to(*devices)
        difference = masked.difference(loaded)
    if difference is not None:
        raise RuntimeError(f"{difference}. Nothing was kept of it.")
