"""Own maps: the weights of blocks that are no linear maps this package knows, and so never targets.

Experts with code of their own (Llama 4, JetMoE), attention whose weights are bare parameters (XLNet), convolutions. A
few of them are in many models. Where they are much of the blocks, "50%" is not what it seems; where they are most of
them, what is left is routers and the like, and the budget was meant for something else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.model.families import block_of
from gradprobe_hf.model.parameters import aliases, own_parameters
from gradprobe_hf.model.sites import plain_uses
from gradprobe_hf.model.targets import Target, patterns_of

MENTIONED = 0.1  # of the weights of the blocks: from here on a report says that they stay
LEAST_KNOWN = 0.5  # of them: with less, they have to be asked for by name


def check_known(model: nn.Module, targets: Sequence[Target], config: GradProbeConfig) -> None:
    """Raise ValueError where most weights of the blocks can never go, and nothing was asked for by name."""
    own, share = _own_maps(model)
    if share <= 1 - LEAST_KNOWN or config.include or config.structure is not None:
        return
    raise ValueError(
        f"{share:.0%} of the weights in the blocks of {type(model).__name__} cannot be pruned ({_sample(own)}): they "
        "are no nn.Linear, Conv1D or fused experts that compute as these do, and a sparsity would be one of the few "
        f"others. To prune those, ask for them by name: include={patterns_of(model, targets)} (--include)."
    )


def about_own_maps(model: nn.Module, config: GradProbeConfig) -> list[str]:
    """What a report says of weights of the blocks that stay whatever the budget is; nothing where they are few."""
    own, share = _own_maps(model)
    if share < MENTIONED or config.structure is not None:
        return []
    return [
        f"{share:.0%} of the weights in the blocks ({_sample(own)}) are not pruned and no part of the budget: they are "
        "no nn.Linear, Conv1D or fused experts that compute as these do."
    ]


def _own_maps(model: nn.Module) -> tuple[Mapping[str, int], float]:
    """Sizes of the matrices in blocks that no map is known of, by name, and their share of all."""
    tied = aliases(model)
    known = {tied.get(use.parameter, use.parameter) for use in plain_uses(model)}
    matrices = {name: one.numel() for name, one in own_parameters(model) if one.ndim >= 2}
    every = {name: size for name, size in matrices.items() if block_of(model, name.rpartition(".")[0])}
    own = {name: size for name, size in every.items() if name not in known}
    return own, sum(own.values()) / sum(every.values()) if every else 0.0


def _sample(sizes: Mapping[str, int]) -> str:
    largest = sorted(sizes, key=lambda name: -sizes[name])
    return ", ".join(f"`{name}`" for name in largest[:3]) + (", ..." if len(largest) > 3 else "")
