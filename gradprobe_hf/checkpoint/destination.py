"""Destination: where a result goes, a folder, a repository of the Hub, both or neither."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from gradprobe_hf.checkpoint.push import check_not_read, check_push, check_repository_name, kept_in, push_folder
from gradprobe_hf.checkpoint.reloads import check_reloads
from gradprobe_hf.checkpoint.replacing import free_folder
from gradprobe_hf.checkpoint.saving import Savable, upload
from gradprobe_hf.checkpoint.write import check_configurations, check_destination, check_room, write_checkpoint
from gradprobe_hf.model.fsdp import is_sharded
from gradprobe_hf.report.report import Report
from gradprobe_hf.runtime.processes import Processes, join_processes
from gradprobe_hf.runtime.stopwatch import Stopwatch


@dataclass(frozen=True)
class Destination:
    """Where a result goes.

    Attributes:
        repo_id: the repository; its full name, once it is `checked`.
        private: whether one that is created is.
        token: of the Hub; None: that of the login.
    """

    output_dir: str | Path | None
    overwrite: bool
    repo_id: str | None
    private: bool | None
    token: str | bool | None = None

    @classmethod
    def of(
        cls,
        output_dir: str | Path | None,
        overwrite: bool,
        push_to_hub: bool | str,
        private: bool | None,
        token: str | bool | None = None,
    ) -> Destination:
        """Of the arguments of a run.

        Args:
            token: what the model is loaded with.

        Raises:
            ValueError: one of them has no effect, or names no repository.
        """
        if overwrite and output_dir is None:
            raise ValueError("overwrite=True has no effect here: it belongs to output_dir. Set that, or leave it out.")
        repo_id = _repository(push_to_hub, output_dir)
        if private is not None and repo_id is None:
            raise ValueError(
                f"hub_private_repo={private!r} has no effect here: it belongs to push_to_hub. Set that, or leave it "
                "out."
            )
        if private not in (None, True, False):
            raise ValueError(f"hub_private_repo must be True, False or None, got {private!r}.")
        if repo_id is not None:
            check_repository_name(repo_id)
        return cls(output_dir, overwrite, repo_id, private, token)

    def check(self, *model_names: str, resume_dir: str | Path | None = None) -> None:
        """Raise FileExistsError, before anything is loaded, for a folder that must not be replaced.

        Args:
            model_names: of the models that are read.
            resume_dir: where a state of this run may be: of one that was killed as it removed that.
        """
        if self.output_dir is None:
            return
        for name in model_names:
            try:
                join_processes().on_main(partial(check_destination, self.output_dir, name, self.overwrite))
            except FileExistsError as error:
                if resume_dir is None or not Path(resume_dir).exists() or Path(resume_dir).samefile(self.output_dir):
                    raise
                raise FileExistsError(
                    f"{error} Or this run has written it and was killed as it ended: then the result is whole, and "
                    f"{str(resume_dir)!r} (resume_dir) can go."
                ) from error

    def checked(
        self,
        model: PreTrainedModel,
        processes: Processes,
        *,
        processing_class: Any = None,
        is_smaller: bool = False,
        also_read: Sequence[str] = (),
    ) -> Destination:
        """The same with its repository, which is created: before any work.

        Args:
            processing_class: that is saved with the model.
            is_smaller: whether structures are cut out as it is written.
            also_read: names of other models that are read, and are not replaced either.

        Raises:
            OSError: no room on the disk, or the Hub refuses.
            ValueError: a configuration of the model, or the processing class, cannot be saved; or folder or repository
                are of a model that is read.
        """
        self.check(model.name_or_path, *also_read)  # the base of an adapter is known now
        if self.output_dir is not None or self.repo_id is not None:
            # What is pushed alone is written to a temporary folder.
            where = self.output_dir or Path(tempfile.gettempdir()) / "checkpoint"
            processes.on_main(partial(check_room, where, model, is_smaller))
            processes.on_main(partial(check_configurations, model, processing_class))
            processes.on_main(partial(check_reloads, model))
        if self.repo_id is None:
            return self
        full_name = processes.on_main(partial(check_push, self.repo_id, self.private, self.token))
        processes.on_main(partial(check_not_read, full_name, model, *also_read))
        return replace(self, repo_id=full_name)

    def settled(self, model: PreTrainedModel, processes: Processes) -> Destination:
        """The same after the work, with a folder beside its own where that has been taken meanwhile.

        By another run, say: what this one has come to is not lost for it.
        """
        if self.output_dir is None:
            return self
        return replace(self, output_dir=processes.on_main(partial(self._free_folder, model.name_or_path)))

    def _free_folder(self, model_name: str) -> str | Path:
        assert self.output_dir is not None
        try:
            check_destination(self.output_dir, model_name, self.overwrite)
            if self.overwrite:
                return self.output_dir
        except FileExistsError:
            pass
        path = Path(os.path.abspath(self.output_dir))
        free = free_folder(path)
        return self.output_dir if free == path else free

    def write(self, result: Savable, stopwatch: Stopwatch) -> Report:
        """Save and upload the model as it is now. Returns the report, as it was saved if it was."""
        made, writes = result.checkpoint, result.processes.is_main
        report = made.report
        if not writes and not is_sharded(made.model):  # shards are gathered by all
            return report
        if self.output_dir is not None:
            with stopwatch("save"):
                report = write_checkpoint(
                    self.output_dir, made, overwrite=self.overwrite, where=self.repo_id, processes=result.processes
                )
        if self.repo_id is not None:
            with stopwatch("upload"):
                if self.output_dir is None:
                    upload(result, self.repo_id, token=self.token)
                elif writes:
                    with kept_in(self.output_dir):
                        push_folder(self.output_dir, self.repo_id, token=self.token)
        return report


def _repository(push_to_hub: bool | str, output_dir: str | Path | None) -> str | None:
    if isinstance(push_to_hub, str):
        return push_to_hub
    if not isinstance(push_to_hub, bool):
        raise ValueError(f"push_to_hub must be True, False or a repository 'user/name', got {push_to_hub!r}.")
    if not push_to_hub:
        return None
    if output_dir is None:
        raise ValueError(
            "push_to_hub=True names the repository after output_dir: set that, or push_to_hub='user/name'."
        )
    return Path(output_dir).absolute().name
