"""The files of a checkpoint, told by their names from those that somebody has put beside them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path

from transformers.dynamic_module_utils import get_relative_imports
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.utils import CONFIG_NAME

from gradprobe_hf.model.loading.checks import MODULES
from gradprobe_hf.model.loading.processing import PROCESSOR_FILES

# What a checkpoint is made of, by the names that transformers, Trainer, the Hub and this package write. A file by any
# other name is somebody's own, and is not deleted with the checkpoint it was put beside.
_WEIGHTS = (
    r"((adapter_|pytorch_)?model|consolidated)(\.\w+)?(-\d+-of-\d+)?\.(safetensors|bin)",
    r"(pytorch_)?model\.(safetensors|bin)\.index(\.\w+)?\.json",
    r"training_args\.bin",
)
_DESCRIPTIONS = (
    r"(config|generation_config|adapter_config|modelcard|trainer_state)\.json",
    r"gradprobe_(config|report|selective_updates|mask_updates)\.json|gradprobe_masks(-\d+-of-\d+)?\.safetensors",
    r"README(\.(md|txt))?|\.git(attributes|ignore)",
)
# What a licence asks to hand on, and what sentence-transformers makes of a model.
_LICENCES = r"(LICEN[CS]E|NOTICE|USE_POLICY)([-_]\w+)?(\.(md|txt|pdf))?"
_COMPANIONS = (
    _LICENCES,
    r"modules\.json|config_sentence_transformers\.json|sentence_\w+_config\.json",
)
_PROCESSING = (
    r"((video_)?preprocessor|processor|audio_tokenizer)_config\.json|chat_template\.(jinja|json)",
    r"(tokenizer|tokenizer_config|special_tokens_map|added_tokens|normalizer|tekken)\.json",
    r"((entity_|target_)?vocab|vocab-(src|tgt)|emoji|byte_maps|word_(shape|pronunciation))\.json",
    r"(vocab|merges|dict)\.txt|bpe\.codes",
    r"(tokenizer|spiece|sentencepiece(\.bpe)?|spm(_char)?|tiktoken)\.model|(source|target)\.spm",
    r"[\w-]+\.tiktoken|prophetnet\.tokenizer",
)
_LICENCE = re.compile(_LICENCES, re.IGNORECASE)
_COMPANION = re.compile("|".join(_COMPANIONS), re.IGNORECASE)
_OF_CHECKPOINT = re.compile("|".join((*_WEIGHTS, *_DESCRIPTIONS, *_COMPANIONS, *_PROCESSING)), re.IGNORECASE)
# Folders and files of sentence-transformers' modules: 1_Pooling/config.json, 2_Dense/model.safetensors.
_MODULE = re.compile(r"\d+_\w+")
_OF_MODULE = re.compile(
    r"([\w-]*config|tokenizer|special_tokens_map|idf)\.json|(vocab|merges)\.txt|model\.safetensors|pytorch_model\.bin"
)
_FOLDERS = {  # those of a checkpoint -> the files in them
    re.compile("assets"): re.compile(r"(sparsity|perplexity|speed)\.png"),
    re.compile("additional_chat_templates"): re.compile(r"[\w-]+\.jinja"),
    _MODULE: _OF_MODULE,
}


def modules_of(folder: Path) -> tuple[set[str], list[str]]:
    """What sentence-transformers' list in a folder names: folders of modules, and modules with code of their own.

    `"type": "custom_st.Transformer"` is a class in custom_st.py.
    """
    try:
        listed = json.loads((folder / MODULES).read_text(encoding="utf-8"))
        modules = [(one["path"], one["type"].partition(".")[0]) for one in listed]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # no such file, or none that it has written
        return set(), []
    folders = {path.strip("/") for path, _ in modules}
    return {one for one in folders if one}, [package for _, package in modules if package != "sentence_transformers"]


def is_companion(name: str, modules: Collection[str] = ()) -> bool:
    """Whether a file goes with a model, though transformers does not read it.

    Args:
        name: below the model's folder.
        modules: folders whose files do, beside those that sentence-transformers names itself; none inside of another.
    """
    folder, _, file = name.rpartition("/")
    if "/" in folder:
        return False
    if folder:
        return bool((_MODULE.fullmatch(folder) or folder in modules) and _OF_MODULE.fullmatch(file))
    return bool(_COMPANION.fullmatch(file))


def is_licence(name: str) -> bool:
    """Whether a file at the top of a repository is of its licence."""
    return bool(_LICENCE.fullmatch(name))


def is_checkpoint(path: Path) -> bool:
    """A folder that somebody's model lives in: no repository, no folders but a checkpoint's."""
    modules, _ = modules_of(path)
    known = all(_files_of(inner, modules) for inner in path.iterdir() if inner.is_dir())
    return known and (path / CONFIG_NAME).is_file() and any(path.glob("*.safetensors"))


def _files_of(folder: Path, modules: Collection[str]) -> re.Pattern[str] | None:
    """What a folder of a checkpoint has files of; None of any other folder. Args: `modules` are folders, too."""
    if folder.name in modules:
        return _OF_MODULE
    return next((files for name, files in _FOLDERS.items() if name.fullmatch(folder.name)), None)


def other_files(folder: Path) -> list[str]:
    """What is in the folder of a checkpoint and no part of it."""
    (modules, own), found = modules_of(folder), []
    code = _code(folder) | with_imports(own, partial(_file_in, folder))
    for inner in folder.iterdir():
        if inner.is_dir():
            wanted = _files_of(inner, modules)
            assert wanted is not None, "the folder is a checkpoint's"
            found += [f"{inner.name}/{one.name}" for one in inner.iterdir() if not wanted.fullmatch(one.name)]
        elif inner.name not in code and not _OF_CHECKPOINT.fullmatch(inner.name):
            found.append(inner.name)
    return found


def _code(folder: Path) -> set[str]:
    """The files of code that the configurations of a checkpoint name, and those that they import."""
    configs = (CONFIG_NAME, TOKENIZER_CONFIG_FILE, *PROCESSOR_FILES)
    classes = [name for file in configs for name in own_classes(folder / file)]
    # A class of another repository is "user/model--module.Class"; transformers saves its module here all the same.
    return with_imports([name.rpartition("--")[2].partition(".")[0] for name in classes], partial(_file_in, folder))


def _file_in(folder: Path, name: str) -> Path | None:
    path = folder / name
    return path if path.is_file() else None


def with_imports(modules: Iterable[str], find: Callable[[str], Path | None]) -> set[str]:
    """The files of these modules of code, and of those beside them that they import.

    Args:
        find: name of a file -> where it is; None: nowhere.
    """
    waiting, found = list(modules), set[str]()
    while waiting:
        file = f"{waiting.pop()}.py"
        if file not in found and (path := find(file)) is not None:
            found.add(file)
            waiting += get_relative_imports(path)
    return found


def own_classes(path: Path) -> list[str]:
    """The classes outside of transformers that a configuration names in its `auto_map`: "module.Class"."""
    try:
        named = json.loads(path.read_text(encoding="utf-8")).get("auto_map") or {}
    except (OSError, ValueError, AttributeError):  # no such file, or none that names any
        return []
    found = list(named.values()) if isinstance(named, dict) else [named]
    # A tokenizer's are two, of which one may be null.
    flat = [name for one in found for name in (one if isinstance(one, list) else [one])]
    return [name for name in flat if isinstance(name, str)]
