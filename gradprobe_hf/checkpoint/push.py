"""Pushing a checkpoint to the Hub; what the Hub refuses is said with what to do about it."""

from __future__ import annotations

import glob
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from httpx2 import TransportError
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils._validators import validate_repo_id
from transformers import PreTrainedModel

from gradprobe_hf.model.loading.stored_files import loaded_revision, stored_file
from gradprobe_hf.report.card.base_model import CARD, bases
from gradprobe_hf.runtime.paths import cached_repository

logger = logging.getLogger(__name__)

MAIN = "main"
# Files of an earlier push that this one may not have, and that transformers would read with it; whole paths, so that
# none of a folder is meant but where it is named. Weights of another name: a model in one file is loaded before one in
# shards, and some libraries go by an index that is there.
_OLD_MODEL = r"(pytorch_)?model(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?|generation_config\.json"
# What this package has said of an earlier model there: `inspect` and a recovery would take it for the new one's.
_OLD_RUN = (
    r"gradprobe_(config|report)\.json|assets/(sparsity|perplexity|speed)\.png|"
    r"(LICEN[CS]E|NOTICE|USE_POLICY)([-_]\w+)?-adapter(\.(md|txt|pdf))?"
)
# A template, special tokens and vocabularies, of which transformers takes what is there. They stay where no tokenizer,
# or no processor, is uploaded: somebody may have put them there for this model.
_OLD_TOKENIZER = (
    r"(tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab)\.json|(vocab|merges)\.txt|"
    r"(tokenizer|spiece|sentencepiece(\.bpe)?|tiktoken)\.model|"
    r"chat_template\.(jinja|json)|additional_chat_templates/[^/]+"
)
_OLD_PROCESSOR = r"((video_)?pre)?processor_config\.json"
_ADAPTER = "adapter_config.json"


def check_repository_name(repo_id: str) -> None:
    """Raise ValueError unless a repository can be called so."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"push_to_hub={repo_id!r} is not a repository name like 'user/model': {error}") from error


def check_not_read(repo_id: str, model: PreTrainedModel, *other_names: str, revision: str | None = None) -> None:
    """Raise ValueError for a repository whose weights would be replaced: that of a model that is read, or that the
    model was made from, by the card beside it (pruned once more from a folder, say).

    Args:
        repo_id: its full name.
        other_names: the `name_or_path` of other models that are read.
        revision: the branch that is pushed to. One that nothing is read from is another place than the main one.
    """
    name = repo_id.casefold()  # to the Hub, Me/Model and me/model are one
    read = (cached_repository(one) or one for one in (model.name_or_path, *other_names))
    is_read = name in map(str.casefold, read)
    is_base = name in map(str.casefold, bases(stored_file(model, CARD, subfolder="")))
    if not (is_read or is_base) or Path(repo_id).is_dir():
        return
    if revision in (None, MAIN, loaded_revision(model)):
        branch = "" if revision is None else f" at {revision!r}"
        what = "is read" if is_read else f"{model.name_or_path!r} was made from, by its card"
        raise ValueError(
            f"push_to_hub={repo_id!r} is a model that {what}{branch}: push the result to another repository, or to a "
            "branch of its own (revision=)."
        )


def check_push(
    repo_id: str,
    private: bool | None = None,
    token: str | bool | None = None,
    only_asks: bool = False,
    revision: str | None = None,
) -> str:
    """Make sure, before any work, that the repository exists and can be written to; returns its full name.

    Args:
        only_asks: whether a pull request is opened, which takes no right to write.
        revision: the branch that is pushed to; one that does not exist begins as the main one.

    Raises:
        ValueError: not a repository name, or the repository holds an adapter.
        OSError: no token, or the Hub refuses; the message says what to do.
    """
    check_repository_name(repo_id)
    api = HfApi(token=token)
    with _hub_errors(repo_id):
        full_name = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if not only_asks:
            api.auth_check(full_name, write=True)  # `exist_ok` is content with a repository that can only be read
        if private and not api.repo_info(full_name).private:
            raise OSError(f"{full_name} exists and is public: make it private in its settings, or choose another name.")
        there = revision if revision is not None and api.revision_exists(full_name, revision) else None
        if api.file_exists(full_name, _ADAPTER, revision=there):
            raise ValueError(
                f"push_to_hub={repo_id!r}: {full_name} holds an adapter ({_ADAPTER}), which transformers would load in "
                "place of the model: choose another name."
            )
        if api.file_exists(full_name, CARD, revision=there):
            _warn_of_other_card(full_name, Path(api.hf_hub_download(full_name, CARD, revision=there)))
        return full_name


def _warn_of_other_card(name: str, card: Path) -> None:
    """Say that a card which no run of this package has written is replaced."""
    data = ModelCard.load(card, ignore_metadata_errors=True).data
    if "gradprobe" not in (data.get("tags") or []):
        logger.warning(
            "the card that %s has (%s) is replaced by that of the pruned model; it stays in the repository's history",
            name,
            CARD,
        )


def push_folder(
    folder: str | Path,
    repo_id: str,
    *,
    revision: str | None = None,
    create_pr: bool = False,
    token: str | bool | None = None,
    message: str = "Upload pruned model",
) -> str:
    """Upload a checkpoint folder; returns the address of the commit, in which files go that would be read with it."""
    api = HfApi(token=token)
    with _hub_errors(repo_id):
        if revision is not None and not create_pr:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        there = api.list_repo_files(repo_id, revision=revision)
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=revision,
            create_pr=create_pr,
            commit_message=message,
            # But those that are uploaded; as patterns, which these are taken for.
            delete_patterns=[glob.escape(name) for name in _old_files(Path(folder), there)],
        )
    return str(commit.pr_url or commit.commit_url)


def _old_files(folder: Path, there: Iterable[str]) -> list[str]:
    """Those of a repository's files that would be read with what is uploaded."""
    old = [_OLD_MODEL, _OLD_RUN]
    old += [_OLD_TOKENIZER] * (folder / "tokenizer_config.json").is_file()
    old += [_OLD_PROCESSOR] * any(folder.glob("*processor_config.json"))
    return [name for name in there if any(re.fullmatch(pattern, name) for pattern in old)]


@contextmanager
def kept_in(folder: str | Path) -> Iterator[None]:
    """Errors of an upload say where the checkpoint is."""
    try:
        yield
    except BaseException as error:
        logger.error("the upload did not finish; the checkpoint is kept in %s", folder)
        if isinstance(error, OSError):
            raise OSError(f"{error} The checkpoint is kept in {folder}.") from error
        raise


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
    except RuntimeError as error:  # of a single file, by huggingface_hub and by hf_xet
        why = f" {error.__cause__}" if error.__cause__ is not None else ""
        # What an address asks with may be its signature.
        raise OSError(re.sub(r"(https?://[^\s?]+)\?[^\s'\"]*", r"\1", " ".join(f"{error}{why}".split()))) from error
