"""What sentence-transformers makes of a model: how one vector of a text comes of those of its tokens, and of how many.

It writes so beside the model: `modules.json` lists what is done behind it, each with a folder of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from gradprobe_hf.model.loading.checks import MODULES, RESAVED
from gradprobe_hf.model.loading.stored_files import source_of, stored_file
from gradprobe_hf.tasks.embeddings import Pooling

_KIND = "config_sentence_transformers.json"
_LIMITS = "sentence_bert_config.json"  # of BERTs and all others
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
    """Whether sentence-transformers' files beside the model say so, whatever class it was loaded as."""
    return stored_file(model, MODULES) is not None and not is_cross_encoder(model)


def is_cross_encoder(model: PreTrainedModel) -> bool:
    """Whether sentence-transformers' files beside the model say that it compares two texts, and embeds none."""
    return bool(_told(model, _KIND).get("model_type") == "CrossEncoder")


def embedded_tokens(model: PreTrainedModel) -> int | None:
    """At how many tokens of a text sentence-transformers cuts it; None where no file beside the model says so."""
    limit = _told(model, _LIMITS).get("max_seq_length") if is_for_embeddings(model) else None
    return limit if type(limit) is int and limit > 1 else None


def lowers_case(model: PreTrainedModel) -> bool:
    """Whether sentence-transformers lower-cases every text, before the tokenizer."""
    return is_for_embeddings(model) and _told(model, _LIMITS).get("do_lower_case") is True


def pooling_of(model: PreTrainedModel) -> Pooling:
    """As those files say; the mean where there are none, as sentence-transformers does then.

    Raises:
        ValueError: in a way that is not known here, files that cannot be read, or that are in a folder above.
    """
    stored = stored_file(model, MODULES)
    modules = [] if stored is None else _read(stored)
    if stored is None:
        _check_above(model)
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


def _check_above(model: PreTrainedModel) -> None:
    """Raise ValueError for the first module of a model that sentence-transformers once wrote into folders alone."""
    folder = (source_of(model).get("subfolder") or "").strip("/")
    if folder:
        above = stored_file(model, MODULES, "")
    elif model.name_or_path and (path := Path(model.name_or_path).absolute()).is_dir():
        folder, above = path.name, path.parent / MODULES
    else:
        return
    if above is None or not above.is_file() or _first_of(above) != folder:
        return
    raise ValueError(
        f"{folder!r} is one module of a sentence-transformers model, whose pooling is beside it, where the pruned "
        f"model would not have it: {RESAVED}."
    )


def _first_of(modules: Path) -> str | None:
    """The folder of the first module of such a list; None of a file of this name that is none."""
    try:
        return str(_read(modules)[0]["path"]).strip("/")
    except (ValueError, LookupError, TypeError):
        return None


def _told(model: PreTrainedModel, file: str) -> dict[str, Any]:
    """What a file beside the model says; nothing where there is none, or one that sentence-transformers cannot read."""
    path = stored_file(model, file)
    try:
        found = {} if path is None else _read(path)
    except ValueError:
        found = {}
    return found if isinstance(found, dict) else {}


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path}, in which sentence-transformers says what it makes of a text, is no JSON: {error}. Mend it."
        ) from error
