"""Optimizer state -> sortable saliencies of every matrix, and what is wrong with a state that has none."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradprobe_hf.model.fsdp import local
from gradprobe_hf.model.targets import Target
from gradprobe_hf.runtime.row_chunks import row_chunks
from gradprobe_hf.selection.keys import Keys, score_keys
from gradprobe_hf.training.saliency import MOMENTS, SALIENCIES, Saliency, state_names

EPSILON = 1e-6  # as a fraction of the mean of sqrt(v) over a matrix


def saliency_keys(model: nn.Module, optimizer: Optimizer, saliency: Saliency) -> Keys:
    """Keys of every matrix for the selection, a chunk of rows at a time: no saliency is in memory for a whole matrix.

    Args:
        model: in training, without wrappers.
        optimizer: torch's optimizer of its parameters.
        saliency: a key of `SALIENCIES`.
    """
    function, arguments = SALIENCIES[saliency]
    epsilons: dict[str, Tensor] = {}  # the selection asks for the keys of a matrix more than once

    def keys_of(target: Target) -> Iterator[Tensor]:
        weight, moments = target.matrix(model), _moments(model, optimizer, target, saliency)
        scalars = {}
        if "epsilon" in arguments and weight.numel():  # a shard may have no rows
            scalars["epsilon"] = epsilons.setdefault(target.name, EPSILON * mean_root(moments["v"]))
        for rows in row_chunks(weight.shape):
            w = weight[rows].float()
            chunks = {name: moment[rows].float() for name, moment in moments.items()}
            yield score_keys(function(w, **chunks, **scalars), w, target.name)

    return keys_of


def check_state(optimizer: Optimizer, saliency: Saliency) -> None:
    """Refuse an optimizer that does not keep what the saliency reads.

    Raises:
        ValueError: it has taken steps and kept nothing of the kind, or not of each weight, or is not of the Adam
            family.
    """
    state = next((state for state in optimizer.state.values() if state), None)
    missing = [name for name in state_names(saliency) if state is not None and name not in state]
    # Before the first step no state is there to look at. What tells the Adam family is that it has two decay rates.
    if state is None and "betas" not in optimizer.defaults:
        missing = list(state_names(saliency))
    if missing:
        raise ValueError(
            f"saliency={saliency!r} reads {' and '.join(map(repr, missing))} of the optimizer's state, which "
            f"{type(optimizer).__name__} does not keep. Use AdamW, or saliency='magnitude', which reads none."
        )
    for parameter, kept in optimizer.state.items():
        for name in kept.keys() & state_names(saliency):
            check_of_each_weight(parameter, kept[name], optimizer, f"saliency={saliency!r}")


def check_of_each_weight(parameter: Tensor, moment: Tensor, optimizer: Optimizer, reader: str) -> None:
    """Raise ValueError where a moment is not of each weight: GaLore and APOLLO keep those of a projection."""
    if moment.shape != parameter.shape:
        raise ValueError(
            f"{reader} reads a moment of each weight, and {type(optimizer).__name__} keeps one {list(moment.shape)} of "
            f"a parameter {list(parameter.shape)}. Use AdamW."
        )
    if not moment.is_floating_point():
        raise ValueError(
            f"{reader} reads a moment of each weight, and {type(optimizer).__name__} keeps codes ({moment.dtype}) "
            "of it, which are no numbers by themselves. Use AdamW."
        )


def steps_of_state(optimizer: Optimizer, otherwise: int) -> int:
    """Steps that the oldest moments are of, since the beginning or a reset. Args: otherwise: where nothing counts."""
    counts: dict[torch.device, list[Tensor]] = {}  # a fused optimizer counts where its parameters are
    for state in optimizer.state.values():
        if "step" in state:
            count = torch.as_tensor(state["step"])
            counts.setdefault(count.device, []).append(count)
    # One read for all on a device, and none of an optimizer that counts on the host.
    return int(max((float(torch.stack(own).max()) for own in counts.values()), default=otherwise))


def check_one_copy(optimizer: Optimizer) -> None:
    """Refuse an optimizer that writes the weights from a copy of them, in which a mask of the weights undoes nothing.

    Raises:
        ValueError: it is schedule-free.
    """
    # Schedule-free optimizers switch the weights between two averages, and are the only ones with an `eval`: Trainer
    # tells them by it. Their copy, `z`, is there after the first step only.
    if callable(getattr(optimizer, "eval", None)) or any("z" in state for state in optimizer.state.values()):
        raise ValueError(
            f"{type(optimizer).__name__} keeps a second copy of the weights, from which pruned ones come back. Use "
            "AdamW to prune, and SparsityCallback with this one to train what is pruned."
        )


def mean_root(v: Tensor) -> Tensor:
    """The mean of sqrt(v) over a matrix `[out, in]`, a scalar tensor: the scale of its gradients."""
    return torch.stack([v[rows].float().sqrt().sum() for rows in row_chunks(v.shape)]).sum() / v.numel()


def _moments(model: nn.Module, optimizer: Optimizer, target: Target, saliency: Saliency) -> dict[str, Tensor]:
    """Argument of a saliency -> moment `[out, in]`; of a sharded parameter this process's rows.

    Raises:
        ValueError: the parameter has no such state, or none yet.
    """
    # Torch keys its state by the parameter object. Under FSDP2 that is the sharded parameter, and its moments are
    # DTensors placed alike: their local part belongs to the local rows of the weight.
    state = optimizer.state.get(model.get_parameter(target.parameter), {})
    for name in state_names(saliency):
        if name not in state:
            raise ValueError(
                f"saliency={saliency!r} reads {name!r}, and {type(optimizer).__name__} has no state for "
                f"{target.parameter}{'' if state else ' yet'}: "
                + ("its state is empty until it has made a step with that gradient. " if not state else "")
                + "Begin later, exclude this matrix, or use an optimizer of the Adam family."
            )
    arguments = SALIENCIES[saliency][1]
    return {letter: target.view(local(state[name])) for letter, name in MOMENTS.items() if letter in arguments}
