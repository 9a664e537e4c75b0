"""Paths: what can only be the name of a file or folder, and is never explained as that of a repository; and `~`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

# Where huggingface_hub keeps a repository of models: models--me--name/snapshots/COMMIT. No name has "--" in it.
_CACHED = re.compile(r"models--(.+)")
# A repository has one slash at most.
_PATH = re.compile(r"[./~\\]|.*(\\|/.*/|\s)|.*\.(safetensors|bin|pt|pth|gguf|json|ya?ml|txt|jsonl|csv|parquet)$")


def looks_like_path(name: str) -> bool:
    r"""Whether a name can only be that of a file or folder.

    >>> [looks_like_path(name) for name in ("./model", "/models/mine", "runs/a/b", "C:\\model", "gpt2", "me/model.v1")]
    [True, True, True, True, False, False]
    """
    return _PATH.match(name) is not None


def folder_name(path: str | Path) -> str:
    """What a folder is called, one named as `.`, too: reports are published, and paths tell about the machine.

    A model that has no name, in memory say, has none here: "" would be the folder that one is in.
    """
    return Path(os.path.abspath(path)).name if str(path) else ""


def cached_repository(path: str | Path) -> str | None:
    """The repository whose snapshot a folder is, in the cache of huggingface_hub: what `snapshot_download` returns.

    >>> cached_repository("/cache/models--me--name/snapshots/0a1b"), cached_repository("/models/me/name")
    ('me/name', None)
    """
    above = Path(os.path.abspath(path)).parent
    found = _CACHED.fullmatch(above.parent.name) if above.name == "snapshots" else None
    return found[1].replace("--", "/") if found else None


def published_as(name: str) -> str:
    """What a report calls a model of this name or path: reports are published, and paths tell about the machine."""
    return cached_repository(name) or folder_name(name) if Path(name).is_dir() else name


def expanded(path: Any) -> Any:
    """A path with the home folder in place of its `~`: a shell leaves that in `--output=~/x`, and Python everywhere.

    What is no path, a model or None say, is returned as it is.
    """
    if isinstance(path, Path):
        return Path(os.path.expanduser(path))
    return os.path.expanduser(path) if isinstance(path, str) else path


def expanded_model(model_or_id: Any) -> Any:
    """A model's path `expanded`, where something is there: what is said of one that is not shows it as it was typed."""
    path = expanded(model_or_id)
    return path if isinstance(path, (str, Path)) and Path(path).exists() else model_or_id


def expanded_folder(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments for loading, with the path of their `offload_folder` `expanded`."""
    return {name: expanded(value) if name == "offload_folder" else value for name, value in kwargs.items()}
