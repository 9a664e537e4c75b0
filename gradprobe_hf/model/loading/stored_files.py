"""Files beside a model: in its folder, or in its repository at the commit that it was loaded from."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import extract_commit_hash

from gradprobe_hf.model.loading.checks import index_of

_FINDING = ("subfolder", "cache_dir", "token", "local_files_only")
# Types of plain weights, as headers of safetensors files call them.
_PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# What each model was loaded with. Beside the models, not in them: a token must not be saved with one.
_sources: weakref.WeakKeyDictionary[PreTrainedModel, dict[str, Any]] = weakref.WeakKeyDictionary()
_revisions: weakref.WeakKeyDictionary[PreTrainedModel, str | None] = weakref.WeakKeyDictionary()  # as they were named
_variants: weakref.WeakKeyDictionary[PreTrainedModel, str | None] = weakref.WeakKeyDictionary()

_folded: weakref.WeakKeyDictionary[PreTrainedModel, tuple[str, dict[str, Any]]] = weakref.WeakKeyDictionary()


def remember_folded(model: PreTrainedModel, adapter: str, source: Mapping[str, Any]) -> None:
    """Note the stored adapter that was folded into a model, and what it was loaded with: it has its own licence."""
    _folded[model] = adapter, {key: source[key] for key in (*_FINDING, "revision") if source.get(key) is not None}


def folded_into(model: PreTrainedModel) -> tuple[str, dict[str, Any]] | None:
    """The stored adapter that was folded into a model, and what it was loaded with; None of none."""
    return _folded.get(model)


def remember_source(model: PreTrainedModel, source: Mapping[str, Any]) -> None:
    """Note what a model was loaded with, of the keyword arguments of `from_pretrained`, for the files beside it."""
    _sources[model] = {key: source[key] for key in _FINDING if source.get(key) is not None}
    _revisions[model] = source.get("revision")
    _variants[model] = source.get("variant")


def source_of(model: PreTrainedModel) -> dict[str, Any]:
    """What was noted; nothing of a model that somebody else has loaded."""
    return _sources.get(model, {})


def loaded_revision(model: PreTrainedModel) -> str | None:
    """The branch, tag or commit that was asked for; None of none, and of a model that somebody else has loaded."""
    return _revisions.get(model)


def is_loaded_here(model: PreTrainedModel) -> bool:
    """Whether a model was loaded by its name in this run, so that nobody has trained it since."""
    return model in _sources


def stored_file(model: PreTrainedModel, file: str, subfolder: str | None = None) -> Path | None:
    """Where a file is that is stored beside a model; None where there is none, or nobody knows.

    Args:
        subfolder: of its folder or repository; by default the one that the model was loaded from.
    """
    name, commit = model.name_or_path, loaded_commit(model)
    if not name or (commit is None and not Path(name).is_dir()):
        return None
    where = source_of(model) | ({} if subfolder is None else {"subfolder": subfolder})
    try:
        # At a commit, what is in the cache, or known not to be there, is not asked for over the network.
        found = cached_file(name, file, revision=commit, _raise_exceptions_for_missing_entries=False, **where)
    except OSError:
        return None
    return None if found is None else Path(found)


def folded_file(model: PreTrainedModel, file: str) -> Path | None:
    """Where a file is that is stored beside the adapter that was folded into a model; None where there is none."""
    adapter, where = _folded.get(model, ("", {}))
    try:
        found = cached_file(adapter, file, _raise_exceptions_for_missing_entries=False, **where) if adapter else None
    except OSError:
        return None
    return None if found is None else Path(found)


def stored_weights(model: PreTrainedModel) -> list[Path]:
    """The safetensors files that a model was loaded from, of its variant if one was asked for; none of other files."""
    if (file := stored_file(model, of_variant(SAFE_WEIGHTS_NAME, _variants.get(model)))) is not None:
        return [file]
    index = stored_file(model, of_variant(SAFE_WEIGHTS_INDEX_NAME, _variants.get(model)))
    files = [] if index is None else [index.parent / name for name in sorted(set(index_of(index).values()))]
    return files if all(file.is_file() for file in files) else []


def of_variant(file: str, variant: str | None) -> str:
    """What transformers calls a file of a variant.

    >>> of_variant("model.safetensors", "fp16"), of_variant("model.safetensors.index.json", "fp16")
    ('model.fp16.safetensors', 'model.safetensors.index.fp16.json')
    """
    stem, _, kind = file.rpartition(".")
    return file if variant is None else f"{stem}.{variant}.{kind}"


def stored_dtype(model: PreTrainedModel) -> torch.dtype | None:
    """The type of most weights in the first safetensors file of a model; None of other files and other types.

    The configuration may name another, and that is the one that transformers loads them in.
    """
    files = stored_weights(model)
    if not files:
        return None
    found: Counter[str] = Counter()
    with safe_open(files[0], framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118, a handle is no dict
            one = tensors.get_slice(name)
            found[one.get_dtype()] += math.prod(one.get_shape())
    return _PLAIN.get(found.most_common(1)[0][0]) if found else None


def loaded_commit(model: PreTrainedModel) -> str | None:
    """The commit of the repository that a model was loaded from; None of a folder, or where nobody knows.

    Of a model that somebody else has loaded it is that of the main branch in the cache.
    """
    known = getattr(model.config, "_commit_hash", None)
    return known or cached_commit(model.name_or_path, **source_of(model))


def cached_commit(name: str, file: str = CONFIG_NAME, **source: Any) -> str | None:
    """The commit that a file of a repository is cached at; None where it is not, and of a folder.

    transformers told it by `config._commit_hash` before 5.23.

    Args:
        source: revision, subfolder and cache_dir that it was loaded with.
    """
    if not name or Path(name).is_dir():
        return None
    where = {key: source[key] for key in ("revision", "subfolder", "cache_dir") if source.get(key)}
    try:
        found = cached_file(name, file, local_files_only=True, _raise_exceptions_for_missing_entries=False, **where)
    except (OSError, ValueError):  # not cached, or no name of a repository
        return None
    return extract_commit_hash(found, None)
