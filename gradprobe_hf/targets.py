"""Targets: which weight matrices of a model may be pruned, and where in the model each of them is used.

Layout, here and below: a target's matrix is `[out, in]`. GPT-2's `Conv1D` stores `[in, out]`, so its target is
`transposed`; an embedding stores `[tokens, features]`, one row per token, and is used as it is stored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

Kind = Literal["linear", "conv1d", "embedding"]


@dataclass(frozen=True)
class Site:
    """A module that uses a target's matrix. Tied weights have several."""

    module: str
    kind: Kind


@dataclass(frozen=True)
class Target:
    """One prunable matrix.

    Attributes:
        name: its parameter's name; of tied parameters, the first.
        shape: (out, in).
        transposed: True when the parameter stores `[in, out]`.
        sites: the modules that use it.
        block: the transformer block it lives in, `""` outside of the blocks.
        role: what it is inside its block, like `"mlp.down_proj"`.
    """

    name: str
    shape: tuple[int, int]
    transposed: bool
    sites: tuple[Site, ...]
    block: str
    role: str

    @property
    def numel(self) -> int:
        return self.shape[0] * self.shape[1]

    def matrix(self, model: nn.Module) -> Tensor:
        """A view `[out, in]` of the parameter: writing to it writes to the model."""
        parameter = model.get_parameter(self.name).detach()
        return parameter.t() if self.transposed else parameter


def find_targets(
    model: PreTrainedModel, include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> tuple[Target, ...]:
    """The matrices to prune, in the model's order, tied ones once.

    Without `include`: every `nn.Linear` and `Conv1D` inside the blocks. With it: whatever it matches. `exclude` is
    applied last. A pattern is an exact module (or parameter) name, the end of one (`"q_proj"`), a glob, or `"re:"`
    and a regular expression that is searched for.

    Raises:
        ValueError: a pattern that matches nothing, or nothing left to prune.
    """
    sites = _prunable(model)
    chosen = _matched(include, sites, "include") if include else _inside_blocks(model, sites)
    chosen -= _matched(exclude, sites, "exclude")
    targets = tuple(t for t in _by_parameter(model, sites) if any(site.module in chosen for site in t.sites))
    if not targets:
        raise ValueError(
            f"nothing to prune in {type(model).__name__}: "
            + ("include and exclude together leave no matrix." if include or exclude else _no_blocks(sites))
        )
    return targets


def check_editable(model: nn.Module, targets: Sequence[Target]) -> None:
    """Raise ValueError for the first matrix whose weights cannot be edited: quantized, or not in memory."""
    for target in targets:
        _check_editable(target, model.get_parameter(target.name))


def check_group(targets: Sequence[Target], n: int, m: int) -> None:
    """Raise ValueError for the first matrix whose rows do not divide into groups of m inputs."""
    for target in targets:
        if target.shape[1] % m:
            raise ValueError(
                f"pattern {n}:{m} cannot hold in {target.name}: its {target.shape[1]} inputs are not divisible by {m}. "
                f"Exclude it with exclude=[{target.role!r}] (--exclude {target.role}), or prune without a pattern."
            )


def block_of(model: nn.Module, module_name: str) -> str:
    """The outermost element of an `nn.ModuleList` around the module, like `model.layers.3`; `""` if there is none."""
    parts = module_name.split(".")
    for depth, part in enumerate(parts):
        if part.isdigit() and isinstance(model.get_submodule(".".join(parts[:depth])), nn.ModuleList):
            return ".".join(parts[: depth + 1])
    return ""


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern names this module.

    >>> [matches(p, "model.layers.0.mlp.up_proj") for p in ("up_proj", "model.layers.0.*", "re:layers.[01].mlp", "up")]
    [True, True, True, False]
    """
    if pattern.startswith("re:"):
        return re.search(pattern[3:], name) is not None
    return name == pattern or name.endswith("." + pattern) or fnmatchcase(name, pattern)


def _prunable(model: nn.Module) -> list[Site]:
    """Modules that are a plain linear map. A subclass with a forward of its own may use its weight differently."""
    plain: dict[Kind, type[nn.Module]] = {"linear": nn.Linear, "conv1d": Conv1D, "embedding": nn.Embedding}
    return [
        Site(name, kind)
        for name, module in model.named_modules()
        for kind, cls in plain.items()
        if isinstance(module, cls) and type(module).forward is cls.forward
    ]


def _inside_blocks(model: nn.Module, sites: list[Site]) -> set[str]:
    """The linear maps of the blocks. T5 keeps an embedding in a block (its position bias): no target unless named."""
    return {site.module for site in sites if site.kind != "embedding" and block_of(model, site.module)}


def _matched(patterns: Sequence[str], sites: list[Site], option: str) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        hits = {s.module for s in sites if matches(pattern, s.module) or matches(pattern, f"{s.module}.weight")}
        if not hits:
            sample = ", ".join(s.module for s in sites[:3])
            raise ValueError(
                f"{option} pattern {pattern!r} matches no prunable module. Prunable modules are named like: {sample}. "
                "Use an exact name, the end of one, a glob like '*.mlp.*', or 're:' and a regular expression."
            )
        found |= hits
    return found


def _by_parameter(model: nn.Module, sites: list[Site]) -> list[Target]:
    """Group the sites by the parameter they share; a linear map's layout wins over an embedding's."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    shared: dict[int, list[Site]] = {}
    for site in sites:
        shared.setdefault(id(model.get_submodule(site.module).weight), []).append(site)
    targets = []
    for key, group in shared.items():
        group.sort(key=lambda site: site.kind == "embedding")
        stored = model.get_parameter(names[key]).shape
        transposed = group[0].kind == "conv1d"
        shape = (stored[1], stored[0]) if transposed else (stored[0], stored[1])
        block = block_of(model, group[0].module)
        role = group[0].module[len(block) + 1 :] if block else group[0].module
        targets.append(Target(names[key], shape, transposed, tuple(group), block, role))
    return targets


def _check_editable(target: Target, weight: Tensor) -> None:
    if not weight.is_floating_point() or type(weight.data) is not torch.Tensor:
        raise ValueError(
            f"{target.name} is stored as {weight.dtype} ({type(weight).__name__}): quantized weights cannot be pruned. "
            "Load the model with dequantize=True, or exclude this matrix."
        )
    if weight.is_meta:
        raise ValueError(
            f"{target.name} has no data here (meta device): offloaded models are not supported yet. "
            "Load the model without device_map, or with one that keeps it in memory."
        )


def _no_blocks(sites: list[Site]) -> str:
    if not sites:
        return "it has no nn.Linear, Conv1D or nn.Embedding."
    return f"it has no blocks (an nn.ModuleList of layers); name matrices with include, like {sites[0].module!r}."
