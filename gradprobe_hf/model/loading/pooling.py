"""Pooling: how sentence-transformers makes one vector of a text of those of its tokens.

It writes so beside the model: `modules.json` lists what is done behind it, each with a folder of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from gradprobe_hf.model.loading.stored_files import stored_file
from gradprobe_hf.tasks.embeddings import Pooling

MODULES = "modules.json"
# What it calls the ways that are known here, in files of before 5.3 and of since then.
_WAYS: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "mean": "mean",
    "cls": "cls",
    "lasttoken": "last",
}


def is_for_embeddings(model: PreTrainedModel) -> bool:
    """Whether sentence-transformers' files are beside the model, whatever class it was loaded as."""
    return stored_file(model, MODULES) is not None


def pooling_of(model: PreTrainedModel) -> Pooling:
    """As those files say; the mean where there are none, as sentence-transformers does then.

    Raises:
        ValueError: in a way that is not known here, or files that cannot be read.
    """
    stored = stored_file(model, MODULES)
    modules = [] if stored is None else _read(stored)
    folder = next((one["path"] for one in modules if one["type"].endswith("Pooling")), None)
    path = None if folder is None else stored_file(model, f"{folder}/config.json")
    if path is None:
        return "mean"
    told = _read(path)
    new = told.get("pooling_mode", [name for name, on in told.items() if on is True and "_mode_" in name])
    named = [new] if isinstance(new, str) else new
    if len(named) != 1 or named[0] not in _WAYS:
        raise ValueError(
            f"{model.name_or_path} makes a text's embedding by {' and '.join(map(str, named)) or 'no pooling'} "
            f"({folder}/config.json), and known here are the mean of the tokens, the first (cls), and the last: give a "
            "loss_fn."
        )
    return _WAYS[named[0]]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path}, in which sentence-transformers says how texts are pooled, is no JSON: {error}. Mend it, or give "
            "a loss_fn."
        ) from error
