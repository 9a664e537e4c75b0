"""Spike-aware clipping: each element of a gradient is clipped to what its own weight has seen before.

Two parts of SPAM (Huang et al. 2025, arXiv:2501.06842): its clipping and its resets of AdamW's moments. Its warm-up of
the learning rate after each reset, and the sparse moments of its lighter form, are not here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradprobe_hf.model.fsdp import local
from gradprobe_hf.runtime.option_checks import number, whole
from gradprobe_hf.training.callback import StepCallback
from gradprobe_hf.training.optimizer_state import check_of_each_weight


class SpikeAwareClip(StepCallback):
    """Clips every element of a gradient to `[-c, c]`, `c = sqrt(threshold * v)`, and resets AdamW's moments at times.

    v is AdamW's second moment from before the step. An element with v = 0 is not clipped: it could never start to
    train.

    Args:
        threshold: how many times its running mean a squared gradient may be; > 0, 5000 in the paper.
        warmup: steps without clipping at the beginning and after each reset, while v is not known yet; >= 1.
        reset_every: steps between two resets of m, v and the step count of the bias correction; None: no resets.

    Raises:
        ValueError: an argument out of range; when training begins, or once there is state to look at, an optimizer
            without AdamW's second moment of each weight, or that counts its steps where no reset reaches.

    Source: Huang et al. 2025, SPAM (arXiv:2501.06842), the clipping and the resets. SPAM warms the learning rate up
    after each reset, and this does not: a schedule has to.

    Example:
        ```python
        trainer = Trainer(model, args, train_dataset=rows, callbacks=[SpikeAwareClip()])
        ```
    """

    def __init__(self, threshold: float = 5000.0, warmup: int = 150, reset_every: int | None = 500) -> None:
        super().__init__()
        number("threshold", threshold, "a number > 0, 5000 in the paper", lambda x: x > 0)
        whole("warmup", warmup, at_least=1)  # v is empty before the first step
        if reset_every is not None:
            whole("reset_every", reset_every, at_least=1, other="None, or ")
        if reset_every is not None and reset_every <= warmup:
            raise ValueError(f"reset_every={reset_every} is within warmup={warmup}: nothing would ever be clipped.")
        self.threshold, self.warmup, self.reset_every = threshold, warmup, reset_every
        self._has_moments = False  # whether the state has been looked at

    def begin(self) -> None:
        if "betas" not in self.optimizer.defaults:
            raise ValueError(
                f"SpikeAwareClip reads the second moment of AdamW, and {type(self.optimizer).__name__} keeps none. Use "
                "an optimizer of the Adam family."
            )
        self._has_moments = False
        self._check_moments()

    def after_step(self) -> None:
        self._check_moments()

    @torch.no_grad()
    def before_step(self) -> None:
        # Steps since the beginning or the last reset, from the number of this step alone: a resumed run, which knows
        # nothing else, resets and clips at the same steps.
        since = self.step - 1 if self.reset_every is None else (self.step - 1) % self.reset_every
        if since == 0 and self.step > 1:
            self._reset()
        if since >= self.warmup:
            self._clip()

    def _check_moments(self) -> None:
        """Refuse an optimizer with two decay rates that keeps no `exp_avg_sq`, like Adamax, or one in 8 bits.

        Or keeps it of a projection, like GaLore, or counts its steps in a place of its own, like schedule-free ones.
        """
        kept = {} if self._has_moments else {one: state for one, state in self.optimizer.state.items() if state}
        name = type(self.optimizer).__name__
        for parameter, state in kept.items():
            if "exp_avg_sq" not in state:
                raise ValueError(
                    f"SpikeAwareClip reads 'exp_avg_sq' of the optimizer's state, and {name} keeps "
                    f"{', '.join(map(repr, state))}. Use AdamW, not one of its 8-bit forms."
                )
            check_of_each_weight(parameter, state["exp_avg_sq"], self.optimizer, "SpikeAwareClip")
            counts = any("step" in place for place in (state, *self.optimizer.param_groups))
            if self.reset_every is not None and not counts:
                raise ValueError(
                    f"SpikeAwareClip resets AdamW's moments and its count of steps, and where {name} counts is not "
                    "known: its steps would be many times as large after each reset. Set reset_every=None."
                )
        self._has_moments = self._has_moments or bool(kept)

    def _clip(self) -> None:
        # A GradScaler leaves it to a fused optimizer to unscale gradients, and tells it the scale for this one step.
        scale = getattr(self.optimizer, "grad_scale", None)
        for parameter in self._parameters():
            v = self.optimizer.state[parameter].get("exp_avg_sq")
            if parameter.grad is not None and v is not None:
                clip_spikes(local(parameter.grad), local(v), self.threshold, scale)

    def _reset(self) -> None:
        for parameter in self._parameters():
            state = self.optimizer.state[parameter]
            # Zeroed in place, not dropped: capturable and fused optimizers expect `step` on the device.
            for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"):
                if isinstance(state.get(name), Tensor):
                    state[name].zero_()
            if isinstance(state.get("step"), (int, float)):
                state["step"] = 0
            if isinstance(state.get("mu_product"), Tensor):  # NAdam's bias correction, a product over the steps
                state["mu_product"].fill_(1.0)
        for group in self.optimizer.param_groups:  # some count there
            if isinstance(group.get("step"), (int, float)):
                group["step"] = 0

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"] if p in self.optimizer.state]


def clip_spikes(gradient: Tensor, v: Tensor, threshold: float, scale: Tensor | None = None) -> None:
    """Clip a gradient to `sign(g) sqrt(threshold * v)` where `g^2 > threshold * v > 0`, in place.

    Args:
        gradient, v: of one shape.
        threshold: > 0.
        scale: that the gradient has been multiplied with, a scalar; None: with nothing.

    >>> gradient = torch.tensor([3.0, -3.0, 3.0])
    >>> clip_spikes(gradient, torch.tensor([1.0, 1.0, 0.0]), threshold=4.0)
    >>> gradient
    tensor([ 2., -2.,  3.])
    """
    limit = (v.float() * threshold).sqrt_()
    if scale is not None:
        limit.mul_(scale.to(limit.device))
    # Where v is 0 the limit becomes the largest float (infinity in half precision), beyond any gradient. Adding it
    # takes half the time of `masked_fill_` on a CPU.
    limit.add_((v == 0).float(), alpha=torch.finfo(torch.float32).max)
    limit = limit.to(gradient.dtype)
    torch.clamp(gradient, -limit, limit, out=gradient)
