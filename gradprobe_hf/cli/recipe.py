"""Recipes: a run in one file, with the model, the data and the output beside the options of the configuration."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from gradprobe_hf.cli.options import OPTIONS, CommandParser
from gradprobe_hf.cli.values import Mixture, mixture
from gradprobe_hf.runtime.names_elsewhere import PRUNING, unknown_option
from gradprobe_hf.runtime.yaml_options import read_yaml

# A file that names a file would be read, or not, in an order that nobody knows.
_OF_THE_COMMAND = ("config", "help", "json", "quiet", "verb", "run")


class RecipeError(ValueError):
    """What is wrong in a file of options; its keys are not spelled as flags."""


def read_recipe(parser: CommandParser, options: argparse.Namespace) -> None:
    """Fill what the command line leaves out from the file of --config.

    `options.recipe` becomes what the configuration is made of, `options.from_recipe` what else was filled in.

    Raises:
        RecipeError: a key that is no option, or a value that is none of it.
        OSError: no such file.
    """
    options.recipe, options.from_recipe = {}, {}
    path = getattr(options, "config", None)
    if path is None:
        return
    actions = {action.dest: action for action in parser._actions if action.dest not in _OF_THE_COMMAND}
    known = [field.name for field in fields(parser.configuration)]
    for name, value in _read(path).items():
        if name in _OF_THE_COMMAND:
            raise RecipeError(f"{path}: {name!r} stands on the command line alone.")
        if name in known:
            options.recipe[name] = value
        elif name in actions:
            # The command line wins: a switch that is off was not given, and --evaluation none (False) was.
            if getattr(options, name) is None or (actions[name].nargs == 0 and not getattr(options, name)):
                options.from_recipe[name] = _value(path, actions[name], value)
        elif not _of_another_verb(parser, name):
            elsewhere = parser.configuration.elsewhere
            raise RecipeError(f"{path}: {unknown_option(name, [*known, *actions], elsewhere)}")
    vars(options).update(options.from_recipe)


def _read(path: str) -> dict[str, Any]:
    try:
        return read_yaml(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"--config: {error}") from error


def named_in(message: str, options: argparse.Namespace) -> str | None:
    """The message with the file and the key, if what it is about stands in a recipe."""
    for name, value in getattr(options, "from_recipe", {}).items():
        # `True` may be another switch's.
        if (f"{name}={value!r}" if isinstance(value, bool) else repr(value)) in message:
            return f"{options.config}: {name}: {message}"
    return None


def _of_another_verb(parser: CommandParser, name: object) -> bool:
    """Whether a pruning run in a file has this, and this verb no use for it: `estimate` reads the recipe of one."""
    if parser.configuration.elsewhere is not PRUNING:
        return False
    return name not in _OF_THE_COMMAND and any(name in rows for rows in OPTIONS.values())


def _value(path: str, action: argparse.Action, value: Any) -> Any:
    """A value of the file as the command line would have it."""
    name = action.dest
    if action.nargs == 0:
        wanted, right = "true or false", isinstance(value, bool)
    elif isinstance(action, Mixture):
        wanted, right = "a text, or several with their weights", isinstance(value, (str, Mapping, list))
        if isinstance(value, list) and all(isinstance(one, str) for one in value):
            value = mixture(value)
    elif isinstance(value, Mapping):
        wanted, right = "text", name in ("device_map", "max_memory")
    else:
        wanted, right = "text", isinstance(value, str) or (name == "evaluation" and value is False)
    if not right:
        raise RecipeError(f"{path}: {name} must be {wanted}, got {value!r}.")
    if not isinstance(value, str) or not callable(action.type):
        return value
    try:
        return action.type(value)
    except argparse.ArgumentTypeError as error:
        raise RecipeError(f"{path}: {name}: {error}") from error
