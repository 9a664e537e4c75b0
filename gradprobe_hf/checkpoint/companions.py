"""Companions: files beside a model that transformers does not read, and that the pruned one needs as much.

A licence goes where the weights go. sentence-transformers makes an embedding of what it finds in `modules.json` and the
folders that it names; without them it pools by the mean, whatever the model was trained for, and says little of it.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from transformers import PreTrainedModel

from gradprobe_hf.checkpoint.own_files import is_companion, is_licence, modules_of, with_imports
from gradprobe_hf.model.loading.checks import MODULES
from gradprobe_hf.model.loading.stored_files import folded_file, folded_into, loaded_commit, source_of, stored_file

logger = logging.getLogger(__name__)

_PATIENCE = 10.0  # seconds for the Hub's answer


def copy_companions(folder: Path, model: PreTrainedModel) -> None:
    """Copy those of the model that was loaded into the folder of a checkpoint, where it has no such file yet."""
    listed, subfolder = _listed(model), source_of(model).get("subfolder") or ""
    prefix = f"{subfolder.strip('/')}/" if subfolder else ""
    beside = [name.removeprefix(prefix) for name in listed if name.startswith(prefix)]
    modules = stored_file(model, MODULES)
    folders, own = (set[str](), []) if modules is None else modules_of(modules.parent)
    code = with_imports(own, partial(stored_file, model))  # from the Hub, if it was not downloaded with the model
    found = [(subfolder, name) for name in beside if is_companion(name, folders) or name in code]
    of_modules = {name for name in beside if any(name.startswith(f"{folder}/") for folder in folders)}
    if left := sorted(of_modules - {name for _, name in found}):
        logger.warning(
            "%s: files of sentence-transformers' modules that are not copied: %s", model.name_or_path, ", ".join(left)
        )
    found += [("", name) for name in listed if is_licence(name)]  # of all folders of a repository
    for inside, name in found:
        if (folder / name).exists() or (stored := stored_file(model, name, inside)) is None:
            continue
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(stored, folder / name)
    if (folded := folded_into(model)) is not None:
        for licence in map(Path, filter(is_licence, _beside_adapter(*folded))):
            if (stored := folded_file(model, licence.name)) is not None:
                # Those of its base may have the same names.
                shutil.copyfile(stored, folder / f"{licence.stem}-adapter{licence.suffix}")


def _beside_adapter(name: str, where: Mapping[str, Any]) -> list[str]:
    """The names of the files in the folder of an adapter; none, with a warning, where the Hub does not answer."""
    subfolder = where.get("subfolder") or ""
    if Path(name).is_dir():
        return [path.name for path in (Path(name) / subfolder).glob("*")]
    try:
        found = HfApi(token=where.get("token")).model_info(name, revision=where.get("revision"), timeout=_PATIENCE)
        files = [Path(file.rfilename) for file in found.siblings or []]
        return [file.name for file in files if file.parent == Path(subfolder)]
    except Exception as error:  # an unreachable Hub must not cost a finished result
        logger.warning("whether the adapter %s has a licence is not known: %s", name, error)
        return []


def _listed(model: PreTrainedModel) -> list[str]:
    """The files of the folder or repository that a model is from; none where nobody knows."""
    name, commit = model.name_or_path, loaded_commit(model)
    if name and Path(name).is_dir():
        return _inside(Path(name), source_of(model).get("subfolder") or "")
    if not name or commit is None:
        return []
    try:
        files = HfApi(token=source_of(model).get("token")).model_info(name, revision=commit, timeout=_PATIENCE).siblings
        return [file.rfilename for file in files or []]
    except Exception as error:  # an unreachable Hub must not cost a finished result
        found = _cached(model, commit)
        if not any(map(is_companion, found)):
            logger.warning(
                "whether %s has a licence, or modules of sentence-transformers, is not known: %s", name, error
            )
        return found


def _cached(model: PreTrainedModel, commit: str) -> list[str]:
    """The files of a commit that were downloaded."""
    source = source_of(model)
    try:
        snapshot = snapshot_download(
            model.name_or_path, revision=commit, cache_dir=source.get("cache_dir"), local_files_only=True
        )
    except (OSError, ValueError):
        return []
    return _inside(Path(snapshot), source.get("subfolder") or "")


def _inside(folder: Path, subfolder: str) -> list[str]:
    """The files of a folder and of two below, and so of its subfolder."""
    depths = ("*", "*/*", "*/*/*")
    found = {path for top in {folder, folder / subfolder} for depth in depths for path in top.glob(depth)}
    return [path.relative_to(folder).as_posix() for path in found if path.is_file()]
