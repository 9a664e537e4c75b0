"""Files beside a model: in its folder, or in its repository at the commit that it was loaded from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import cached_file


def stored_file(model: PreTrainedModel, file: str, **source: Any) -> Path | None:
    """Where a file is that is stored beside a model; None where there is none, or nobody knows."""
    name, commit = model.name_or_path, getattr(model.config, "_commit_hash", None)
    if not name or (commit is None and not Path(name).is_dir()):
        return None
    where = {key: source[key] for key in ("subfolder", "cache_dir", "token", "local_files_only") if key in source}
    try:
        # At a commit, what is in the cache, or known not to be there, is not asked for over the network.
        found = cached_file(name, file, revision=commit, _raise_exceptions_for_missing_entries=False, **where)
    except OSError:
        return None
    return None if found is None else Path(found)
