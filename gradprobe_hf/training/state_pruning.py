"""Prune from the optimizer's state: a model that trains already holds what importance needs, in AdamW's moments.

From `begin_step` to `end_step` the least salient weights are set to zero every so many steps, more of them each time.
Between two updates they train on, and those that the loss wants come back: the next update chooses among all weights
anew, so that a fixed target is met to the element however often it is. At `end_step` the mask is frozen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradprobe_hf.model.fsdp import is_sharded, local
from gradprobe_hf.model.targets import Target, find_targets
from gradprobe_hf.runtime.processes import Processes, join_processes
from gradprobe_hf.runtime.row_chunks import row_chunks
from gradprobe_hf.scores.budget import Budget
from gradprobe_hf.selection.keys import Keys, score_keys
from gradprobe_hf.selection.packed_masks import PackedMasks
from gradprobe_hf.selection.select import select_masks
from gradprobe_hf.training.callback import StepCallback, logger
from gradprobe_hf.training.keeper import MaskKeeper, load_masks
from gradprobe_hf.training.saliency import MOMENTS, SALIENCIES, Saliency, reads
from gradprobe_hf.training.sparsity import check_not_adapted

Schedule = Literal["cubic", "late-cubic", "linear"]
TrainingScope = Literal["global", "tensor"]

# The share of the way to the target, by the share of the steps. Cubic: Zhu & Gupta 2017 (arXiv:1710.01878), eq. 1,
# which prunes most at first; late-cubic is its mirror image, which prunes most at last.
SCHEDULES: dict[Schedule, Callable[[float], float]] = {
    "cubic": lambda x: 1 - (1 - x) ** 3,
    "late-cubic": lambda x: x**3,
    "linear": lambda x: x,
}
EPSILON = 1e-6  # beside the mean of sqrt(v) of a matrix
SAME_AS_MAGNITUDE = 0.97  # overlap of two masks above which the state has changed nothing worth its cost


@dataclass(frozen=True)
class MaskUpdate:
    """One choice of a mask.

    Attributes:
        step: the optimizer step after which it was made.
        sparsity: asked for; `zeros` of `weights` are what it came to, in this process.
        magnitude_overlap: the part of the pruned weights that magnitude would have pruned too. It is looked at in the
            first update that prunes anything, else None: what was pruned before is small by any measure.
        seconds: that it took.
    """

    step: int
    sparsity: float
    zeros: int
    weights: int
    magnitude_overlap: float | None
    seconds: float


class StatePruningCallback(StepCallback):
    """Prunes a model while it trains, by what its optimizer knows.

    Args:
        target_sparsity: fraction in (0, 1) of the matrices' weights that are zero from `end_step` on.
        saliency: one of `SALIENCIES`; the default is `|w| sqrt(|m|)`, for what docs/training.md measured.
        begin_step, end_step: optimizer steps of the first and of the last update; the mask is kept after that.
        every: steps from one update to the next.
        schedule: `"cubic"` prunes most at first, `"late-cubic"` most at last.
        initial_sparsity: of the first update.
        scope: what one budget is spent over: all matrices together, or each.
        include, exclude: patterns of module names, as in `GradProbeConfig`.

    Attributes:
        history: the updates so far.
        keeper: the frozen mask, after `end_step`.

    Raises:
        ValueError: an argument out of its range; when training begins, an optimizer without the state; at the first
            update, a parameter whose state is still empty.
    """

    decides_zeros = True

    def __init__(
        self,
        target_sparsity: float,
        saliency: Saliency = "momentum",
        begin_step: int = 1,
        end_step: int = 1000,
        every: int = 50,
        schedule: Schedule = "cubic",
        initial_sparsity: float = 0.0,
        scope: TrainingScope = "global",
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.target_sparsity, self.saliency, self.schedule, self.scope = target_sparsity, saliency, schedule, scope
        self.begin_step, self.end_step, self.every = begin_step, end_step, every
        self.initial_sparsity, self.include, self.exclude = initial_sparsity, tuple(include), tuple(exclude)
        self._validate()
        self.history: list[MaskUpdate] = []
        self.keeper: MaskKeeper | None = None
        self.targets: tuple[Target, ...] = ()

    def _validate(self) -> None:
        for name, value, choices in (
            ("saliency", self.saliency, tuple(SALIENCIES)),
            ("schedule", self.schedule, tuple(SCHEDULES)),
            ("scope", self.scope, get_args(TrainingScope)),
        ):
            if value not in choices:
                raise ValueError(f"{name}={value!r} is not known; choose one of {', '.join(map(repr, choices))}.")
        if not 0 < self.target_sparsity < 1:
            raise ValueError(f"target_sparsity={self.target_sparsity} is not a fraction in (0, 1).")
        if not 0 <= self.initial_sparsity <= self.target_sparsity:
            raise ValueError(
                f"initial_sparsity={self.initial_sparsity} does not lie between 0 and target_sparsity="
                f"{self.target_sparsity}."
            )
        if not 1 <= self.begin_step <= self.end_step:
            raise ValueError(
                f"begin_step={self.begin_step} and end_step={self.end_step}: steps are counted from 1, and the first "
                "update comes before the last."
            )
        if self.every < 1:
            raise ValueError(f"every={self.every} is not a number of steps; choose 1 or more.")

    def sparsity_at(self, step: int) -> float:
        """The sparsity of an update after this step.

        >>> callback = StatePruningCallback(0.8, begin_step=10, end_step=110, schedule="linear")
        >>> callback.sparsity_at(10), callback.sparsity_at(60), callback.sparsity_at(200)
        (0.0, 0.4, 0.8)
        """
        if step >= self.end_step:
            return self.target_sparsity
        share = max(0, step - self.begin_step) / (self.end_step - self.begin_step)
        way = SCHEDULES[self.schedule](share)
        return self.initial_sparsity + (self.target_sparsity - self.initial_sparsity) * way

    def begin(self) -> None:
        check_not_adapted(self.model)
        self.targets = find_targets(self.model, self.include, self.exclude)
        check_state(self.optimizer, self.saliency)
        self.history, self.keeper = [], None
        if self.step < self.end_step:
            return
        self._freeze(PackedMasks({target.name: target.matrix(self.model) == 0 for target in self.targets}))

    def watch(self) -> list[RemovableHandle]:
        return self.keeper.watch_gradients() if self.keeper else []

    def after_step(self) -> None:
        if self.keeper:
            self.keeper.mask_weights()
        elif self.begin_step <= self.step <= self.end_step and (
            (self.step - self.begin_step) % self.every == 0 or self.step == self.end_step
        ):
            self.update()

    def end(self) -> None:
        """
        A Trainer may have loaded the best model, of a step before the mask was chosen: it is as sparse as it is.
        """
        if self.keeper is None:
            logger.warning(
                "training ended after %d steps, before end_step=%d: the sparsity is that of the last update, and the "
                "weights may have grown back since",
                self.step,
                self.end_step,
            )
        elif self.keeper.zeros > sum(
            int((target.matrix(self.model)[self.keeper.masks[name]] == 0).sum())
            for name, target in self.keeper.targets.items()
        ):
            logger.warning(
                "load_best_model_at_end has put back a checkpoint from before end_step=%d, which is not as sparse as "
                "the mask. Its weights are left as they are; set metric_for_best_model so that late ones win, or prune "
                "it again",
                self.end_step,
            )

    def update(self) -> None:
        """Choose a mask for the sparsity of this step, and set its weights to zero."""
        began = time.perf_counter()
        sharded = is_sharded(self.model)
        processes = join_processes() if sharded else Processes()  # without shards all processes see the same state
        sparsity, last = self.sparsity_at(self.step), self.step >= self.end_step

        def chosen(saliency: Saliency) -> PackedMasks:
            keys = self._keys(saliency)
            return select_masks(self.targets, keys, Budget(sparsity, self.scope), processes, sharded)

        masks = chosen(self.saliency)
        first = sparsity > 0 and all(update.sparsity == 0 for update in self.history)
        compared = first and self.saliency != "magnitude"
        overlap = _overlap(masks, chosen("magnitude"), processes) if compared else None
        keeper = MaskKeeper(self.model, self.targets, masks)
        keeper.mask_weights()
        if last:
            self.keeper = keeper
        self.history.append(
            MaskUpdate(
                self.step,
                sparsity,
                keeper.zeros,
                sum(mask.numel() for mask in masks.values()),
                overlap,
                time.perf_counter() - began,
            )
        )
        if overlap is not None and overlap > SAME_AS_MAGNITUDE:
            logger.warning(
                "saliency=%r prunes %.1f%% of what magnitude prunes: the optimizer's state has changed next to nothing",
                self.saliency,
                100 * overlap,
            )

    def save(self, folder: Path) -> None:
        if self.keeper:
            self.keeper.save(folder)

    def restore(self, folder: Path) -> None:
        masks = load_masks(self.model, folder)
        if masks is not None and self.keeper:
            self._freeze(masks)

    def _freeze(self, masks: PackedMasks) -> None:
        self.keeper = MaskKeeper(self.model, self.targets, masks)

    def _keys(self, saliency: Saliency) -> Keys:
        """The sortable keys of every matrix, some rows at a time."""
        score_of, wanted = SALIENCIES[saliency]
        epsilons: dict[str, Tensor] = {}

        def of(target: Target) -> Iterator[Tensor]:
            weight, moments = target.matrix(self.model), self._moments(target, saliency)
            more = {}
            if "epsilon" in wanted and weight.numel():
                more["epsilon"] = epsilons.setdefault(target.name, EPSILON * mean_root(moments["v"]))
            for rows in row_chunks(weight.shape):
                w = weight[rows].float()
                parts = {name: moment[rows].float() for name, moment in moments.items()}
                yield score_keys(score_of(w, **parts, **more), w, target.name)

        return of

    def _moments(self, target: Target, saliency: Saliency) -> dict[str, Tensor]:
        """The moments `[out, in]` that a saliency takes, by its argument."""
        parameter = self.model.get_parameter(target.parameter)
        kept = self.optimizer.state.get(parameter, {})
        for name in reads(saliency):
            if name not in kept:
                raise ValueError(
                    f"saliency={saliency!r} reads {name!r}, and {type(self.optimizer).__name__} has no state for "
                    f"{target.parameter}{'' if kept else ' yet'}: "
                    + ("its state is empty until it has made a step with that gradient. " if not kept else "")
                    + "Begin later, exclude this matrix, or use an optimizer of the Adam family."
                )
        taken = SALIENCIES[saliency][1]
        return {letter: target.view(local(kept[name])) for letter, name in MOMENTS.items() if letter in taken}


def check_state(optimizer: Optimizer, saliency: Saliency) -> None:
    """
    Raises:
        ValueError: steps were taken, and the optimizer kept none of what the saliency reads; or it is none that would.
    """
    kept = next((state for state in optimizer.state.values() if state), None)
    missing = [name for name in reads(saliency) if kept is not None and name not in kept]
    if kept is None and "betas" not in optimizer.defaults:
        missing = list(reads(saliency))
    if missing:
        raise ValueError(
            f"saliency={saliency!r} reads {' and '.join(map(repr, missing))} of the optimizer's state, which "
            f"{type(optimizer).__name__} does not keep. Use AdamW, or saliency='magnitude', which reads none."
        )


def mean_root(v: Tensor) -> Tensor:
    """The mean of sqrt(v) over a matrix, a scalar: the state's scale."""
    return torch.stack([v[rows].float().sqrt().sum() for rows in row_chunks(v.shape)]).sum() / v.numel()


def _overlap(masks: PackedMasks, others: PackedMasks, processes: Processes) -> float:
    """The part of the pruned weights that both masks prune; 1 if none is."""
    counts = torch.tensor(
        [
            sum(int((masks[name] & others[name]).sum()) for name in masks),
            sum(int(mask.sum()) for mask in masks.values()),
        ]
    )
    both, pruned = processes.sum_(counts).tolist()
    return both / pruned if pruned else 1.0
