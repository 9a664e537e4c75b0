"""Options that are fields of the configuration, made from each field's type, docstring entry and default.

tyro, jsonargparse and HfArgumentParser were tried. None keeps options that were not given apart from defaults, so that
a file can lose to the command line and a preset in it to `--preset`, nor writes lists as `--rounds 0.2,0.35`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from functools import cache
from typing import Any, TypeVar, get_args, get_type_hints

from docstring_parser import parse

from gradprobe_hf.cli.options import OPTIONS, VerbParser, given
from gradprobe_hf.cli.recipe import RecipeError
from gradprobe_hf.cli.values import kind, reader, with_line_breaks
from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.config.options import Options
from gradprobe_hf.config.presets import METHOD
from gradprobe_hf.config.recovery import RecoveryConfig
from gradprobe_hf.config.values import CHOICES

AnyOptions = TypeVar("AnyOptions", bound=Options)
# The first field under each heading; those that follow it in the configuration stand there too.
HEADINGS = {
    "sparsity": "the target",
    "score": "the method",
    "order": "in which steps",
    "include": "which matrices",
    "task": "data",
    "batch_size": "memory",
    "save_every": "long runs",
}
HEADINGS_OF_RECOVERY = {
    "steps": "the method",
    "task": "data",
    "teacher_top_k": "memory",
    "save_steps": "long runs",
}
CONFIG_FIELDS = tuple(field.name for field in fields(GradProbeConfig))
RECOVERY_FIELDS = tuple(field.name for field in fields(RecoveryConfig))
_TEXTS = ("text_template", "document_separator")
PRESET_FIELDS = ("preset", *METHOD, "dense_target")


def add_config_options(parser: VerbParser, without: Collection[str] = ()) -> None:
    """An option for every field `without` some, and --config for a file of them."""
    _add_file(parser, GradProbeConfig)
    add_fields(parser, [name for name in CONFIG_FIELDS if name not in without])


def add_fields(parser: VerbParser, names: Collection[str]) -> None:
    """An option for each of these fields."""
    _add_fields(parser, GradProbeConfig, names, HEADINGS)


def add_recovery_options(parser: VerbParser) -> None:
    """An option for every field of the configuration of a recovery, and --config for a file of them."""
    _add_file(parser, RecoveryConfig)
    _add_fields(parser, RecoveryConfig, RECOVERY_FIELDS, HEADINGS_OF_RECOVERY)


def _add_file(parser: VerbParser, config: Any) -> None:
    parser.add_options("config")
    parser.configuration = config


def _add_fields(parser: VerbParser, config: Any, names: Collection[str], headings: Mapping[str, str]) -> None:
    hints, heading = get_type_hints(config), ""
    for field in fields(config):
        heading = headings.get(field.name, heading)
        if field.name in names:
            settings = _settings(field.name, hints[field.name])
            repeatable = " (repeatable)" if settings.get("action") == "append" else ""
            parser.add_option(heading, field.name, help=help_of(field, config) + repeatable, **settings)


def _settings(name: str, hint: Any) -> dict[str, Any]:
    """How argparse reads the field. Choices are looked up now: a table may have another row."""
    if name in CHOICES:
        choices = tuple(CHOICES[name])
        return {"choices": choices, "type": type(choices[0])}
    if hint == Sequence[str]:
        return {"action": "append", "metavar": "PATTERN"}
    if name in _TEXTS:
        return {"metavar": "TEXT", "type": with_line_breaks}
    if hint is str:
        return {"metavar": name.upper()}
    settings = {"type": reader(hint), "metavar": kind(hint).metavar}
    if bool in (hint, *get_args(hint)):  # by itself it is on, as for a Trainer's script
        settings |= {"nargs": "?", "const": True}
    return settings


@cache
def help_of(field: Field[Any], config: Any = GradProbeConfig) -> str:
    """The first sentence of a field's entry, and its default: the sentence that begins with this word, or the value."""
    first, *others = re.split(r"(?<=\.) +(?=[A-Z`\d])", _entries(config).get(field.name, ""))
    default = next((re.sub(r"^Default:? ", "", one) for one in others if one.startswith("Default")), "")
    if not default and field.default not in (None, (), MISSING):
        default = ("off", "on")[field.default] if isinstance(field.default, bool) else str(field.default)
    text = first.rstrip(".") + (f" (default: {default.rstrip('.')})" if default else "")
    return _on_the_command_line(text).replace("%", "%%")


@cache
def _entries(config: Any) -> dict[str, str]:
    """Field -> its entry in the docstring, on one line."""
    found = parse(config.__doc__ or "").params
    return {entry.arg_name: " ".join((entry.description or "").split()) for entry in found}


def _on_the_command_line(text: str) -> str:
    """Spells what is in backticks as options: `update="admm"` is --update admm there."""
    known = {*CONFIG_FIELDS, *RECOVERY_FIELDS, *(name for rows in OPTIONS.values() for name in rows)}

    def word(found: re.Match[str]) -> str:
        if found[1] in known:
            return f"--{found[1].replace('_', '-')}{' ' if found[2] else ''}"
        return found[0].strip('"')

    def spelled(code: re.Match[str]) -> str:
        if code[1].startswith("{"):  # a dict is NAME=X,...
            return re.sub(r'"([^"]*)": ', r"\1=", code[1].strip("{}")).replace(", ", ",")
        return re.sub(r'"[^"]*"|\b(\w+)\b(=?)', word, re.sub(r", (?=\w+=)", " ", code[1]))

    return re.sub(r"`([^`]+)`", spelled, text)


def configuration(options: argparse.Namespace) -> GradProbeConfig:
    """The configuration of a pruning command; raises as `recovery_configuration`."""
    return _checked(GradProbeConfig, options, option_values(options))


def recovery_configuration(options: argparse.Namespace) -> RecoveryConfig:
    """That of a recovery: the recipe's options, with those of the command line over them.

    Raises:
        RecipeError: what is wrong stands in its file of options.
        ValueError: what is wrong stands on the command line.
    """
    return _checked(RecoveryConfig, options, dict(options.recipe) | given(options, *RECOVERY_FIELDS))


def _checked(config: type[AnyOptions], options: argparse.Namespace, values: Mapping[str, Any]) -> AnyOptions:
    try:
        return config.from_dict(values)
    except ValueError as error:
        if options.recipe and _error_of(config, options.recipe) == str(error):
            raise RecipeError(f"{options.config}: {error}") from error
        typed = given(options, *values)
        if named := [name for name in values if name not in typed and f"{name}=" in str(error)]:
            raise ValueError(f"{error} ({options.config} says {', '.join(named)}.)") from error
        raise


def _error_of(config: type[Options], values: Mapping[str, Any]) -> str | None:
    """What is wrong with these options by themselves."""
    try:
        config.from_dict(values)
    except ValueError as error:
        return str(error)
    return None


def option_values(options: argparse.Namespace) -> dict[str, Any]:
    """The recipe's options, with those of the command line over them."""
    values = dict(options.recipe)
    # They win over what an earlier one came to in the file.
    if options.preset is not None:
        values = {name: value for name, value in values.items() if name not in PRESET_FIELDS}
    if options.pattern is not None:
        if {options.pattern, values.get("pattern", "unstructured")} != {"unstructured"}:  # an n:m pattern implies one
            values.pop("sparsity", None)
        if values.get("preset") is not None and all(name in values for name in METHOD):
            # A file that was written names both the preset and the method it came to; of this pattern it is another.
            values = {name: value for name, value in values.items() if name == "preset" or name not in PRESET_FIELDS}
    return values | given(options, *CONFIG_FIELDS)
