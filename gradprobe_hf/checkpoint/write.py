"""Checkpoints on disk and on the Hub. What is written appears whole or not at all."""

from __future__ import annotations

import errno
import json
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from httpx2 import TransportError
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils._validators import validate_repo_id
from safetensors import SafetensorError
from transformers import PreTrainedModel

from gradprobe_hf.config import GradProbeConfig
from gradprobe_hf.model.fsdp import is_sharded
from gradprobe_hf.model.offload_store import existing_parent
from gradprobe_hf.model.parameters import is_offloaded
from gradprobe_hf.model.saving import save_in_shards
from gradprobe_hf.report.card import base_metadata, build_card
from gradprobe_hf.report.plots import save_plots
from gradprobe_hf.report.report import Report

# Our own key in config.json: `quantization_config` would make other libraries refuse the model.
CONFIG_KEY = "gradprobe"


def check_destination(directory: str | Path, model_name: str, overwrite: bool) -> None:
    """Refuse, before any work, a folder that must not be replaced.

    Raises:
        FileExistsError: it exists and `overwrite` is not set, or it is not a checkpoint.
        ValueError: it is the model's own folder.
    """
    path = Path(directory)
    if model_name and path.exists() and Path(model_name).exists() and path.samefile(model_name):
        raise ValueError(f"{directory} is the model that is to be pruned; write the result to another folder.")
    if not path.exists():
        return
    if not overwrite:
        raise FileExistsError(f"{directory} exists already; choose another folder, or pass overwrite (--overwrite).")
    if not path.is_dir() or (any(path.iterdir()) and not _is_checkpoint(path)):
        raise FileExistsError(f"{directory} exists and is not a model checkpoint alone, so it is not overwritten.")


def _is_checkpoint(path: Path) -> bool:
    """A folder that somebody's model lives in and nothing else does: no repository, no folders but our pictures."""
    folders = {inner.name for inner in path.iterdir() if inner.is_dir()}
    return (path / "config.json").is_file() and any(path.glob("*.safetensors")) and folders <= {"assets"}


def check_room(directory: str | Path, model: PreTrainedModel) -> None:
    """Raise OSError, before any work, where the checkpoint cannot be written or will not fit on the disk."""
    parent = existing_parent(Path(directory).absolute().parent)
    Path(tempfile.mkdtemp(prefix=".gradprobe-", dir=parent)).rmdir()
    needed = sum(parameter.nbytes for parameter in model.parameters())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"the checkpoint needs about {needed / 1e6:,.0f} MB and {free / 1e6:,.0f} MB are free; nothing was written",
            str(directory),
        )


def write_checkpoint(
    directory: str | Path,
    model: PreTrainedModel,
    processing_class: Any,
    config: GradProbeConfig,
    report: Report,
    *,
    overwrite: bool = False,
    where: str | None = None,
    writes: bool = True,
) -> None:
    """Weights, configuration, tokenizer, report, pictures and card, written beside `directory` and renamed.

    Args:
        where: what the card's snippet names; the folder's name by default.
        writes: False in processes that only take part in gathering the shards of the main one's weights.

    Raises:
        FileExistsError: see `check_destination`.
        OSError: it cannot be written; nothing of it remains.
    """
    path = Path(directory)
    if not writes:
        save_in_shards(path, model, writes=False)
        return
    check_destination(directory, model.name_or_path, overwrite)
    with _replacing(path) as scratch:
        save_weights(scratch, model)
        _add_own_key(scratch / "config.json", config, report)
        if processing_class is not None:
            processing_class.save_pretrained(scratch)
        config.save_pretrained(scratch)
        report.save(scratch)
        save_plots(report, scratch / "assets")
        base = base_metadata(model.name_or_path)
        build_card(report, config, base, where or path.name).save(scratch / "README.md")


def save_weights(folder: Path, model: PreTrainedModel) -> None:
    """Weights and configuration; of a model that is not in memory in one piece, shard by shard."""
    if is_offloaded(model) or is_sharded(model):
        save_in_shards(folder, model)
    else:
        model.save_pretrained(folder)


def check_push(repo_id: str, private: bool | None = None, token: str | None = None) -> str:
    """Make sure, before any work, that the repository exists and can be written to; returns its full name.

    Raises:
        ValueError: not a repository name.
        OSError: no token, or the Hub refuses; the message says what to do.
    """
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"{repo_id!r} is not a repository name like 'user/model': {error}") from error
    api = HfApi(token=token)
    with _hub_errors(repo_id):
        full_name = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        api.auth_check(full_name, write=True)  # `exist_ok` is content with a repository that can only be read
        if private and not api.repo_info(full_name).private:
            raise OSError(f"{full_name} exists and is public: make it private in its settings, or choose another name.")
        return full_name


def push_folder(
    folder: str | Path,
    repo_id: str,
    *,
    revision: str | None = None,
    create_pr: bool = False,
    token: str | None = None,
    message: str = "Upload pruned model",
) -> str:
    """Upload a checkpoint folder; returns the address of the commit."""
    api = HfApi(token=token)
    with _hub_errors(repo_id):
        if revision is not None and not create_pr:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo_id, folder_path=folder, revision=revision, create_pr=create_pr, commit_message=message
        )
    return str(commit.pr_url or commit.commit_url)


@contextmanager
def _hub_errors(repo_id: str) -> Iterator[None]:
    """The Hub's refusals, with what to do about them. The token itself is in none of these messages."""
    try:
        yield
    except LocalTokenNotFoundError as error:
        raise OSError(f"no Hub token to push to {repo_id}: run `hf auth login`, or set HF_TOKEN.") from error
    except TransportError as error:
        raise OSError(f"the Hub cannot be reached to push to {repo_id}: {error}. Check the network.") from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        if status == 401:
            raise OSError(
                f"the Hub does not accept this login for {repo_id} (401): run `hf auth login` with a token that can "
                "write, or set HF_TOKEN."
            ) from error
        if status == 403:
            raise OSError(
                f"the Hub refuses to let you write to {repo_id} (403): use a name of your own, ask for access to the "
                "organisation, or log in with a token that has write permission."
            ) from error
        raise OSError(f"the Hub answered {status} for {repo_id}: {error.server_message or error}") from error


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A scratch folder beside `path` that takes its place if the body succeeds, and vanishes if it does not."""
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.partial-{secrets.token_hex(6)}")
    try:
        scratch.mkdir()  # in here: an interrupt as soon as it is there must not leave it
        yield scratch
        _swap(scratch, path)
    except SafetensorError as error:  # safetensors reports a full disk as an error of its own
        raise OSError(f"could not write {path}: {error}. Nothing was kept of it.") from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise OSError(errno.ENOSPC, f"the disk is full; nothing was kept of {path.name}", str(path)) from error
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _swap(scratch: Path, path: Path) -> None:
    if not path.exists():
        scratch.rename(path)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old-", dir=path.parent))
    try:
        path.rename(old / path.name)
        scratch.rename(path)
    except BaseException:
        if not path.exists():
            (old / path.name).rename(path)
        shutil.rmtree(old, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _add_own_key(path: Path, config: GradProbeConfig, report: Report) -> None:
    values = json.loads(path.read_text(encoding="utf-8"))
    values[CONFIG_KEY] = {
        "sparsity": report.sparsity,
        "pattern": config.pattern,
        "strategy": config.strategy,
        "decision": config.decision,
        "version": report.versions["gradprobe_hf"],
    }
    # json.dumps, not the configuration's own writer: transformers sorts keys and so do we, which keeps diffs small.
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
