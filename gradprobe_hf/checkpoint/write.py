"""Writing a checkpoint: it appears whole or not at all."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from huggingface_hub import ModelCard
from transformers import PreTrainedModel
from transformers.utils import PROCESSOR_NAME

from gradprobe_hf.checkpoint.companions import copy_companions
from gradprobe_hf.checkpoint.file_sizes import FileSizes, checkpoint_files
from gradprobe_hf.checkpoint.own_files import is_checkpoint, other_files, own_classes
from gradprobe_hf.checkpoint.reloads import check_reloads
from gradprobe_hf.checkpoint.replacing import put_back, replacing
from gradprobe_hf.checkpoint.smaller import is_written_again, save_smaller
from gradprobe_hf.checkpoint.written import check_written
from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.model.files.offload_store import existing_parent
from gradprobe_hf.model.files.saving import save_in_shards
from gradprobe_hf.model.files.shard_files import open_to_all
from gradprobe_hf.model.fsdp import is_sharded
from gradprobe_hf.model.loading.checks import MODULES
from gradprobe_hf.model.loading.load import CONFIG_KEY
from gradprobe_hf.model.loading.processing import PROCESSOR_FILES
from gradprobe_hf.model.loading.stored_files import (
    folded_file,
    folded_into,
    is_loaded_here,
    loaded_commit,
    stored_dtype,
    stored_file,
    stored_weights,
)
from gradprobe_hf.model.parameters import is_offloaded, parameter_bytes
from gradprobe_hf.report.card.base_model import CARD, base_metadata, with_adapter
from gradprobe_hf.report.card.build import build_card, build_recovered_card
from gradprobe_hf.report.original import DENSE
from gradprobe_hf.report.plots import save_plots
from gradprobe_hf.report.report import Report
from gradprobe_hf.runtime.option_checks import check_folder
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.structures.removal import Removal

logger = logging.getLogger(__name__)

_QUANTISED = 0.9  # of the plain weights' bytes: smaller files hold some of them in fewer bits


def check_destination(directory: str | Path, model_name: str, overwrite: bool) -> None:
    """Refuse, before any work, a folder that must not be replaced.

    Raises:
        FileExistsError: it exists and `overwrite` is not set, or it is not a checkpoint.
        ValueError: it is the model's own folder, or where a disk is mounted.
    """
    if not isinstance(directory, (str, Path)) or not str(directory):
        check_folder("output_dir", directory)
    path = Path(directory)
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        # Names of another encoding, of an old archive or under LC_ALL=C: tokenizers cannot write there.
        raise ValueError(
            f"output_dir={str(directory)!a} (--output) is not UTF-8, as its path has to be: choose another folder, "
            "or set a UTF-8 locale (LC_ALL=C.UTF-8)."
        ) from None
    put_back(path.absolute())
    if model_name and path.exists() and Path(model_name).exists() and path.samefile(model_name):
        raise ValueError(f"{directory} is a model that is read; write the result to another folder.")
    if not path.exists():
        check_folder("output_dir", directory)
        return
    if _is_mount_point(path.resolve()):
        raise ValueError(
            f"output_dir={str(directory)!r} (--output) is a mount point, and cannot be renamed when the checkpoint "
            f"takes its place: name a folder in it, {str(path / 'model')!r}."
        )
    if not overwrite:
        raise FileExistsError(f"{directory} exists already; choose another folder, or pass overwrite (--overwrite).")
    if not path.is_dir() or (any(path.iterdir()) and not is_checkpoint(path)):
        raise FileExistsError(f"{directory} exists and is not a model checkpoint alone, so it is not overwritten.")
    if others := other_files(path):
        raise FileExistsError(
            f"{directory} holds {min(others)}, which is no part of a checkpoint, so it is not overwritten: move that, "
            "or choose another folder."
        )


def _is_mount_point(path: Path) -> bool:
    if os.path.ismount(path):
        return True
    # A folder of the same file system that is bound there, as containers do, has the same device as the one above it.
    try:
        return str(path) in {one.mountpoint for one in psutil.disk_partitions(all=True)}
    except OSError:  # no /proc: it shows when it is renamed
        return False


def check_writable(folder: Path, directory: str | Path) -> None:
    """Raise OSError where nothing can be written into a folder that exists.

    Args:
        directory: what the user named, for which that is.
    """
    try:
        Path(tempfile.mkdtemp(prefix=".gradprobe-", dir=folder)).rmdir()
    except OSError as error:
        reason = f"nothing can be written into {folder} ({error.strerror})"
        raise OSError(error.errno, reason, str(directory)) from error


def check_room(directory: str | Path, model: PreTrainedModel, is_smaller: bool = False) -> None:
    """Raise OSError, before any work, where the checkpoint cannot be written or will not fit on the disk.

    Args:
        is_smaller: whether structures are cut out, and what is written is loaded again.
    """
    parent = existing_parent(Path(directory).resolve().parent)  # behind a link: there it is written
    check_writable(parent, directory)
    needed = parameter_bytes(model) * (2 if is_smaller and is_written_again(model) else 1)
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"the checkpoint needs about {needed / 1e6:,.0f} MB and {free / 1e6:,.0f} MB are free; nothing was written",
            str(directory),
        )


def check_configurations(model: PreTrainedModel, processing_class: Any = None) -> None:
    """Raise ValueError, before any work, for what cannot be saved beside the weights: it is saved here."""
    named = {"config": model.config, "generation_config": getattr(model, "generation_config", None)}
    with tempfile.TemporaryDirectory(prefix="gradprobe-") as scratch:
        for name, one in named.items():
            try:
                if one is not None and (name == "config" or model.can_generate()):
                    one.save_pretrained(scratch)
            except ValueError as error:
                raise ValueError(f"model.{name} cannot be saved, and no checkpoint without it: {error}") from error
        try:
            if processing_class is not None:
                processing_class.save_pretrained(scratch)
        except (AttributeError, TypeError, ValueError, NotImplementedError) as error:
            raise ValueError(
                f"processing_class, a {type(processing_class).__name__}, cannot be saved, and no checkpoint without "
                f"it: {type(error).__name__}: {error}"
            ) from error
        except Exception as error:  # of the disk, say, and the checkpoint goes to another
            logger.debug("whether the processing class can be saved is not known: %s", error)


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint is written of.

    Attributes:
        config: None of a model that something else has pruned.
        removal: the structures that are cut out as it is written; None: it has the shapes of the model.
    """

    model: PreTrainedModel
    processing_class: Any
    config: GradProbeConfig | None
    report: Report
    removal: Removal | None = None


def write_checkpoint(
    directory: str | Path,
    made: Checkpoint,
    *,
    overwrite: bool = False,
    where: str | None = None,
    revision: str | None = None,
    processes: Processes,
) -> Report:
    """Weights, configuration, tokenizer, report, pictures and card, written beside `directory` and renamed.

    Returns the report as it was written, with the size of the files.

    Args:
        where: what the card's snippet names; the folder's name by default.
        revision: the branch that it names, of a repository.
        processes: of a model that FSDP2 shards, which all call this with: those beside the main one take part in
            gathering its shards. Of any other model the main one alone does.

    Raises:
        FileExistsError: see `check_destination`.
        OSError: it cannot be written; nothing of it remains.
        ValueError: it would not load as the model that it is.
    """
    path = Path(directory)
    check = partial(_check_before, path, directory, made.model, overwrite)
    if is_sharded(made.model):
        processes.on_main(check)  # for all: none may wait for the main one's shards
    else:
        check()
    if not processes.is_main:
        save_in_shards(path, made.model, writes=False)
        return made.report
    with replacing(path, overwrite) as scratch:
        save_weights(scratch, made.model, made.removal)
        made = replace(made, report=replace(made.report, files=_file_sizes(scratch, made)))
        _add_own_key(scratch / "config.json", made)
        if made.processing_class is not None:
            made.processing_class.save_pretrained(scratch)
        _keep_processor(scratch, made.model)
        copy_companions(scratch, made.model)
        if made.config is not None:
            made.config.save_pretrained(scratch)
        made.report.save(scratch)
        save_plots(made.report, scratch / "assets")
        # The folder's own name, of `.` too.
        where = where or os.path.basename(os.path.abspath(path))
        _card(scratch, made, where, revision).save(scratch / CARD)
    return made.report


def _check_before(path: Path, directory: str | Path, model: PreTrainedModel, overwrite: bool) -> None:
    """Raise what `write_checkpoint` does, as far as it is known before anything is written."""
    check_reloads(model)
    check_destination(directory, model.name_or_path, overwrite)
    parent = path.resolve().parent
    parent.mkdir(parents=True, exist_ok=True)
    check_writable(parent, directory)


def _keep_processor(scratch: Path, model: PreTrainedModel) -> None:
    """Copy what is stored beside the model of its processor, as far as the processing class saved nothing of it.

    It may be a tokenizer alone: given so, or all that transformers could load.
    """
    if (scratch / PROCESSOR_NAME).is_file():  # saved by a processor, which writes its parts in there
        return
    for file in PROCESSOR_FILES:
        stored = None if (scratch / file).is_file() else stored_file(model, file)
        if stored is None:
            continue
        modules = {name.partition(".")[0] for name in own_classes(stored) if "--" not in name}
        if missing := sorted(f"{name}.py" for name in modules if not (scratch / f"{name}.py").is_file()):
            logger.warning(
                "%s of %s is not in the checkpoint: its code, %s, was not loaded (trust_remote_code).",
                file,
                model.name_or_path,
                ", ".join(missing),
            )
        else:
            shutil.copyfile(stored, scratch / file)


def _file_sizes(folder: Path, made: Checkpoint) -> dict[str, int | None]:
    sizes, dense = FileSizes.of(checkpoint_files(folder), scratch=folder), _dense_bytes(made)
    found = {"dense": dense, "bytes": sizes.stored, "zstd": sizes.zstd, "hub": sizes.hub}
    return found | _dense_compressed(made, dense, scratch=folder)


def _dense_bytes(made: Checkpoint) -> int:
    """Those of the model that all measurements are beside: which was pruned, or which it was recovered towards."""
    if teacher := made.report.recovered_towards:
        return int(teacher["bytes"])
    known = (made.report.files or {}).get("dense")  # of a checkpoint that is recovered
    return known or parameter_bytes(made.model)


def _dense_compressed(made: Checkpoint, dense: int, scratch: Path) -> dict[str, int | None]:
    """Of the dense model's files what `FileSizes` has: its weights, which are no zeros, can be compressed as well.

    Nothing where they may be others than the model: of one that was loaded by somebody else, who may have trained it,
    that was pruned before, in memory say, with an adapter, in another type than is stored, or of what was recovered.
    The last has them of its pruning.
    """
    before = made.report.files or {}
    if before.get("dense") == dense:
        return {name: before.get(name) for name in ("dense_zstd", "dense_hub")}
    others = made.report.recovered_towards or made.report.model.get("adapter") or made.report.made_of != DENSE
    if others or not is_loaded_here(made.model) or stored_dtype(made.model) != made.model.dtype:
        return {"dense_zstd": None, "dense_hub": None}
    stored = stored_weights(made.model)
    if sum(file.stat().st_size for file in stored) < _QUANTISED * dense:  # whatever most of them are: embeddings, say
        return {"dense_zstd": None, "dense_hub": None}
    sizes = FileSizes.of(stored, scratch)
    return {"dense_zstd": sizes.zstd, "dense_hub": sizes.hub}


def _card(scratch: Path, made: Checkpoint, where: str, revision: str | None) -> ModelCard:
    name = made.model.name_or_path
    if not Path(name).is_dir() and loaded_commit(made.model) is None:
        name = ""  # a path from another working directory, say, and no repository: that would be somebody else's
    # With its modules beside it a sentence encoder is used as before.
    described = stored_file(made.model, CARD, subfolder="") if name else None  # of all folders of a repository
    base = base_metadata(name, described, keeps_use=(scratch / MODULES).is_file())
    if (folded := folded_into(made.model)) is not None:
        base = with_adapter(base, folded_file(made.model, CARD), folded[0])
    if made.config is None:
        return build_recovered_card(made.report, base, where, revision)
    return build_card(made.report, made.config, base, where, revision)


def save_weights(folder: Path, model: PreTrainedModel, removal: Removal | None = None) -> None:
    """Weights and configuration; of a model that is not in memory in one piece, shard by shard.

    Raises:
        RuntimeError: what was written is another model.
    """
    if removal is not None:
        save_smaller(folder, model, removal)  # which looks at the files itself
        return
    if is_offloaded(model) or is_sharded(model):
        save_in_shards(folder, model)
    else:
        model.save_pretrained(folder)
        for path in folder.glob("*.safetensors"):
            open_to_all(path)
    check_written(folder, model)


def _gone_whole(made: Checkpoint, before: dict[str, Any]) -> dict[str, int]:
    """Structure -> how many of the dense model's are gone: in this run, and in those that `before` tells of."""
    known = before.get("structure", {})
    if made.removal is None:  # zeros on top, or a recovery
        return dict(known or (made.report.structure or {}).get("removed", {}))
    now = made.removal.plan.going
    return {name: known.get(name, 0) + now.get(name, 0) for name in {**known, **now}}


def _add_own_key(path: Path, made: Checkpoint) -> None:
    report, config = made.report, made.config
    values = json.loads(path.read_text(encoding="utf-8"))
    before = values.get(CONFIG_KEY)
    named: tuple[str, ...] = ("pattern", "score", "probes", "update", "refinement")
    what: dict[str, Any] = {"sparsity": report.sparsity}
    if report.structure is not None:
        named, what = ("update", "refinement"), {}
    if gone := _gone_whole(made, before if isinstance(before, dict) else {}):
        what["structure"] = gone
    how = {} if config is None else {name: getattr(config, name) for name in named}
    values[CONFIG_KEY] = {**what, **how, "version": report.versions["gradprobe_hf"]}
    if report.recovery is not None:
        earlier = report.recovery.get("earlier_steps", 0)
        values[CONFIG_KEY]["recovery_steps"] = report.recovery["steps"] + earlier
    # Still true of what is made of this checkpoint.
    if report.structure is not None and "pruned_to" in report.model:
        values[CONFIG_KEY]["pruned_to"] = report.model["pruned_to"]
    if "stored_as" in report.model:
        values[CONFIG_KEY]["stored_as"] = report.model["stored_as"]
    if "adapter" in report.model:
        values[CONFIG_KEY]["adapter"] = report.model["adapter"]
        values[CONFIG_KEY]["adapter_of"] = report.model.get("adapter_of", report.model["name"])
    # json.dumps, not the configuration's own writer: transformers sorts keys and so do we, which keeps diffs small.
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
