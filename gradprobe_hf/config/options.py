"""Options: what both configurations share, options by name, to and from dictionaries and YAML files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import yaml

from gradprobe_hf.runtime.names_elsewhere import NamesElsewhere, unknown_option
from gradprobe_hf.runtime.yaml_options import read_yaml


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options by name. Attributes: `elsewhere`: what others call them."""

    elsewhere: ClassVar[NamesElsewhere]

    def __new__(cls, *values: Any, **options: Any) -> Self:
        """Raises TypeError for what is no option; a dataclass would not say which one it may be."""
        known = [field.name for field in fields(cls)]
        if values:
            name, value = cls.elsewhere.example
            raise TypeError(f"options are given by their names, like {name}={value!r}, got {values[0]!r}.")
        for name in options:
            if name not in known:
                raise TypeError(f"{cls.__name__}: {unknown_option(name, known, cls.elsewhere)}")
        return super().__new__(cls)

    def make_plain(self) -> None:
        """NumPy's numbers become Python's, a sweep's over `np.linspace` say: neither YAML nor JSON knows them."""
        for field in fields(self):
            object.__setattr__(self, field.name, _plain(getattr(self, field.name)))

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Each option as it is where nobody says anything about it."""
        return {field.name: field.default for field in fields(cls)}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` gives the same configuration back."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The configuration of these options.

        Raises:
            ValueError: an option that there is not, or a value that is wrong.
        """
        if not isinstance(values, Mapping):
            raise ValueError(
                f"options are a dict, like {dict([cls.elsewhere.example])!r}, got {type(values).__name__}."
            )
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise ValueError(unknown_option(name, known, cls.elsewhere))
        return cls(**values)

    def to_yaml(self, path: str | Path) -> None:
        """Write all options to a YAML file."""
        Path(path).write_text(yaml.safe_dump(self.to_dict(), sort_keys=False), encoding="utf-8")

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """The configuration in a YAML file.

        Raises:
            OSError: no such file.
            ValueError: not YAML, or not a configuration; the message names the file.
        """
        return cls._of_file(path, read_yaml(path))

    @classmethod
    def _of_file(cls, path: str | Path, values: Any) -> Self:
        try:
            return cls.from_dict(values)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value
