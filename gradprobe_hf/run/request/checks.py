"""Request checks: arguments that cannot be meant, before a model is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.config.options import Options
from gradprobe_hf.data.sources import is_path, is_plain_text
from gradprobe_hf.data.text.mixture import is_mixture
from gradprobe_hf.data.text.text_options import SELF, TextOptions
from gradprobe_hf.model.loading.processing import is_empty
from gradprobe_hf.run.context import RunRequest
from gradprobe_hf.runtime.names_elsewhere import unknown_argument
from gradprobe_hf.runtime.option_checks import check_callable
from gradprobe_hf.runtime.paths import looks_like_path
from gradprobe_hf.runtime.processes import PATIENCE, join_processes

LONGEST_SHOWN = 200  # characters of a path that is not there; what is longer is a text in its place


def check_request(request: RunRequest, verb: Callable[..., Any]) -> None:
    """Raise for arguments that cannot be meant.

    Args:
        verb: the function that the user called; its arguments are what another name may stand for.

    Raises:
        TypeError: an argument that is another library's, or an option of the configuration.
        ValueError: a value that is wrong.
        FileNotFoundError: paths that are not there, all of them in one message.
    """
    check_names(request.from_pretrained_kwargs, verb, GradProbeConfig)
    check_callable("loss_fn", request.loss_fn, ("model", "batch"))
    check_processing_class(request.processing_class)
    if isinstance(request.calibration, bool) or request.evaluation is True:
        name = "evaluation" if request.evaluation is True else "calibration"
        raise ValueError(f"{name} must be text or batches, got bool {getattr(request, name)!r}.")
    with join_processes(PATIENCE).telling():  # a path may be missing on one of several machines
        check_paths(request.model_or_id, {"calibration": request.calibration, "evaluation": request.evaluation})
    calibration = SELF if request.calibration is None else request.calibration
    check_columns(TextOptions.of(request.config), calibration, request.evaluation)


def check_processing_class(given: Any) -> None:
    """Raise ValueError for what is no tokenizer or processor, and for a tokenizer without words; None is fine."""
    if given is not None and not callable(given) and not hasattr(given, "tokenizer"):
        named = repr(given) if isinstance(given, (str, int, float, Path)) else type(given).__name__
        raise ValueError(
            f"processing_class must be a tokenizer or a processor, got {named}; AutoTokenizer.from_pretrained loads "
            "one by its name."
        )
    if is_empty(given):
        raise ValueError(
            f"the {type(given).__name__} given as processing_class knows no words: transformers makes such a one where "
            "the files of the vocabulary are missing. Load it from where they are, the base model say."
        )


def check_names(given: Mapping[str, object], verb: Callable[..., Any], config: type[Options]) -> None:
    """Raise TypeError for another name of an argument of the verb, and for an option of its configuration."""
    arguments = [name for name in inspect.signature(verb).parameters if name != "from_pretrained_kwargs"]
    options = [field.name for field in fields(config)]
    for name, value in given.items():
        if said := unknown_argument(name, value, options, [*arguments, "dtype", "device_map"], config.elsewhere):
            raise TypeError(f"{verb.__name__}: {said}")


def check_columns(options: TextOptions, *texts: Any) -> None:
    """Raise ValueError where columns are named and none of the texts can have any: what is asked for would be ignored.

    Args:
        texts: all that are read with these options, mixtures too; None and False are none.
    """
    given = [text for text in texts if text is not None and text is not False]
    parts = [part for text in given for part in (text if is_mixture(text) else [text])]
    if not parts or not all(map(is_plain_text, parts)):
        return
    shown = ", ".join(str(part) if isinstance(part, (str, Path)) else f"{len(part)} texts" for part in parts)
    for name in ("text_column", "text_template"):
        if (value := getattr(options, name)) is not None:
            raise ValueError(
                f"{name}={value!r} has no effect here: it belongs to a data set with columns, and plain text has none "
                f"({shown}). Leave {name} unset."
            )


def check_paths(model_or_id: Any, texts: Mapping[str, Any], **others: Any) -> None:
    """Raise FileNotFoundError for the paths of a model and of texts that are not there, all at once.

    Args:
        texts: argument -> what was passed as it; looked at where it can only be a path.
        others: argument -> another model.
    """
    models = {"model_or_id": model_or_id, **others}
    named = [(name, model) for name, model in models.items() if _is_missing(model, looks_like_path)]
    for name, value in texts.items():
        parts = value if is_mixture(value) else [value]
        named += [(name, part) for part in parts if _is_missing(part, is_path)]
    missing = {name: _shown(str(value)) for name, value in named}
    if not missing:
        return
    shown = ", ".join(f"{name}={value!r}" for name, value in missing.items())
    remedies = ["A model is a checkpoint folder or a Hub id 'user/name'."] if missing.keys() - texts.keys() else []
    if missing.keys() & texts.keys():
        remedies.append(
            "Text is a file or a folder of files, a Hub dataset 'id[:config[:split]]', 'pydoc' or 'self'; in Python "
            "texts themselves are a list of them."
        )
    raise FileNotFoundError(f"no such file or folder: {shown}. {' '.join(remedies)}")


def _is_missing(value: Any, is_meant: Callable[[str], bool]) -> bool:
    """Args: is_meant: whether a text is meant as a path."""
    if isinstance(value, Path) or (isinstance(value, str) and is_meant(value)):
        try:
            return not Path(value).expanduser().exists()
        except OSError:  # too long for a name
            return True
    return False


def _shown(value: str) -> str:
    return value if len(value) <= LONGEST_SHOWN else f"{value[:LONGEST_SHOWN]}..."
