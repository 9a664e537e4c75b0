"""Recipes: YAML files of options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml


class _PlainNumbers(yaml.SafeLoader):
    """YAML 1.1 reads `2:4` as a number to the base of 60, and `1e-3` as text. Here they are a pattern and a number."""


_PlainNumbers.yaml_implicit_resolvers = {
    first: [(tag, found) for tag, found in resolvers if tag.rsplit(":", 1)[1] not in ("int", "float")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_PlainNumbers.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?\d+$"), list("-+0123456789"))
_PlainNumbers.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?$"), list("-+.0123456789")
)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file of options; an empty file is an empty mapping."""
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_PlainNumbers) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a mapping of options, like 'sparsity: 0.5', got {type(values).__name__}.")
    return values
