"""Selective updates: at each step only the parameter groups with the largest gradient norm train.

The others have no gradient at all (None), so that the optimizer skips them: with a gradient of zeros AdamW would still
move them, by momentum and by weight decay.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradprobe_hf.model.families import block_of
from gradprobe_hf.model.fsdp import is_sharded, local
from gradprobe_hf.model.targets import matches
from gradprobe_hf.runtime.option_checks import number, patterns, whole
from gradprobe_hf.training.callback import StepCallback, logger, parameters_of

Grouping = Literal["block", "matrix"] | Sequence[str]

OUTSIDE = "outside the blocks"
REST = "the rest"
FILE_NAME = "gradprobe_selective_updates.json"


class SelectiveUpdateCallback(StepCallback):
    """Updates the parameter groups with the largest gradient norm; all others stay bit-identical in that step.

    Args:
        top_k: number of groups that train.
        fraction: fraction of the groups that train, in (0, 1], at least one; instead of `top_k`.
        every: steps for which a choice stands.
        groups: `"block"`, one group per block of the model, and one for everything outside the blocks; `"matrix"`, one
            per parameter; or patterns of parameter names, one group per pattern, and one for the rest. They are made of
            what the optimizer holds and trains, and made again when it trains more, as with layers unfrozen on the way.

    Attributes:
        members: group -> its parameters, once training has begun.
        chosen: the groups that train now.
        counts: group -> steps in which it trained.

    Raises:
        ValueError: neither or both of `top_k` and `fraction`, or a value out of range; when training begins, a `top_k`
            above the number of groups, or a pattern that matches nothing.

    Example:
        ```python
        callback = SelectiveUpdateCallback(top_k=2)
        Trainer(model, args, train_dataset=rows, callbacks=[callback]).train()
        print(callback.summary())
        ```
    """

    leaves_out_gradients = True
    remembers = True

    def __init__(
        self,
        top_k: int | None = None,
        fraction: float | None = None,
        every: int = 1,
        groups: Grouping = "block",
    ) -> None:
        super().__init__()
        if (top_k is None) == (fraction is None):
            raise ValueError(f"top_k={top_k} and fraction={fraction}: pass one of the two.")
        if top_k is not None:
            whole("top_k", top_k, at_least=1)
        if fraction is not None:
            number("fraction", fraction, "a fraction in (0, 1]", lambda x: 0 < x <= 1)
        whole("every", every, at_least=1)
        if isinstance(groups, str) and groups not in ("block", "matrix"):
            raise ValueError(f"groups={groups!r}: choose 'block', 'matrix', or pass a list of patterns.")
        if not isinstance(groups, str):
            groups = patterns("groups", groups)
        self.top_k, self.fraction, self.every, self.groups = top_k, fraction, every, groups
        self.members: dict[str, list[nn.Parameter]] = {}
        self.chosen: list[str] = []
        self.counts: Counter[str] = Counter()
        self._frozen: list[nn.Parameter] = []  # what the optimizer holds, and does not train yet

    @property
    def groups_per_step(self) -> int:
        """How many groups train in a step."""
        if self.top_k is not None:
            return min(self.top_k, len(self.members))
        return max(1, round((self.fraction or 0.0) * len(self.members)))

    def begin(self) -> None:
        self._group()
        self.chosen, self.counts = [], Counter()

    def _group(self) -> None:
        held = {id(parameter) for parameter in parameters_of(self.optimizer)}
        self._frozen = [one for one in self.model.parameters() if id(one) in held and not one.requires_grad]
        self.members = {}
        for label, parameter in _grouped(self.model, self.groups, held):
            self.members.setdefault(label, []).append(parameter)
        if self.top_k is not None and self.top_k > len(self.members):
            raise ValueError(
                f"top_k={self.top_k} of {len(self.members)} groups ({', '.join(self.members)}): choose fewer."
            )

    @torch.no_grad()
    def before_step(self) -> None:
        if any(one.grad is not None for one in self._frozen):
            self._group()  # of what was frozen until now, and in no group: it would train at every step
        # By the number of the step, so that a resumed run chooses at the same steps; `restore` has the choice between.
        if not self.chosen or (self.step - 1) % self.every == 0:
            # Nothing can be chosen by gradients that are no numbers. A GradScaler skips the step: all are left to it.
            self.chosen = self._largest_groups()
            if not self.chosen:
                return
        for label, parameters in self.members.items():
            if label not in self.chosen:
                for parameter in parameters:
                    parameter.grad = None
        self.counts.update(self.chosen)

    def end(self) -> None:
        logger.info("%s", self.summary())

    def summary(self) -> str:
        """How often each group trained, as lines of text."""
        lines = [f"{count:8d}  {label}" for label, count in self.counts.most_common()]
        never = len(self.members) - len(self.counts)
        return "\n".join([f"groups updated in {self.step} steps:", *lines, f"{never} groups were never updated"])

    def save(self, folder: Path) -> None:
        (folder / FILE_NAME).write_text(json.dumps({"chosen": self.chosen, "counts": self.counts}, indent=2) + "\n")

    def restore(self, folder: Path) -> None:
        if not (folder / FILE_NAME).exists():
            logger.warning("%s has no choice of this callback: the next step chooses groups anew", folder)
        else:
            saved = json.loads((folder / FILE_NAME).read_text())
            # With other `groups` than in the run that saved, its choice means nothing: the next step chooses anew.
            self.chosen = [label for label in saved["chosen"] if label in self.members]
            self.counts = Counter({label: n for label, n in saved["counts"].items() if label in self.members})

    def _largest_groups(self) -> list[str]:
        """The groups with the largest gradient norm: one foreach call and one synchronisation with the device.

        None of them where the norm of one is no number.
        """
        labels, gradients, owners = list(self.members), [], []
        for index, parameters in enumerate(self.members.values()):
            for parameter in parameters:
                if parameter.grad is not None:
                    gradients.append(local(parameter.grad))
                    owners.append(index)
        if not gradients:
            raise ValueError("no parameter has a gradient: call backward before the optimizer's step.")
        squares = _squared_norms(gradients)
        # Nothing is read before `tolist` below, which waits for the device once.
        totals = squares.new_zeros(len(labels)).index_add_(0, torch.tensor(owners).to(squares.device), squares)
        # Squares of shards add up to those of the whole gradient. DDP has reduced gradients already: every process
        # computes the same totals.
        if is_sharded(self.model):
            dist.all_reduce(totals)
        largest = totals.topk(self.groups_per_step).indices
        *indices, are_numbers = torch.cat([largest, totals.isfinite().all().view(1)]).tolist()
        return [labels[index] for index in indices] if are_numbers else []


def _squared_norms(gradients: Sequence[Tensor]) -> Tensor:
    """`[gradients]`, in float32 at least: a sum of squares overflows in half precision."""
    widest = torch.float64 if any(one.dtype == torch.float64 for one in gradients) else torch.float32
    norms = torch._foreach_norm(list(gradients), 2, widest)
    return torch.stack([norm.to(norms[0].device) for norm in norms]).square()


def _grouped(model: nn.Module, groups: Grouping, held: Set[int]) -> list[tuple[str, nn.Parameter]]:
    """(group, parameter) of every parameter that requires a gradient and whose id is among those held."""
    named = [(name, one) for name, one in model.named_parameters() if one.requires_grad and id(one) in held]
    if groups == "matrix":
        return named
    if groups == "block":
        return [(block_of(model, name.rpartition(".")[0]) or OUTSIDE, parameter) for name, parameter in named]
    for pattern in groups:
        if not any(matches(pattern, name) for name, _ in named):
            raise ValueError(
                f"pattern {pattern!r} of groups matches no parameter that the optimizer trains; their names are like "
                f"{named[0][0]!r}."
            )
    return [
        (next((pattern for pattern in groups if matches(pattern, name)), REST), parameter) for name, parameter in named
    ]
