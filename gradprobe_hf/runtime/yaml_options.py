"""Recipes: YAML files of options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml


class _Options(yaml.SafeLoader):
    """YAML as it looks.

    YAML 1.1 reads `2:4` as a number to the base of 60, and `1e-3` as text: here they are a pattern and a number. And of
    a key that stands there twice it takes the last, where nobody knows which one was meant.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} stands there twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Options.yaml_implicit_resolvers = {
    first: [(tag, found) for tag, found in resolvers if tag.rsplit(":", 1)[1] not in ("int", "float")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Options.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?\d+$"), list("-+0123456789"))
_Options.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?$"), list("-+.0123456789")
)

# Nor is 010 eight.
_Options.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file of options; an empty file is an empty mapping.

    Raises:
        OSError: no such file.
        ValueError: it holds something else.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no such file: {str(path)!r}. A file of options is YAML, like 'sparsity: 0.5'.")
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_Options) or {}
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no YAML: it is not text in UTF-8 ({error.reason}).") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a mapping of options, like 'sparsity: 0.5', got {type(values).__name__}.")
    return values
