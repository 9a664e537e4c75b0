"""The two models of a recovery: the pruned one, which trains, and the dense one, which teaches."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accelerate import PartialState
from torch import nn
from transformers import PreTrainedModel

from gradprobe_hf.checkpoint.origin import check_made_of, stored_report
from gradprobe_hf.checkpoint.result import PruneResult
from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.config.recovery import RecoveryConfig
from gradprobe_hf.evaluation.divergence import check_one_vocabulary
from gradprobe_hf.model.loading.adapters import imported_peft
from gradprobe_hf.model.loading.load import Loaded, load
from gradprobe_hf.model.loading.processing import load_processing_class
from gradprobe_hf.recovery.checks import (
    check_alike,
    check_pruned,
    check_related,
    check_trainable,
)
from gradprobe_hf.recovery.distil import check_top_k
from gradprobe_hf.recovery.text import task_of
from gradprobe_hf.report.report import Report
from gradprobe_hf.tasks.columns import check_one_numbering


@dataclass(frozen=True)
class Student:
    """The pruned model.

    Attributes:
        owned: whether it was loaded here, so that it may be trained itself.
        report, config: of its pruning, where that was done with this package.
    """

    model: PreTrainedModel
    owned: bool
    processing_class: Any
    report: Report | None = None
    config: GradProbeConfig | None = None

    @classmethod
    def of(cls, pruned: Any, kwargs: Mapping[str, Any], processing_class: Any) -> Student:
        if isinstance(pruned, PruneResult):
            return cls(pruned.model, False, processing_class or pruned.processing_class, pruned.report, pruned.config)
        if isinstance(pruned, nn.Module):
            loaded = load(pruned)
            found = processing_class or load_processing_class(loaded.model, loaded.processing_name)
            return cls(loaded.model, loaded.model is not pruned, found)
        loaded = load(pruned, **kwargs)
        found = processing_class or load_processing_class(
            loaded.model, loaded.processing_name, **loaded.processing_kwargs
        )
        model = loaded.model.to(PartialState().device)
        report, config = stored_report(str(pruned), kwargs)
        return cls(model, True, found, report, config)

    def check(self, dense: Dense, config: RecoveryConfig) -> None:
        """Raise ValueError where the two models do not go together, or one cannot be used."""
        task = task_of(self.model, config)
        check_trainable(self.model, "recovery")
        check_alike(self.model, dense.model)
        check_related(self.model, dense.model)
        if dense.processing_class is not None and self.processing_class is not None:
            check_one_vocabulary(self.processing_class, dense.processing_class, ("the pruned model", "the teacher"))
        if task is not None and task.labels:
            check_one_numbering(self.model.config, dense.model.config, ("the pruned model", "the teacher"))
        check_pruned(self.model, dense.model)
        check_top_k(dense.model, config.teacher_top_k)
        if config.lora_r is not None:
            imported_peft()  # before anything is trained

    def for_training(self) -> PreTrainedModel:
        """The model to train: a copy of one that is the caller's."""
        return self.model if self.owned else copy.deepcopy(self.model)


class Dense:
    """The teacher; one that is named can be let go, and is read again when it is asked for.

    Adapters are folded into it, unasked: nothing is pruned of it.

    Args:
        kwargs: that the pruned model is loaded with.
        revision: the teacher's own.
        beside: the model on whose device it is to be.

    Attributes:
        kwargs: that the teacher is loaded with.
    """

    def __init__(self, teacher: Any, kwargs: Mapping[str, Any], revision: str | None, beside: PreTrainedModel) -> None:
        self._named = None if isinstance(teacher, nn.Module) else teacher
        common = {name: value for name, value in kwargs.items() if name != "revision"}
        self.kwargs = common if revision is None else common | {"revision": revision}
        self._device = beside.device
        self._kept: Loaded | None = load(teacher, merge_adapters=None) if self._named is None else None

    @property
    def _loaded(self) -> Loaded:
        if self._kept is None:
            self._kept = load(self._named, merge_adapters=None, **self.kwargs)  # type: ignore[arg-type]
            self._kept.model.to(self._device)
        return self._kept

    @property
    def model(self) -> PreTrainedModel:
        return self._loaded.model

    @property
    def processing_class(self) -> Any:
        """The tokenizer of a model that is named."""
        return None if self._named is None else self.stored_processing_class()

    def stored_processing_class(self) -> Any:
        """The tokenizer that is where the model came from."""
        return load_processing_class(self.model, self._loaded.processing_name, **self._loaded.processing_kwargs)

    def check_origin(self, report: Report | None) -> list[str]:
        """What speaks against it as what was pruned; raises as `check_made_of`."""
        argument = "the teacher" if self._named is None else f"teacher={str(self._named)!r}"
        return check_made_of(report, self._loaded, argument, in_memory=self._named is None)

    def release(self) -> None:
        if self._named is not None:
            self._kept = None
