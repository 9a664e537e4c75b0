"""Paths: what can only be the name of a file or folder, and is never explained as that of a repository."""

from __future__ import annotations

import re

# A repository has one slash at most.
_PATH = re.compile(r"[./~\\]|.*(\\|/.*/|\s)|.*\.(safetensors|bin|pt|pth|gguf|json|ya?ml|txt|jsonl|csv|parquet)$")


def looks_like_path(name: str) -> bool:
    r"""Whether a name can only be that of a file or folder.

    >>> [looks_like_path(name) for name in ("./model", "/models/mine", "runs/a/b", "C:\\model", "gpt2", "me/model.v1")]
    [True, True, True, True, False, False]
    """
    return _PATH.match(name) is not None
