"""PruneResult: what a run gives back, and how it is saved and shared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from gradprobe_hf.checkpoint.push import push_saved
from gradprobe_hf.checkpoint.write import Checkpoint, write_checkpoint
from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.model.fsdp import is_sharded
from gradprobe_hf.model.targets import Target
from gradprobe_hf.reconstruction.new_weights import NewWeights
from gradprobe_hf.report.report import Report
from gradprobe_hf.run.apply import applied, mark_smaller, replaced
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.structures.removal import Removal


@dataclass(frozen=True)
class PruneResult:
    """What `prune_pretrained` returns.

    Attributes:
        model: the model; its masked weights are zero, unless `apply=False` was asked for.
        masks: parameter name -> bool `[out, in]`, True = pruned. (A `Conv1D` stores its weight `[in, out]`.)
        report: what happened.
        config: how.
        processing_class: the tokenizer, or None.
        targets: the matrices the masks are for.
        processes: who took part. The main one writes. Of a model that FSDP2 shards, `masks` are those of this
            process's shards, and every process has to call `save_pretrained`.
        new_weights: new values `[out, in]` of reconstructed matrices; empty once the model has them.
        recovered: new values of all parameters after `recovery_steps`, by name; empty once the model has them.
        removal: the whole structures that go, if any do: zero in the model, and cut out of what is saved.
    """

    model: PreTrainedModel
    masks: Mapping[str, Tensor]
    report: Report
    config: GradProbeConfig
    processing_class: Any
    targets: tuple[Target, ...]
    processes: Processes = field(default_factory=Processes)
    new_weights: NewWeights = field(default_factory=NewWeights)
    recovered: NewWeights = field(default_factory=NewWeights)
    removal: Removal | None = None

    @property
    def checkpoint(self) -> Checkpoint:
        """What is written while it is `applied`."""
        return Checkpoint(self.model, self.processing_class, self.config, self.report, self.removal)

    @contextmanager
    def applied(self, keep: bool = True) -> Iterator[None]:
        """The model is pruned for the body of the `with`; it stays so if `keep` is set and the body returns."""
        # What was recovered has the zeros in it.
        masks = {} if self.recovered else self.masks
        targets = () if self.recovered else self.targets
        new_weights = NewWeights() if self.recovered else self.new_weights
        routes = {} if self.removal is None else self.removal.routes
        with (
            replaced(self.model, self.recovered, keep),
            applied(self.model, targets, masks, keep, new_weights, routes),
        ):
            yield
        if keep:
            self.new_weights.clear()
            if self.removal is not None:
                mark_smaller(self.model)

    def save_pretrained(self, directory: str | Path, *, overwrite: bool = False, repo_id: str | None = None) -> None:
        """Write the pruned checkpoint, whole or not at all; with `apply=False` the model in memory stays as it is.

        Args:
            repo_id: the name the card's loading snippet uses; the folder's by default.

        Raises:
            FileExistsError: the folder exists and `overwrite` is not set.
            OSError: it cannot be written; nothing of it remains.
        """
        if not self.processes.is_main and not is_sharded(self.model):
            return
        with self.applied(keep=False):
            write_checkpoint(
                directory, self.checkpoint, overwrite=overwrite, where=repo_id, writes=self.processes.is_main
            )

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        token: str | None = None,
    ) -> str:
        """Upload the pruned checkpoint with its card; returns the address of the commit (or pull request), in the main
        process.

        Raises:
            OSError: no token, or the Hub refuses; the message says what to do and where the checkpoint is kept.
        """
        if not self.processes.is_main:
            self.save_pretrained(repo_id)  # takes part in gathering the shards, and writes nothing
            return ""
        return push_saved(
            self.save_pretrained, repo_id, private=private, revision=revision, create_pr=create_pr, token=token
        )
