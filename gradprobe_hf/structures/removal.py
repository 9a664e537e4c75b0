"""Removals: which units and blocks go, as masks of matrices and as slices of tensors.

Until the end a removal is masks like any other. A unit's mask is the columns of its reader and the rows of its makers;
a block's is all of it, and its biases are zero too, so that it hands on what it was given. What is left of every tensor
once these are cut out is the smaller model: it computes the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from gradprobe_hf.model.config_names import Left
from gradprobe_hf.model.families import stack_of
from gradprobe_hf.model.parameters import own_parameters
from gradprobe_hf.model.targets import Target
from gradprobe_hf.structures.plan import Plan, Units, zero_units
from gradprobe_hf.structures.table import STRUCTURES


@dataclass(frozen=True)
class Removal:
    """What goes.

    Attributes:
        blocks: those that go whole.
        units: name of a reader -> which of its units go, bool `[count]`. Of blocks that go whole none is looked at.
        experts: name of a router -> which of its experts go, bool `[count]`; as of units.
    """

    plan: Plan
    blocks: frozenset[str] = frozenset()
    units: Mapping[str, Tensor] = field(default_factory=dict)
    experts: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def example(cls, plan: Plan, order: Sequence[str] = ()) -> Removal:
        """One that meets the plan: the first units, and the blocks that are first in an order, or in the model."""
        blocks = frozenset(plan.first_to_go((*order, *plan.blocks), plan.blocks_going))
        units = {}
        for name, everywhere in plan.units.items():
            for one in everywhere:
                units[one.reader.name] = zero_units(one.count)
                units[one.reader.name][: plan.going[name]] = True
        experts = {}
        for mixture in (one.mixture for one in plan.experts):
            experts[mixture.router] = zero_units(mixture.count)
            experts[mixture.router][: plan.experts_going] = True
        return cls(plan, blocks, units, experts)

    @classmethod
    def of_masks(cls, plan: Plan, masks: Mapping[str, Tensor], targets: Sequence[Target]) -> Removal:
        """The removal that these masks are of."""
        # Masks are all that snapshots, processes and comparisons pass on: what went whole is read off them again.
        empty = {target.name for target in targets if bool(masks[target.name].all())}
        staying = {target.block for target in targets if target.name not in empty}
        units = {}
        for everywhere in plan.units.values():
            for one in everywhere:
                gone = masks[one.reader.name].all(0).cpu()
                units[one.reader.name] = gone.unflatten(0, (one.count, one.width)).all(1)
        experts = {
            own.mixture.router: torch.tensor([all(one.name in empty for one in expert) for expert in own.matrices])
            for own in plan.experts
        }
        return cls(plan, frozenset(plan.blocks) - staying, units, experts)

    def mask(self, target: Target) -> Tensor:
        """A matrix's mask, bool `[out, in]`."""
        found = torch.full(target.shape, target.block in self.blocks or target.name in self._without_expert)
        for one in self._units:
            gone = self.units[one.reader.name]
            if target == one.reader:
                found[:, one.columns(gone)] = True
            for maker, parts in one.makers:
                if target == maker:
                    found[one.rows(maker, parts, gone)] = True
        return found

    @property
    def routes(self) -> dict[str, Tensor]:
        """Name of a router that stays -> which of its experts go, bool `[count]`."""
        return {
            one.mixture.router: self.experts[one.mixture.router]
            for one in self.plan.experts
            if one.mixture.block not in self.blocks and one.mixture.router in self.experts
        }

    @property
    def kept_blocks(self) -> list[int]:
        """Numbers of the blocks that stay."""
        return [number for number, block in enumerate(self.plan.blocks) if block not in self.blocks]

    def left(self, structure: str) -> Left | None:
        """What is left of a structure; None if all of it is."""
        plan = self.plan
        if STRUCTURES[structure].takes == "blocks":
            return Left(len(plan.blocks), self.kept_blocks) if self.blocks else None
        if structure not in plan.going:
            return None
        there = plan.there(structure)
        columns = plan.units[structure][0].reader.shape[1] if structure in plan.units else 0
        return Left(there, range(there - plan.going[structure]), columns)

    def name(self, name: str) -> str | None:
        """What a tensor is called in the smaller model; None if it has no part there."""
        block = self._block_of(name)
        if block is None:
            return name
        if block in self.blocks:
            return None
        # `from_pretrained` makes as many blocks as the configuration says, numbered without gaps.
        stack = stack_of(block)
        kept = [one for one in self.plan.blocks if stack_of(one) == stack and one not in self.blocks]
        return f"{stack}.{kept.index(block)}{name[len(block) :]}"

    def tensor(self, name: str, tensor: Tensor) -> Tensor:
        """What is left of a tensor of a block that stays, a copy."""
        for dimension, kept in self._slices.get(name, ()):
            tensor = tensor.index_select(dimension, kept.to(tensor.device))
        return tensor

    def parameters(self, model: nn.Module) -> int:
        """How many parameters are left of a model."""
        return sum(count for count, _ in self._left(model))

    def bytes(self, model: nn.Module) -> int:
        """How many bytes the parameters that are left take, in the file as in memory."""
        return sum(count * itemsize for count, itemsize in self._left(model))

    def _left(self, model: nn.Module) -> Iterator[tuple[int, int]]:
        """Of each parameter that is left how many values, and the bytes of one."""
        # By shapes alone: before any weight is read, sizes are asked of a model on the meta device.
        for name, parameter in own_parameters(model):
            if self.name(name) is not None:
                shape = list(parameter.shape)
                for dimension, kept in self._slices.get(name, ()):
                    shape[dimension] = len(kept)
                yield torch.Size(shape).numel(), parameter.itemsize

    def _block_of(self, name: str) -> str | None:
        parts = name.split(".")
        prefixes = (".".join(parts[:length]) for length in range(1, len(parts)))
        return next((prefix for prefix in prefixes if prefix in self.plan.blocks), None)

    @cached_property
    def _units(self) -> list[Units]:
        """Those of blocks that stay, as far as it is decided about them."""
        every = [one for everywhere in self.plan.units.values() for one in everywhere]
        return [one for one in every if one.reader.block not in self.blocks and one.reader.name in self.units]

    @cached_property
    def _without_expert(self) -> frozenset[str]:
        """Names of the matrices of experts that go."""
        routes = self.routes
        return frozenset(
            matrix.name
            for one in self.plan.experts
            if one.mixture.router in routes
            for number, own in enumerate(one.matrices)
            if routes[one.mixture.router][number]
            for matrix in own
        )

    @cached_property
    def _slices(self) -> dict[str, list[tuple[int, Tensor]]]:
        """Parameter -> what is kept of which of its dimensions as it is stored."""
        found: dict[str, list[tuple[int, Tensor]]] = {}
        for one in self._units:
            kept = ~self.units[one.reader.name]
            found.setdefault(one.reader.parameter, []).append(
                (0 if one.reader.transposed else 1, one.columns(kept).nonzero()[:, 0])
            )
            for maker, parts in one.makers:
                rows = one.rows(maker, parts, kept).nonzero()[:, 0]
                # Makers lose outputs, with their biases; the reader loses inputs, and its bias stays whole.
                found.setdefault(maker.parameter, []).append((1 if maker.transposed else 0, rows))
                found.setdefault(f"{maker.parameter.rpartition('.')[0]}.bias", []).append((0, rows))
            for vector, length in one.vectors:
                values = kept.repeat_interleave(length // one.count).nonzero()[:, 0]
                found.setdefault(vector, []).append((0, values))
        routes = self.routes
        for mixture in (one.mixture for one in self.plan.experts if one.mixture.router in routes):
            stay = (~routes[mixture.router]).nonzero()[:, 0]
            for tensor, dimension in mixture.tensors.items():
                found.setdefault(tensor, []).append((dimension, stay))
        return found
