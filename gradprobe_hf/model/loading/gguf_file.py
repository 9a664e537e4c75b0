"""GGUF files: what they hold that transformers leaves out when it reads one, and computes without."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils import cached_file

_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_SCALING = ".rope.scaling."
_HEADER = 1 << 26  # bytes in which names are: a vocabulary of 250,000 tokens takes 10 MB


def check_positions(name: str, config: PreTrainedConfig, source: Mapping[str, Any]) -> None:
    """Raise ValueError where a file scales its rotary positions, and the configuration made of it does not.

    Such are the files of Llama 3.1 and later, and of models for long texts: another model would be measured.

    Args:
        source: what it is loaded with: `gguf_file`, and what finds that.
    """
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = (one.get("rope_type", "default") for one in (rope, *rope.values()) if isinstance(one, Mapping))
    if any(kind != "default" for kind in kinds):  # Gemma 4 has one for each kind of block
        return
    finding = {key: value for key, value in source.items() if key not in ("gguf_file", "trust_remote_code")}
    file = Path(str(cached_file(name, source["gguf_file"], **finding)))
    if found := _scaled_by(file):
        raise ValueError(
            f"gguf_file={source['gguf_file']!r} scales its rotary positions ({found}), which transformers does not "
            "read from GGUF: it would be another model. Load this model from its safetensors."
        )


def _scaled_by(file: Path) -> str | None:
    """The tensor or the key by which a file scales its positions."""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        # To parse a header takes seconds, and most have nothing of it.
        if not any(data.find(one.encode(), 0, _HEADER) >= 0 for one in (*_FACTORS, _SCALING)):
            return None
    from gguf import GGUFReader

    reader = GGUFReader(file)
    for tensor in reader.tensors:
        if tensor.name in _FACTORS and (tensor.data != 1).any():
            return str(tensor.name)
    values = {key.split(_SCALING)[1]: field.contents() for key, field in reader.fields.items() if _SCALING in key}
    kind, factor = values.get("type", "linear"), values.get("factor", 1.0)
    return None if kind == "none" or factor in (0, 1) else f"{kind} by {factor:g}"
