"""Prune during training, by saliencies read from the optimizer's state: AdamW's moments say what matters.

From `begin_step` to `end_step` the least salient weights are set to zero every few steps, more of them each time.
Between two updates all weights train, so pruned ones can grow back. Each update chooses among all weights anew, and
meets its sparsity to the element. At `end_step` the mask is frozen.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch.utils.hooks import RemovableHandle
from transformers import TrainerControl, TrainerState, TrainingArguments

from gradprobe_hf.model.fsdp import is_sharded
from gradprobe_hf.model.targets import Target, find_targets
from gradprobe_hf.runtime.option_checks import number, patterns, whole
from gradprobe_hf.runtime.processes import Processes, join_processes
from gradprobe_hf.scores.budget import Budget
from gradprobe_hf.selection.packed_masks import PackedMasks
from gradprobe_hf.selection.select import select_masks, units
from gradprobe_hf.training.callback import StepCallback, logger
from gradprobe_hf.training.keeper import MaskKeeper, load_masks
from gradprobe_hf.training.optimizer_state import check_one_copy, check_state, saliency_keys, steps_of_state
from gradprobe_hf.training.saliency import SALIENCIES, Saliency
from gradprobe_hf.training.sparsity import check_not_adapted

Schedule = Literal["cubic", "late-cubic", "linear"]
TrainingScope = Literal["global", "tensor"]

# Fraction of the steps -> fraction of the way from the initial to the target sparsity. Cubic is Zhu & Gupta 2017
# (arXiv:1710.01878), eq. 1, and prunes most at first; late-cubic is its mirror image, and prunes most at last.
SCHEDULES: dict[Schedule, Callable[[float], float]] = {
    "cubic": lambda x: 1 - (1 - x) ** 3,
    "late-cubic": lambda x: x**3,
    "linear": lambda x: x,
}
# Steps after which AdamW's first moment is mostly made of what came since: 1 - 0.9^10 = 65%.
MOMENT_STEPS = 10
HISTORY_FILE = "gradprobe_mask_updates.json"
SAME_AS_MAGNITUDE = 0.97  # overlap with magnitude's mask above which the optimizer's state has decided next to nothing


@dataclass(frozen=True)
class MaskUpdate:
    """One update of the mask.

    Attributes:
        step: optimizer step after which it was made.
        sparsity: target of this step, fraction in [0, 1).
        zeros, weights: pruned weights and all weights, of this process.
        magnitude_overlap: fraction of the pruned weights that magnitude would have pruned too. Measured in the first
            update that prunes anything, else None: later ones, and those of a model that began with zeros, find small
            whatever was pruned before.
        seconds: duration of the update.
    """

    step: int
    sparsity: float
    zeros: int
    weights: int
    magnitude_overlap: float | None
    seconds: float


class StatePruningCallback(StepCallback):
    """Prunes a model while it trains, by saliencies of the optimizer's state.

    Args:
        target_sparsity: fraction in (0, 1) of the matrices' weights that are zero from `end_step` on.
        saliency: a key of `SALIENCIES`; the default is `|w| sqrt(|m|)`, for the measurements in docs/training.md.
        begin_step, end_step: optimizer steps of the first and the last update, counted from 1. After `end_step` the
            mask is kept.
        every: steps between two updates.
        schedule: how sparsity rises from `initial_sparsity` to the target: `"cubic"` prunes most at first,
            `"late-cubic"` most at last, `"linear"` evenly.
        initial_sparsity: sparsity of the first update, in [0, target_sparsity]. A model that has more zeros begins with
            those, and keeps them until then.
        scope: over what the budget is spent: all matrices together (`"global"`), or each (`"tensor"`).
        include, exclude: patterns of module names, as in `GradProbeConfig`.

    Attributes:
        history: the updates so far, of a resumed run too.
        keeper: the frozen mask, from `end_step` on; None before.

    Raises:
        ValueError: an argument out of range; when training begins, an optimizer that keeps none of the state that the
            saliency reads or has a second copy of the weights (schedule-free ones), matrices that do not train or are
            in no optimizer that was passed, more zeros than the target, PEFT adapters, or masks in `output_dir` of
            other weights, or of another target, scope or choice of matrices; at an update, a parameter whose state is
            empty.

    A run that is resumed may have another schedule, as long as its mask is not frozen and the target is not below what
    was reached: a longer one stays at that until it comes to it, and one that is past a nearer `end_step` without a
    mask chooses it at its next step.

    An update that falls within 10 steps of a reset of the moments (`SpikeAwareClip` makes them) waits until these are
    over: a moment of one step is the gradient of one batch. The last one is made at `end_step` all the same, with a
    warning.

    Source: the schedule of Zhu & Gupta 2017 (arXiv:1710.01878), eq. 1; saliencies as in `SALIENCIES`.

    Example:
        ```python
        callback = StatePruningCallback(0.5, begin_step=100, end_step=900, every=50)
        Trainer(model, args, train_dataset=rows, callbacks=[callback]).train()
        print(callback.history[-1].zeros)
        ```
    """

    decides_zeros = True
    remembers = True

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
        self.initial_sparsity = initial_sparsity
        self.include, self.exclude = patterns("include", include), patterns("exclude", exclude)
        self._validate()
        self.history: list[MaskUpdate] = []
        self.keeper: MaskKeeper | None = None
        self.targets: tuple[Target, ...] = ()
        self._is_due = False
        self._first = initial_sparsity  # of the first update
        self._reached = 0.0  # in the run that is resumed: a longer schedule waits there
        self._earlier: MaskKeeper | None = None  # of zeros that the model began with, until the first update

    def _validate(self) -> None:
        for name, value, choices in (
            ("saliency", self.saliency, tuple(SALIENCIES)),
            ("schedule", self.schedule, tuple(SCHEDULES)),
            ("scope", self.scope, get_args(TrainingScope)),
        ):
            if value not in choices:
                raise ValueError(f"{name}={value!r} is not known; choose one of {', '.join(map(repr, choices))}.")
        number("target_sparsity", self.target_sparsity, "a fraction in (0, 1)", lambda x: 0 < x < 1)
        number("initial_sparsity", self.initial_sparsity, "a fraction in [0, 1)", lambda x: 0 <= x < 1)
        for name in ("begin_step", "end_step", "every"):
            whole(name, getattr(self, name), at_least=1)
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

    def sparsity_at(self, step: int) -> float:
        """Sparsity of an update after this step, a fraction in [0, 1).

        >>> callback = StatePruningCallback(0.8, begin_step=10, end_step=110, schedule="linear")
        >>> callback.sparsity_at(10), callback.sparsity_at(60), callback.sparsity_at(200)
        (0.0, 0.4, 0.8)
        """
        if step >= self.end_step:
            return self.target_sparsity
        if step <= self.begin_step:
            return max(self._first, self._reached)
        elapsed = (step - self.begin_step) / (self.end_step - self.begin_step)
        progress = SCHEDULES[self.schedule](elapsed)
        return max(self._reached, self._first + (self.target_sparsity - self._first) * progress)

    def begin(self) -> None:
        check_not_adapted(self.model)
        self.targets = find_targets(self.model, self.include, self.exclude)
        check_state(self.optimizer, self.saliency)
        check_one_copy(self.optimizer)
        self._check_trained()
        self.check_optimized(
            (target.parameter for target in self.targets),
            "Another one would fill its zeros: name the matrices that this one does not train in exclude.",
        )
        self.tell_of_rounding(target.parameter for target in self.targets)
        self.history, self.keeper, self._is_due = [], None, False
        self._first, self._reached, self._earlier = self.initial_sparsity, 0.0, None
        if self.step >= self.end_step:  # a resumed run; `restore` has the exact mask, unless its file is missing
            zeros = PackedMasks({target.name: target.matrix(self.model) == 0 for target in self.targets})
            # Fewer than the target's are no mask: the run that was saved had a later end_step.
            self._is_due = any(count < asked for count, asked in self._counts(zeros))
            if not self._is_due:
                self._freeze(zeros)
        elif self.step < self.begin_step:  # nothing was pruned by this callback yet
            self._keep_earlier()

    def gradient_hooks(self) -> list[RemovableHandle]:
        return kept.gradient_hooks() if (kept := self.keeper or self._earlier) else []

    def before_step(self) -> None:
        if kept := self.keeper or self._earlier:
            kept.mask_gradients()

    def after_step(self) -> None:
        if kept := self.keeper or self._earlier:
            kept.mask_weights()
        if self.keeper:
            return
        if self.step < self.begin_step:  # the first step has filled the state: no need to wait for an update
            check_state(self.optimizer, self.saliency)
        else:
            is_last = self.step >= self.end_step
            self._is_due = self._is_due or is_last or (self.step - self.begin_step) % self.every == 0
            # A Trainer tells of steps that its GradScaler skips, too. The first ones are as a rule, and leave no state.
            begun = self.saliency == "magnitude" or any(self.optimizer.state.values())
            if self._is_due and (is_last or (begun and not self._forgot())):
                self.update()

    def end(self) -> None:
        """Warn if the model that is left is less sparse than the target.

        It is not pruned once more: a Trainer that loaded an earlier best model was asked for that model.
        """
        if self.keeper is None:
            logger.warning(
                "training ended after %d steps, before end_step=%d: %.1f%% of the weights are zero, where the last "
                "update left %.1f%%. Pruned weights grow back between updates, and load_best_model_at_end may have put "
                "back a checkpoint from before it",
                self.step,
                self.end_step,
                100 * self._zeros_now(),
                100 * (self.history[-1].sparsity if self.history else 0.0),
            )
        elif self.keeper.nonzero():
            logger.warning(
                "load_best_model_at_end has put back a checkpoint from before end_step=%d, which is less sparse than "
                "the mask. Its weights are left as they are; choose metric_for_best_model so that late checkpoints "
                "win, or prune the model again",
                self.end_step,
            )

    def _zeros_now(self) -> float:
        """The share of the weights that are zero; of a sharded model of this process's."""
        parts = [target.matrix(self.model) for target in self.targets]
        return sum(int((part == 0).sum()) for part in parts) / max(1, sum(part.numel() for part in parts))

    def update(self) -> None:
        """Choose a mask with the sparsity of this step, and set its weights to zero."""
        began = time.perf_counter()
        self._is_due = False
        if self._forgot():
            logger.warning(
                "the optimizer's moments are of less than %d steps before end_step=%d, where the mask is frozen: they "
                "were reset, or a checkpoint had none. It is chosen by the gradients of few batches: choose another "
                "end_step (or reset_every)",
                MOMENT_STEPS,
                self.end_step,
            )
        sparsity = self.sparsity_at(self.step)
        masks = self._select(self.saliency, sparsity)
        overlap = self._magnitude_overlap(masks, sparsity)
        keeper = MaskKeeper(self.model, self.targets, masks)
        keeper.mask_weights()
        if self._earlier:
            self._earlier = None
            self.remove_hooks()
        # Before `end_step` the masks are dropped here: until the next update pruned weights train like all others.
        if self.step >= self.end_step:
            self.keeper = keeper
        weights, zeros = sum(mask.numel() for mask in masks.values()), keeper.zeros
        self.history.append(MaskUpdate(self.step, sparsity, zeros, weights, overlap, time.perf_counter() - began))

    def save(self, folder: Path) -> None:
        if join_processes().is_main:
            updates = [asdict(update) for update in self.history]
            kept = {"initial_sparsity": self._first, "updates": updates}
            (folder / HISTORY_FILE).write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
        if self.keeper:
            self.keeper.save(folder)

    def restore(self, folder: Path) -> None:
        if (folder / HISTORY_FILE).is_file():
            kept = json.loads((folder / HISTORY_FILE).read_text(encoding="utf-8"))
            self.history = [MaskUpdate(**update) for update in kept["updates"]]
            # Of a later `begin_step` the model's own zeros are the first already.
            self._first = max(self._first, kept["initial_sparsity"])
            self._reached = self.history[-1].sparsity if self.history else 0.0
            # An update may have been waiting when the checkpoint was saved.
            since = (self.step - self.begin_step) % self.every
            waits = self.step >= self.begin_step and all(one.step < self.step - since for one in self.history)
            self._is_due = self._is_due or waits
        elif self.step > self.begin_step:
            logger.warning("%s has no history of this callback: that of updates before it is not known", folder)
        masks = load_masks(self.model, folder)
        if masks is not None:
            self._check_frozen(masks, folder)
            self._freeze(masks).check_restored(folder)
        elif self.keeper:
            logger.warning("%s has no masks of this callback: the weights that are zero now are kept at zero", folder)
        elif self.step >= self.end_step:
            logger.warning(
                "%s is of step %d, and not pruned to target_sparsity=%s yet, although end_step=%d: the mask is chosen "
                "and frozen after the next step",
                folder,
                self.step,
                self.target_sparsity,
                self.end_step,
            )
        elif self.history and self.history[-1].sparsity > self.target_sparsity:
            raise ValueError(
                f"{folder} has been pruned to {self.history[-1].sparsity:.1%} already, and target_sparsity="
                f"{self.target_sparsity} would bring some of the weights back: choose a larger one, or begin anew."
            )

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        if self.end_step > state.max_steps:
            logger.warning(
                "end_step=%d is beyond the %d steps of this run, which ends before the mask is frozen: the target "
                "sparsity is not reached. Choose an end_step of at most %d, or train longer",
                self.end_step,
                state.max_steps,
                state.max_steps,
            )

    def _forgot(self) -> bool:
        """Whether the moments were reset so lately that they know a few batches alone."""
        reads = self.saliency != "magnitude"
        return reads and steps_of_state(self.optimizer, self.step) < min(MOMENT_STEPS, self.step)

    def _freeze(self, masks: PackedMasks) -> MaskKeeper:
        self.keeper = MaskKeeper(self.model, self.targets, masks)
        return self.keeper

    def _counts(self, masks: PackedMasks) -> list[tuple[int, int]]:
        """Of each unit of the scope the weights that these masks prune, and those that the target asks for."""
        found = torch.tensor([int(masks[target.name].sum()) for target in self.targets])
        by_name = dict(zip((t.name for t in self.targets), self._processes().sum_(found).tolist(), strict=True))
        return [
            (sum(by_name[one.name] for one in unit), round(self.target_sparsity * sum(one.numel for one in unit)))
            for unit in units(self.targets, self.scope)
        ]

    def _check_frozen(self, masks: PackedMasks, folder: Path) -> None:
        """Raise ValueError if the frozen mask of a checkpoint is not what this callback was asked for."""
        own = {target.name for target in self.targets}
        if self.step < self.end_step:
            reason = f"end_step={self.end_step} comes after its step {self.step}"
        elif names := sorted(set(masks) ^ own):
            reason = f"include and exclude choose other matrices ({', '.join(names[:3])})"
        elif counts := [(count, asked) for count, asked in self._counts(masks) if count != asked]:
            count, asked = counts[0]
            reason = (
                f"target_sparsity={self.target_sparsity} with scope={self.scope!r} asks for {asked:,} zeros where it "
                f"has {count:,}"
            )
        else:
            return
        raise ValueError(
            f"the mask in {folder} is frozen, and {reason}. Resume with the arguments of the run that saved it; to "
            "prune further, load the checkpoint's model and begin a new run."
        )

    def _keep_earlier(self) -> None:
        """Begin from zeros that are there: the first update chooses among all weights, and the others grow back.

        A matrix that is nothing but zeros was made so, and has yet to learn.
        """
        zeros = PackedMasks({target.name: target.matrix(self.model) == 0 for target in self.targets})
        counts = self._processes().sum_(torch.tensor([int(mask.sum()) for mask in zeros.values()]))
        pruned = {t.name: n for t, n in zip(self.targets, counts.tolist(), strict=True) if 0 < n < t.numel}
        weights = sum(target.numel for target in self.targets)
        sparsity = sum(pruned.values()) / weights
        if sum(pruned.values()) > math.ceil(self.target_sparsity * weights):
            raise ValueError(
                f"{sparsity:.1%} of the weights are zero already, and target_sparsity={self.target_sparsity} would "
                "bring some of them back: choose a larger one, or keep the zeros as they are with SparsityCallback."
            )
        if pruned:
            logger.info("%.1f%% of the weights are zero already: the schedule begins there", 100 * sparsity)
            self._first = min(max(self._first, sparsity), self.target_sparsity)
            columns = {name: zeros.columns(name) for name in pruned}
            self._earlier = MaskKeeper(self.model, self.targets, PackedMasks.from_packed(zeros.all_packed, columns))

    def _check_trained(self) -> None:
        frozen = [t.name for t in self.targets if not self.model.get_parameter(t.parameter).requires_grad]
        if frozen and self.saliency != "magnitude":
            raise ValueError(
                f"saliency={self.saliency!r} reads the optimizer's state, which has none of matrices that do not train "
                f"(requires_grad=False): {', '.join(frozen[:3])}{', ...' if len(frozen) > 3 else ''}. Name them in "
                "exclude, or use saliency='magnitude'."
            )

    def _processes(self) -> Processes:
        """Those that a choice takes: under DDP all see the same weights and state, and each chooses by itself."""
        return join_processes() if is_sharded(self.model) else Processes()

    def _select(self, saliency: Saliency, sparsity: float) -> PackedMasks:
        budget = Budget(sparsity, self.scope)
        keys = saliency_keys(self.model, self.optimizer, saliency)
        return select_masks(self.targets, keys, budget, self._processes(), is_sharded(self.model))

    def _magnitude_overlap(self, masks: PackedMasks, sparsity: float) -> float | None:
        """`MaskUpdate.magnitude_overlap` of an update with these masks."""
        is_first = sparsity > 0 and all(update.sparsity == 0 for update in self.history)
        begins_with_zeros = self._first > self.initial_sparsity  # which every saliency finds least
        if not is_first or begins_with_zeros or self.saliency == "magnitude":
            return None
        overlap = _overlap(masks, self._select("magnitude", sparsity), self._processes())
        if overlap > SAME_AS_MAGNITUDE:
            logger.warning(
                "saliency=%r prunes %.1f%% of what magnitude prunes: the optimizer's state has changed next to nothing",
                self.saliency,
                100 * overlap,
            )
        return overlap


def _overlap(masks: PackedMasks, others: PackedMasks, processes: Processes) -> float:
    """Fraction of the weights that `masks` prune and `others` prune too, over all processes; 1 if none is pruned."""
    counts = torch.tensor(
        [
            sum(int((masks[name] & others[name]).sum()) for name in masks),
            sum(int(mask.sum()) for mask in masks.values()),
        ]
    )
    both, pruned = processes.sum_(counts).tolist()
    return both / pruned if pruned else 1.0
