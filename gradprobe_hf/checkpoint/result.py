"""PruneResult: what a run gives back, and how it is saved and shared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from gradprobe_hf.checkpoint.saving import Savable
from gradprobe_hf.checkpoint.write import Checkpoint
from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.model.targets import Target
from gradprobe_hf.reconstruction.new_weights import NewWeights
from gradprobe_hf.report.report import Report
from gradprobe_hf.run.apply import applied, check_still_zero, is_smaller, mark_smaller, replaced
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.structures.removal import Removal


@dataclass(frozen=True, repr=False)
class PruneResult(Savable):
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
        weights: a fingerprint of the model as it was handed back.
        output_dir: where it was saved; None: nowhere.
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
    weights: str = ""
    output_dir: str | Path | None = None

    @property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint(self.model, self.processing_class, self.config, self.report, self.removal)

    @property
    def is_applied(self) -> bool:
        """Whether the model has all that was decided of it, but for zeros: masks alone give it those."""
        whole = self.removal is None or is_smaller(self.model)
        return whole and not (self.new_weights or self.recovered)

    @contextmanager
    def applied(self, keep: bool = True, together: bool = False) -> Iterator[None]:
        """The model is pruned for the body of the `with`; it stays so if `keep` is set and the body returns.

        Args:
            together: all processes are in this call: what one of them cannot keep (no room for what is offloaded), none
                does.
        """
        # What was recovered has the zeros in it.
        masks = {} if self.recovered else self.masks
        targets = () if self.recovered else self.targets
        new_weights = NewWeights() if self.recovered else self.new_weights
        routes = {} if self.removal is None else self.removal.routes
        with (
            replaced(self.model, self.recovered, keep),
            applied(self.model, targets, masks, keep, new_weights, routes, self.processes if together else None),
        ):
            yield
        if keep:
            self.new_weights.clear()
            if self.removal is not None:
                mark_smaller(self.model)

    def as_written(self) -> AbstractContextManager[None]:
        if self.removal is not None:
            check_still_zero(self.model, self.targets, self.masks)
        return self.applied(keep=False)
