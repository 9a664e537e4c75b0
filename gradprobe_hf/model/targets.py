"""Targets: which weight matrices of a model may be pruned, and where in the model each of them is used.

Layout, here and below: a target's matrix is `[out, in]`. GPT-2's `Conv1D` stores `[in, out]`, so its target is
`transposed`; an embedding stores `[tokens, features]`, one row per token, and is used as it is stored. The experts of a
mixture are fused in tensors `[experts, out, in]` (gpt-oss: `[experts, in, out]`): every expert's slice is a target.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from gradprobe_hf.model.families import block_of, expert_parameters, is_expert, is_fused_experts
from gradprobe_hf.model.fsdp import shard_layout
from gradprobe_hf.model.parameters import aliases, read_weight

Kind = Literal["linear", "conv1d", "embedding", "experts"]


@dataclass(frozen=True)
class Site:
    """A module that uses a target's matrix. Tied weights have several, and an experts module has many matrices."""

    module: str
    kind: Kind


@dataclass(frozen=True)
class Region:
    """A part of a matrix `[out, in]`: slices with both ends."""

    rows: slice
    columns: slice

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start


@dataclass(frozen=True)
class Target:
    """One prunable matrix.

    Attributes:
        name: its parameter's name (of tied parameters, the first); an expert's slice has its index behind it.
        parameter: the parameter it is stored in.
        shape: (out, in).
        transposed: True when the parameter stores `[in, out]`.
        sites: the modules that use it.
        block: the transformer block it lives in, `""` outside of the blocks.
        role: what it is inside its block, like `"mlp.down_proj"`.
        expert: which slice of a fused parameter, None when it is the whole of it.
    """

    name: str
    parameter: str
    shape: tuple[int, int]
    transposed: bool
    sites: tuple[Site, ...]
    block: str
    role: str
    expert: int | None = None

    @property
    def numel(self) -> int:
        return self.shape[0] * self.shape[1]

    def matrix(self, model: nn.Module) -> Tensor:
        """The matrix `[out, in]`: a view of the parameter, so that writing to it writes to the model, unless it is
        offloaded to disk; then a copy, or a view of a mapped file."""
        return self.view(read_weight(model, self.parameter))

    def region(self, model: nn.Module) -> Region:
        """Which rows and columns of the matrix `matrix` gives: all of them, unless the model is sharded."""
        layout = shard_layout(model, self.parameter)
        if layout is None:
            return Region(slice(0, self.shape[0]), slice(0, self.shape[1]))
        ends = [slice(start, start + size) for start, size in zip(layout.offset, layout.local_shape, strict=True)]
        return Region(*(reversed(ends) if self.transposed else ends))

    def view(self, parameter: Tensor) -> Tensor:
        """The matrix `[out, in]` in its parameter as it is stored."""
        stored = parameter if self.expert is None else parameter[self.expert]
        return stored.t() if self.transposed else stored


def find_targets(
    model: PreTrainedModel, include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> tuple[Target, ...]:
    """The matrices to prune, in the model's order, tied ones once.

    Without `include`: every `nn.Linear`, `Conv1D` and fused expert inside the blocks. With it: whatever it matches.
    `exclude` is applied last. A pattern is an exact module (or parameter) name, the end of one (`"q_proj"`), a glob, or
    `"re:"` and a regular expression that is searched for.

    Raises:
        ValueError: a pattern that matches nothing, or nothing left to prune.
    """
    uses = _prunable(model)
    chosen = _matched(include, uses, "include") if include else _inside_blocks(model, uses)
    chosen -= _matched(exclude, uses, "exclude")
    targets = tuple(
        target
        for canonical, users in _by_parameter(model, uses).items()
        if any(use.name in chosen for use in users)
        for target in _targets_of(model, canonical, users)
    )
    if not targets:
        raise ValueError(
            f"nothing to prune in {type(model).__name__}: "
            + ("include and exclude together leave no matrix." if include or exclude else _no_blocks(uses))
        )
    return targets


def is_routed(targets: Sequence[Target]) -> bool:
    """Whether a target is part of an expert, which sees tokens of any sequence in any order."""
    return any(is_expert(target.name) for target in targets)


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern names this module.

    >>> [matches(p, "model.layers.0.mlp.up_proj") for p in ("up_proj", "model.layers.0.*", "re:layers.[01].mlp", "up")]
    [True, True, True, False]
    """
    if pattern.startswith("re:"):
        return re.search(pattern[3:], name) is not None
    return name == pattern or name.endswith("." + pattern) or fnmatchcase(name, pattern)


@dataclass(frozen=True)
class _Use:
    """A site's use of one parameter; patterns are matched with `name` and `parameter`."""

    name: str
    parameter: str
    site: Site


def _prunable(model: nn.Module) -> list[_Use]:
    """Uses of a weight as a plain linear map. A subclass with a forward of its own may use its weight differently."""
    plain: dict[Kind, type[nn.Module]] = {"linear": nn.Linear, "conv1d": Conv1D, "embedding": nn.Embedding}
    found = []
    for name, module in model.named_modules():
        for kind, cls in plain.items():
            if isinstance(module, cls) and type(module).forward is cls.forward:
                found.append(_Use(name, f"{name}.weight", Site(name, kind)))
        if is_fused_experts(module):
            for parameter in expert_parameters(module):
                found.append(_Use(f"{name}.{parameter}", f"{name}.{parameter}", Site(name, "experts")))
    return found


def _inside_blocks(model: nn.Module, uses: list[_Use]) -> set[str]:
    """The linear maps of the blocks. T5 keeps an embedding in a block (its position bias): no target unless named."""
    return {use.name for use in uses if use.site.kind != "embedding" and block_of(model, use.site.module)}


def _matched(patterns: Sequence[str], uses: list[_Use], option: str) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        hits = {use.name for use in uses if matches(pattern, use.name) or matches(pattern, use.parameter)}
        if not hits:
            sample = ", ".join(use.name for use in uses[:3])
            raise ValueError(
                f"{option} pattern {pattern!r} matches no prunable module. Prunable modules are named like: {sample}. "
                "Use an exact name, the end of one, a glob like '*.mlp.*', or 're:' and a regular expression."
            )
        found |= hits
    return found


def _by_parameter(model: nn.Module, uses: list[_Use]) -> dict[str, list[_Use]]:
    """The uses grouped by the parameter they share; a linear map comes before an embedding, for its layout wins."""
    shared: dict[str, list[_Use]] = {}
    tied = aliases(model)
    for use in uses:
        shared.setdefault(tied.get(use.parameter, use.parameter), []).append(use)
    return {key: sorted(users, key=lambda use: use.site.kind == "embedding") for key, users in shared.items()}


def _targets_of(model: nn.Module, canonical: str, users: list[_Use]) -> list[Target]:
    """The target of one shared parameter, or of each slice of a fused one."""
    first = users[0]
    parameter = model.get_parameter(first.parameter)
    fused = first.site.kind == "experts"
    transposed = model.get_submodule(first.site.module).is_transposed if fused else first.site.kind == "conv1d"
    rows, columns = parameter.shape[-2:]
    block = block_of(model, first.site.module)
    return [
        Target(
            name=canonical if expert is None else f"{canonical}[{expert}]",
            parameter=canonical,
            shape=(columns, rows) if transposed else (rows, columns),
            transposed=bool(transposed),
            sites=tuple(use.site for use in users),
            block=block,
            role=first.name[len(block) + 1 :] if block else first.name,
            expert=expert,
        )
        for expert in (range(parameter.shape[0]) if fused else [None])
    ]


def _no_blocks(uses: list[_Use]) -> str:
    if not uses:
        return "it has no nn.Linear, Conv1D, nn.Embedding or fused experts."
    return f"it has no blocks (an nn.ModuleList of layers); name matrices with include, like {uses[0].name!r}."
