"""Files beside a model: in its folder, or in its repository at the commit that it was loaded from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME, cached_file
from transformers.utils.hub import extract_commit_hash


def stored_file(model: PreTrainedModel, file: str, **source: Any) -> Path | None:
    """Where a file is that is stored beside a model; None where there is none, or nobody knows."""
    name, commit = model.name_or_path, loaded_commit(model)
    if not name or (commit is None and not Path(name).is_dir()):
        return None
    where = {key: source[key] for key in ("subfolder", "cache_dir", "token", "local_files_only") if key in source}
    try:
        # At a commit, what is in the cache, or known not to be there, is not asked for over the network.
        found = cached_file(name, file, revision=commit, _raise_exceptions_for_missing_entries=False, **where)
    except OSError:
        return None
    return None if found is None else Path(found)


def loaded_commit(model: PreTrainedModel) -> str | None:
    """The commit of the repository that a model was loaded from; None of a folder, or where nobody knows.

    Of a model that somebody else has loaded it is that of the main branch in the cache.
    """
    known = getattr(model.config, "_commit_hash", None)
    return known or cached_commit(model.name_or_path)


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
