"""Targets: the weight matrices of a model that are pruned.

Layout, here and everywhere: a target's matrix is `[out, in]`. GPT-2's `Conv1D` stores `[in, out]`, so its target is
`transposed`; an embedding stores `[tokens, features]`, one row per token, and is used as it is stored. The experts of a
mixture are fused in tensors `[experts, out, in]` (gpt-oss: `[experts, in, out]`): every expert's slice is a target.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

from torch import Tensor, nn
from transformers import PreTrainedModel

from gradprobe_hf.model.families import block_of, is_choosing, is_expert, is_head, mixes_rows
from gradprobe_hf.model.fsdp import shard_layout
from gradprobe_hf.model.parameters import aliases, read_weight
from gradprobe_hf.model.sites import Site, Use, plain_uses, uses_by_parameter


@dataclass(frozen=True)
class Region:
    """A part of a matrix `[out, in]`. Both slices have a start and a stop."""

    rows: slice
    columns: slice

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start


@dataclass(frozen=True)
class Target:
    """One prunable matrix.

    Attributes:
        name: of its parameter (the first, if parameters are tied); for an expert's slice followed by its index.
        parameter: the parameter it is stored in.
        shape: (out, in).
        transposed: whether the parameter stores `[in, out]`.
        sites: the modules that use it.
        block: its transformer block, `""` outside the blocks.
        role: its name inside the block, like `"mlp.down_proj"`.
        expert: its slice of a fused parameter; None: the whole parameter.
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
        """The matrix `[out, in]`; of a sharded model this process's part of it.

        A view of the parameter: writing to it writes to the model. For one that is offloaded to disk it is a copy, or a
        view of a mapped file, and `replace_on_disk` writes.
        """
        return self.view(read_weight(model, self.parameter))

    def region(self, model: nn.Module) -> Region:
        """The rows and columns that `matrix` returns: all of them, unless the model is sharded."""
        layout = shard_layout(model, self.parameter)
        if layout is None:
            return Region(slice(0, self.shape[0]), slice(0, self.shape[1]))
        ends = [slice(start, start + size) for start, size in zip(layout.offset, layout.local_shape, strict=True)]
        if len(ends) > 2 and self.expert is None:  # an "other": the rest of its dimensions are the columns
            ends[1:] = [slice(0, prod(layout.local_shape[1:]))]
        return Region(*(reversed(ends) if self.transposed else ends))

    def gathered(self, model: nn.Module, part: Tensor) -> Tensor:
        """The whole `[out, in]` of which each process has the part that `matrix` returns. A collective if sharded."""
        layout = shard_layout(model, self.parameter)
        return part if layout is None else self.view(layout.gather(self.view(part)))

    def own_part(self, model: nn.Module, whole: Tensor) -> Tensor:
        """The part of a whole matrix that `matrix` returns."""
        region = self.region(model)
        return whole[region.rows, region.columns].contiguous()

    def view(self, parameter: Tensor) -> Tensor:
        """The matrix `[out, in]` as a view of its parameter as it is stored."""
        stored = parameter if self.expert is None else parameter[self.expert]
        return stored.t() if self.transposed else stored


def find_targets(
    model: PreTrainedModel, include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> tuple[Target, ...]:
    """The matrices to prune, in the model's order, tied ones once.

    Args:
        include: patterns of the modules to prune; by default every `nn.Linear`, `Conv1D` and fused expert inside the
            blocks, but for routers.
        exclude: patterns of modules to leave out of those, and so of whatever is tied to them.

    A pattern is an exact module (or parameter) name, the end of one (`"q_proj"`), a glob, or `"re:"` and a regular
    expression that is searched for.

    Raises:
        ValueError: a pattern that matches nothing, nothing left to prune, or a matrix that is no parameter.
    """
    uses = plain_uses(model)
    chosen = _matched(include, uses, "include") if include else _inside_blocks(model, uses)
    left_out = _matched(exclude, uses, "exclude")
    chosen -= left_out
    targets = tuple(
        target
        for canonical, users in uses_by_parameter(model, uses).items()
        # What is dense under one of its names is dense under all: they are one matrix.
        if any(use.name in chosen for use in users) and not any(use.name in left_out for use in users)
        for target in _targets_of(model, canonical, users)
    )
    if not targets:
        raise ValueError(
            f"nothing to prune in {type(model).__name__}: "
            + (
                f"include={list(include)} and exclude={list(exclude)} together leave no matrix."
                if include or exclude
                else _no_matrices(model, uses)
            )
        )
    return targets


def block_vectors(model: PreTrainedModel, block: str) -> list[Target]:
    """The one-dimensional parameters of a block, `[n]`, as targets that are trained and never pruned."""
    return [vector for vector in _vectors(model, block) if model.get_parameter(vector.parameter).ndim == 1]


def block_biases(model: PreTrainedModel, block: str) -> list[Target]:
    """The biases of a block, `[n]`, or `[experts, n]` of experts that are stored together; never pruned."""
    return [vector for vector in _vectors(model, block) if vector.name.endswith("bias")]


def _vectors(model: PreTrainedModel, block: str) -> Iterator[Target]:
    """The parameters of a block that are one vector, or several of one kind as biases of experts are.

    Not those that another block has, too, as of Zamba's blocks with the same weights: what is right for one is wrong
    for the others. Nor those of routers, which choose and are not differentiated by.
    """
    others = _in_other_blocks(model, block)
    for name, module in model.get_submodule(block).named_modules(prefix=block):
        for leaf, parameter in module.named_parameters(recurse=False):
            full, shape = f"{name}.{leaf}", (parameter.numel(), 1)
            if full in others or is_choosing(model, name):
                continue
            if (parameter.ndim == 1 or leaf.endswith("bias")) and parameter.is_floating_point():
                yield Target(full, full, shape, False, (Site(name, "vector"),), block, full.removeprefix(f"{block}."))


def _in_other_blocks(model: nn.Module, block: str) -> set[str]:
    """Names of parameters of a block that are another block's, too."""
    uses: dict[str, set[str]] = {}
    further = aliases(model)
    for name, canonical in further.items():
        uses.setdefault(canonical, {canonical}).add(name)
    blocks = {name: block_of(model, name.rpartition(".")[0]) for names in uses.values() for name in names}
    apart = (names for names in uses.values() if len({blocks[name] for name in names}) > 1)
    return {name for names in apart for name in names if blocks[name] == block}


def other_targets(model: nn.Module, targets: Sequence[Target]) -> list[Target]:
    """The weights with two dimensions or more that are none of these targets, as targets that are never pruned.

    What is not called a weight may have zeros that were never pruned: Mamba's `A_log` begins with the logarithm of 1.
    Their shape is (n, what the other dimensions hold), and `matrix` the parameter `[n, ...]` as it is stored: one that
    is stored channels-last has no view of two dimensions.
    """
    taken = {id(model.get_parameter(target.parameter)) for target in targets}
    found = []
    for name, parameter in model.named_parameters():
        is_weight = name.endswith("weight") and parameter.ndim >= 2 and parameter.is_floating_point()
        if is_weight and id(parameter) not in taken:
            module, block = name.rpartition(".")[0], block_of(model, name.rpartition(".")[0])
            role = name.removeprefix(f"{block}.")
            shape = (parameter.shape[0], prod(parameter.shape[1:]))
            found.append(Target(name, name, shape, False, (Site(module, "other"),), block, role))
    return found


def default_targets(model: PreTrainedModel) -> tuple[Target, ...]:
    """What `find_targets` finds unasked; nothing of a model that has none of them, of convolutions say."""
    return find_targets(model) if _inside_blocks(model, plain_uses(model)) else ()


def every_matrix(model: nn.Module) -> tuple[Target, ...]:
    """All that can have zeros to keep: what a run can prune, embeddings too, and all other parameters but vectors."""
    prunable = find_targets(model, include=["*"]) if plain_uses(model) else ()
    return (*prunable, *other_targets(model, prunable))


def is_routed(targets: Sequence[Target]) -> bool:
    """Whether any target belongs to an expert, which is sent tokens of any sequence in any order."""
    return any(is_expert(target.name) for target in targets)


def go_alone(model: PreTrainedModel, targets: Sequence[Target]) -> bool:
    """Whether rows are measured one at a time, however they are batched: of several no gradient of one can be told."""
    return is_routed(targets) or mixes_rows(model)


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern names this module.

    >>> [matches(p, "model.layers.0.mlp.up_proj") for p in ("up_proj", "model.layers.0.*", "re:layers.[01].mlp", "up")]
    [True, True, True, False]
    """
    if pattern.startswith("re:"):
        return re.search(pattern[3:], name) is not None
    return name == pattern or name.endswith("." + pattern) or fnmatchcase(name, pattern)


def patterns_of(model: nn.Module, targets: Sequence[Target]) -> list[str]:
    """Patterns for `include` that name these targets and nothing else that could be pruned."""
    parameters = {target.parameter for target in targets}
    modules = {site.module for target in targets for site in target.sites if target.expert is None}
    names = [use.name for use in plain_uses(model)]
    return covering_patterns([name for name in names if name in modules | parameters], names)


def covering_patterns(wanted: Sequence[str], names: Sequence[str]) -> list[str]:
    """Patterns that match all the wanted of these names, and none of the others; as few as their prefixes allow.

    >>> covering_patterns(["text.0.q", "text.0.k", "text.1.q"], ["text.0.q", "text.0.k", "text.1.q", "head", "image.q"])
    ['text.*']
    """
    others = set(names) - set(wanted)
    found = dict.fromkeys(_shortest_pattern(name, others) for name in wanted)
    # Where blocks hold both, one pattern for all blocks, unless it says too much.
    numbered = dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", pattern) for pattern in found)
    return list(found if any(matches(pattern, name) for pattern in numbered for name in others) else numbered)


def _shortest_pattern(name: str, others: set[str]) -> str:
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(1, len(parts)))
    return next((f"{p}.*" for p in prefixes if not any(o == p or o.startswith(f"{p}.") for o in others)), name)


def _inside_blocks(model: nn.Module, uses: list[Use]) -> set[str]:
    """The linear maps inside the blocks."""
    # No embeddings: T5 has one in a block, its position bias, which is a target only if it is named. Nor routers, which
    # in most families are no linear map of torch's anyway.
    return {
        use.name
        for use in uses
        if use.site.kind != "embedding"
        and block_of(model, use.site.module)
        and not is_choosing(model, use.site.module)
        and not is_head(model, use.site.module)
    }


def _matched(patterns: Sequence[str], uses: list[Use], option: str) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        hits = {use.name for use in uses if any(matches(pattern, name) for name in use.names)}
        if not hits:
            sample = ", ".join(use.name for use in uses[:3])
            raise ValueError(
                f"{option} pattern {pattern!r} matches no prunable module. Prunable modules are named like: {sample}. "
                "Use an exact name, the end of one, a glob like '*.mlp.*', or 're:' and a regular expression."
                + (" Several patterns are a list, or several --include or --exclude." if "," in pattern else "")
            )
        found |= hits
    return found


def _targets_of(model: nn.Module, canonical: str, users: list[Use]) -> list[Target]:
    """The target of one parameter, or of each slice of a fused one."""
    first = users[0]  # a linear map, if there is one: its layout counts
    try:
        parameter = model.get_parameter(first.parameter)
    except AttributeError:
        module = first.site.module
        raise ValueError(
            f"{first.parameter} is made anew in every pass, by pruning or a parametrisation of torch, and cannot be "
            "pruned: take that off before (torch.nn.utils.prune.remove, parametrize.remove_parametrizations, "
            f"remove_weight_norm), or leave {module} out (exclude)."
        ) from None
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


def _no_matrices(model: nn.Module, uses: list[Use]) -> str:
    if not uses:
        return "it has no nn.Linear, Conv1D, nn.Embedding or fused experts."
    if any(block_of(model, name) for name, _ in model.named_modules()):
        return (
            "its blocks have no nn.Linear, Conv1D or fused experts that compute as these do; name matrices with "
            f"include, like {uses[0].name!r}."
        )
    return f"it has no blocks (an nn.ModuleList of layers); name matrices with include, like {uses[0].name!r}."
