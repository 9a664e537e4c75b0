"""Companions: files beside a model that transformers does not read, and that the pruned one needs as much.

A licence goes where the weights go. sentence-transformers makes an embedding of what it finds in `modules.json` and the
folders that it names; without them it pools by the mean, whatever the model was trained for, and says little of it.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from huggingface_hub import HfApi
from transformers import PreTrainedModel

from gradprobe_hf.checkpoint.own_files import is_companion
from gradprobe_hf.model.loading.stored_files import loaded_commit, stored_file

logger = logging.getLogger(__name__)

_PATIENCE = 10.0  # seconds for the Hub's answer


def copy_companions(folder: Path, model: PreTrainedModel) -> None:
    """Copy those of the model that was loaded into the folder of a checkpoint, where it has no such file yet."""
    for name in filter(is_companion, _listed(model)):
        if (folder / name).exists() or (stored := stored_file(model, name)) is None:
            continue
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(stored, folder / name)


def _listed(model: PreTrainedModel) -> list[str]:
    """The files stored beside a model, at the top and one folder below; none where nobody knows."""
    name, commit = model.name_or_path, loaded_commit(model)
    if name and Path(name).is_dir():
        found = [path for pattern in ("*", "*/*") for path in Path(name).glob(pattern) if path.is_file()]
        return [path.relative_to(name).as_posix() for path in found]
    if not name or commit is None:
        return []
    try:
        files = HfApi().model_info(name, revision=commit, timeout=_PATIENCE).siblings
    except Exception as error:  # an unreachable Hub must not cost a finished result
        logger.warning("whether %s has a licence, or modules of sentence-transformers, is not known: %s", name, error)
        return []
    return [file.rfilename for file in files or []]
