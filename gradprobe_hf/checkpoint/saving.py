"""Saving: a result in a folder, and on the Hub."""

from __future__ import annotations

import shutil
import tempfile
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from transformers import PreTrainedModel

from gradprobe_hf.checkpoint.push import MAIN, check_not_read, check_push, kept_in, push_folder
from gradprobe_hf.checkpoint.write import Checkpoint, write_checkpoint
from gradprobe_hf.model.fingerprint import weights_fingerprint
from gradprobe_hf.model.fsdp import is_sharded
from gradprobe_hf.model.parameters import is_offloaded
from gradprobe_hf.model.passes.rescaling import restore_scale
from gradprobe_hf.report.report import Report
from gradprobe_hf.runtime.paths import expanded
from gradprobe_hf.runtime.processes import Processes


class Savable(ABC):
    """What a run gives back: a model that is saved and shared with its report and card.

    Attributes:
        weights: a fingerprint of the model as it was handed back; "" while the run goes on, or where nobody knows.
    """

    model: PreTrainedModel
    report: Report
    processes: Processes
    weights: str

    def __repr__(self) -> str:
        """What a notebook shows of it: a line, where the fields are pages."""
        report, evaluation = self.report, self.report.evaluation
        if report.structure is None:
            what = f"{report.sparsity:.2%} zeros"
        else:
            sizes = report.structure["parameters"]
            what = f"{sizes['after']:,} of {sizes['before']:,} parameters"
        key = "perplexity" if evaluation and evaluation["dense"]["perplexity"] is not None else "loss"
        measured = f", {key} {evaluation['dense'][key]:,.4g} -> {evaluation['pruned'][key]:,.4g}" if evaluation else ""
        return f"{type(self).__name__}({report.model['name'] or type(self.model).__name__}: {what}{measured})"

    @property
    @abstractmethod
    def checkpoint(self) -> Checkpoint:
        """What is written."""

    def as_written(self) -> AbstractContextManager[None]:
        """In the body of the `with`, the model has the weights that are written."""
        return nullcontext()

    def save_pretrained(
        self,
        directory: str | Path,
        *,
        overwrite: bool = False,
        repo_id: str | None = None,
        revision: str | None = None,
    ) -> None:
        """Write the checkpoint, whole or not at all: weights, configuration, tokenizer, report, pictures and card.

        The model in memory stays as it is, with `apply=False` too. Of several processes the main one writes, and in the
        others it returns at once: wait for it before they read the folder (`accelerator.wait_for_everyone()`). A model
        that FSDP2 shards is saved by all of them together.

        Args:
            repo_id: the name the card's loading snippet uses; the folder's by default.
            revision: the branch that the snippet names, if it is not the main one.

        Raises:
            FileExistsError: the folder exists and `overwrite` is not set.
            OSError: it cannot be written; nothing of it remains.
            ValueError: the model was changed since: report and card would be of another one.
        """
        self._check_unchanged()
        if not self.processes.is_main and not is_sharded(self.model):  # shards are gathered by all
            return
        restore_scale(self.model)
        with self.as_written():
            write_checkpoint(
                expanded(directory),
                self.checkpoint,
                overwrite=overwrite,
                where=repo_id,
                revision=revision,
                processes=self.processes,
            )

    def handed_back(self) -> str:
        """The fingerprint of the model now; "" where weights are offloaded or sharded, which takes too long to read."""
        return "" if is_offloaded(self.model) or is_sharded(self.model) else weights_fingerprint(self.model)

    def _check_unchanged(self) -> None:
        if not self.weights or self.weights == self.handed_back():
            return
        remedy = "save the result first and train the checkpoint."
        # Of a model that lost whole structures the shapes, and routers, in memory are those of before.
        if self.checkpoint.removal is None:
            remedy = f"save the model with model.save_pretrained (SparsityCallback keeps its zeros), or {remedy}"
        raise ValueError(
            "the model was changed after this run, trained say, and what its report and card say was measured before: "
            + remedy
        )

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        token: str | bool | None = None,
        commit_message: str = "Upload pruned model",
    ) -> str:
        """Upload the checkpoint with its card; returns the address of the commit (or pull request), in the main
        process.

        Args:
            private: whether a repository that is created is; default: as the account has it.
            revision: a branch, which is created if it does not exist; the card loads the model from there.
            create_pr: open a pull request, which takes no right to write.
            token: of the Hub; default: that of `hf auth login`, or HF_TOKEN.

        Raises:
            OSError: no token, or the Hub refuses; the message says what to do and where the checkpoint is kept.
            ValueError: the repository is the one that the model, or its teacher, was loaded from, and no other branch
                of it; a pull request to a branch, which the Hub takes to the main one alone.
        """
        if create_pr and revision not in (None, MAIN):
            raise ValueError(
                f"create_pr=True with revision={revision!r}: a pull request is opened to the main branch. Leave one of "
                "both out."
            )
        together = is_sharded(self.model)
        if not self.processes.is_main and not together:
            return ""

        def checked() -> str:
            full_name = check_push(repo_id, private, token, create_pr, revision)
            if not create_pr:
                teacher = (self.report.recovery or {}).get("teacher", {})
                check_not_read(full_name, self.model, teacher.get("name", ""), revision=revision)
            return full_name

        # What the Hub refuses is told to all: none may wait for the main one's shards.
        full_name = self.processes.on_main(checked) if together else checked()
        return upload(self, full_name, revision=revision, create_pr=create_pr, token=token, message=commit_message)


def upload(
    result: Savable,
    full_name: str,
    *,
    revision: str | None = None,
    create_pr: bool = False,
    token: str | bool | None = None,
    message: str = "Upload pruned model",
) -> str:
    """As `push_to_hub`, to a repository that was checked. It writes before it asks the Hub anything: a run whose only
    copy this is would be lost with the network.
    """
    if not result.processes.is_main:
        result.save_pretrained(full_name)  # takes part in gathering the shards, and writes nothing
        return ""
    branch = None if revision == MAIN else revision
    scratch = Path(tempfile.mkdtemp(prefix="gradprobe-"))
    folder = scratch / full_name.split("/")[-1]
    try:
        result.save_pretrained(folder, repo_id=full_name, revision=branch)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    with kept_in(folder):
        address = push_folder(folder, full_name, revision=revision, create_pr=create_pr, token=token, message=message)
    shutil.rmtree(scratch, ignore_errors=True)
    return address
