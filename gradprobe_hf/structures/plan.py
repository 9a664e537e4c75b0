"""Plans: where the structures of a model are, and how many of them go.

Layout: the units of a block are numbered. The matrix that reads what they make, `[out, in]`, has as many columns for
each of them; those that make it have rows, once or (gate and up in one matrix) several times over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from gradprobe_hf.model.config_names import chosen_experts, seen_by_block
from gradprobe_hf.model.families import stack_of
from gradprobe_hf.model.passes.routing import Mixture, mixtures
from gradprobe_hf.model.targets import Target
from gradprobe_hf.structures.table import STRUCTURES, at_most, blocks_in


@dataclass(frozen=True)
class Units:
    """What can go of one block, unit by unit: the channels of its feed-forward network, or its groups of heads.

    Attributes:
        reader: the matrix that reads what the units make; without its columns a unit has no part in the model.
        makers: the matrices that make it, each with how many rows side by side it has for a unit.
        count: how many units there are.
        vectors: parameters beside these with as many values for each unit, and their lengths: sinks of query heads.
    """

    reader: Target
    makers: tuple[tuple[Target, int], ...]
    count: int
    vectors: tuple[tuple[str, int], ...] = ()

    @property
    def width(self) -> int:
        """Columns of the reader for each unit."""
        return self.reader.shape[1] // self.count

    def columns(self, units: Tensor) -> Tensor:
        """Columns of the reader, bool `[in]`, for units, bool `[count]`."""
        return units.repeat_interleave(self.width)

    def rows(self, maker: Target, parts: int, units: Tensor) -> Tensor:
        """Rows of a maker, bool `[out]`, for units, bool `[count]`."""
        # Gate and up in one matrix lie one below the other: all units of the one, then all of the other.
        return units.repeat_interleave(maker.shape[0] // (parts * self.count)).repeat(parts)


@dataclass(frozen=True)
class Experts:
    """The experts of one block.

    Attributes:
        mixture: the modules that they are in.
        matrices: of each expert its own, in the order in which a token passes them.
        chosen: how many of them a token is sent to.
    """

    mixture: Mixture
    matrices: tuple[tuple[Target, ...], ...]
    chosen: int


@dataclass(frozen=True)
class Kind:
    """What tells a block from those of other kinds.

    Attributes:
        inside: its modules, as its code calls them: a hybrid has blocks with `linear_attn` and some with `self_attn`.
        sees: which tokens it sees, and whether it knows where they are, in the configuration's words.
    """

    inside: frozenset[str]
    sees: str


@dataclass(frozen=True)
class Plan:
    """What is to be removed.

    Attributes:
        blocks: all of the model, in order.
        units: structure -> its units in every block.
        going: structure -> how many of these go in every block; of blocks, how many go.
        experts: of every block that has some.
        kinds: of the blocks, in their order. Empty: all are of one kind.
    """

    blocks: tuple[str, ...]
    units: Mapping[str, tuple[Units, ...]]
    going: Mapping[str, int] = field(default_factory=dict)
    experts: tuple[Experts, ...] = ()
    kinds: tuple[Kind, ...] = ()

    @classmethod
    def of(cls, model: PreTrainedModel, targets: Sequence[Target], amounts: Mapping[str, float]) -> Plan:
        """The plan of a configuration's amounts.

        Args:
            targets: all matrices of the blocks.

        Raises:
            ValueError: a model without such structures, or an amount that leaves none or takes none.
        """
        by_block: dict[str, dict[str, Target]] = {}
        for target in targets:
            by_block.setdefault(target.block, {})[target.role] = target
        _check_stack(model, list(by_block), amounts)
        every = cls(tuple(by_block), {}, kinds=_kinds(model, list(by_block)))
        units: dict[str, tuple[Units, ...]] = {}
        going: dict[str, int] = {}
        experts: tuple[Experts, ...] = ()
        for name, amount in amounts.items():
            if STRUCTURES[name].takes == "blocks":
                going[name] = _blocks_going(name, amount, every)
                continue
            if STRUCTURES[name].takes == "experts":
                experts = _experts(model, targets, name)
                going[name] = _experts_going(name, amount, experts)
                continue
            units[name] = tuple(_units(model, name, block, roles) for block, roles in by_block.items())
            counts = {one.count for one in units[name]}
            if len(counts) > 1:
                raise ValueError(
                    f"structure {name!r} wants as many {STRUCTURES[name].units} in every block, and those of "
                    f"{type(model).__name__} have {', '.join(map(str, sorted(counts)))}: leave it out."
                )
            going[name] = _going(name, amount, counts.pop())
        return cls(every.blocks, units, going, experts, every.kinds)

    def there(self, name: str) -> int:
        """How many there are of a structure of this plan: in a block, or of blocks."""
        if STRUCTURES[name].takes == "blocks":
            return len(self.blocks)
        return self.experts[0].mixture.count if STRUCTURES[name].takes == "experts" else self.units[name][0].count

    def most(self, name: str) -> int:
        """How many of them can go at most."""
        # A model wants a width of one, its first and last block, and as many experts as a token is sent to.
        kept = {"units": 1, "blocks": self.blocks_kept, "experts": self.experts[0].chosen if self.experts else 1}
        return self.there(name) - kept[STRUCTURES[name].takes]

    @property
    def blocks_going(self) -> int:
        """How many blocks go whole."""
        return blocks_in(self.going)

    @property
    def experts_going(self) -> int:
        """How many experts go of every mixture."""
        return sum(count for name, count in self.going.items() if STRUCTURES[name].takes == "experts")

    @property
    def blocks_kept(self) -> int:
        """Blocks that stay whatever goes: the first, the last, and one of each further kind."""
        return 2 + len({*self.kinds} - {*self.kinds[:1], *self.kinds[-1:]})

    def may_go(self, gone: Set[str]) -> list[str]:
        """The blocks that can go beside those that are gone.

        Of each kind one stays: without any attention a hybrid does not know how far a text has come, and cannot write;
        and what the last block that sees more than a window is for, no text shows that is shorter than the window.
        """
        kinds = dict(zip(self.blocks, self.kinds or [None] * len(self.blocks), strict=True))
        left = Counter(kind for block, kind in kinds.items() if block not in gone)
        return [block for block in self.blocks[1:-1] if block not in gone and left[kinds[block]] > 1]

    def first_to_go(self, order: Iterable[str], count: int) -> list[str]:
        """The first so many blocks of an order that can go together."""
        found: list[str] = []
        for block in order:
            if len(found) < count and block in self.may_go(set(found)):
                found.append(block)
        return found

    def alone(self, name: str) -> Plan:
        """The same about one structure."""
        units = {name: self.units[name]} if name in self.units else {}
        experts = self.experts if STRUCTURES[name].takes == "experts" else ()
        return Plan(self.blocks, units, {name: self.going[name]}, experts, self.kinds)


def _check_stack(model: PreTrainedModel, blocks: Sequence[str], amounts: Mapping[str, float]) -> None:
    """Of an encoder and a decoder what is inside of blocks can go, and no whole ones: they are not alike."""
    stacks = sorted({stack_of(block) for block in blocks})
    inside = all(STRUCTURES[name].takes == "units" for name in amounts)
    if "" in stacks or (len(stacks) > 1 and not (inside and model.config.is_encoder_decoder)):
        remedy = "prune it without structure"
        if model.config.is_encoder_decoder:
            remedy = "give channels alone, {'ffn': ...}"
        elif MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model.config), type(model)) is not type(model):
            remedy += ", or its language model alone, loaded with task='text-generation' (--task text-generation)"
        raise ValueError(
            f"structure is for models of one stack of blocks, and {type(model).__name__} has "
            f"{', '.join(stack or 'matrices outside of blocks' for stack in stacks)}: {remedy}."
        )
    if model.config.get_text_config() is not model.config:
        raise ValueError(
            f"structure is for models of one configuration, and that of {type(model).__name__} has another inside: "
            "prune it without structure."
        )


def _kinds(model: PreTrainedModel, blocks: Sequence[str]) -> tuple[Kind, ...]:
    """Of each of these blocks, which are all that a stack has."""
    mixed = {one.block for one in mixtures(model)}

    def inside(block: str) -> frozenset[str]:
        modules = model.get_submodule(block).named_children()
        # Norms are no kind: the first block of RWKV has one more.
        found = {name for name, one in modules if any(weight.ndim > 1 for weight in one.parameters())}
        return frozenset(found | ({"experts"} if block in mixed else set()))

    return tuple(
        Kind(inside(block), sees) for block, sees in zip(blocks, seen_by_block(model.config, len(blocks)), strict=True)
    )


def _blocks_going(name: str, amount: float, every: Plan) -> int:
    there, most = len(every.blocks), len(every.blocks) - every.blocks_kept
    # A share has no number of its own to be told by.
    gone = amount if isinstance(amount, int) and amount > most else _going(name, amount, there)
    if gone > most:
        also = ", and one of each kind of blocks" if every.blocks_kept > 2 else ""
        raise ValueError(
            f"structure {name!r}: {amount} of {there} blocks cannot go, since the first and the last stay{also}: "
            f"{at_most(most)}."
        )
    return int(gone)


def _experts(model: PreTrainedModel, targets: Sequence[Target], name: str) -> tuple[Experts, ...]:
    """The experts of every block that has some."""
    matrices: dict[str, dict[int, list[Target]]] = {}
    for target in targets:
        if target.expert is not None:
            module = target.parameter.rpartition(".")[0]
            matrices.setdefault(module, {}).setdefault(target.expert, []).append(target)
    chosen = chosen_experts(model.config)
    found = tuple(
        Experts(one, tuple(tuple(matrices[one.experts][number]) for number in range(one.count)), chosen)
        for one in mixtures(model)
        if one.experts in matrices
    )
    if not found:
        raise ValueError(
            f"structure {name!r}: {type(model).__name__} has no experts, or none beside a router of their own. Leave "
            f"{name!r} out."
        )
    counts = sorted({one.mixture.count for one in found})
    if len(counts) > 1 or len(found) < len(matrices) or len({one.mixture.block for one in found}) < len(found):
        raise ValueError(
            f"structure {name!r} wants one mixture of as many experts in every block that has any, and those of "
            f"{type(model).__name__} have {', '.join(map(str, counts))} in {len(matrices)} modules: leave it out."
        )
    return found


def _experts_going(name: str, amount: float, experts: Sequence[Experts]) -> int:
    there, chosen = experts[0].mixture.count, experts[0].chosen
    gone = _going(name, amount, there)
    if gone > there - chosen:
        raise ValueError(
            f"structure {name!r}: {gone} of {there} experts cannot go, since every token is sent to {chosen} of them: "
            f"{at_most(there - chosen)}."
        )
    return gone


def _going(name: str, amount: float, there: int) -> int:
    try:
        return STRUCTURES[name].count_of(amount, there)
    except ValueError as error:
        raise ValueError(f"structure {name!r}: {error}") from error


def _units(model: PreTrainedModel, name: str, block: str, roles: Mapping[str, Target]) -> Units:
    row = STRUCTURES[name]
    assert row.matrices is not None, "no whole blocks"
    found = row.matrices(frozenset(roles))
    if found is None:
        raise ValueError(
            f"structure {name!r} finds no {row.units} that could go in {block} of {type(model).__name__}: its matrices "
            f"are {', '.join(roles) or 'of other kinds'}. Leave {name!r} out."
        )
    reader, makers = roles[found[0]], tuple((roles[role], parts) for role, parts in found[1].items())
    around = reader.parameter.rsplit(".", 2)[0]
    own = dict(model.get_submodule(around).named_parameters(recurse=False))
    vectors = tuple((f"{around}.{leaf}", len(own[leaf])) for leaf in row.vectors if leaf in own)
    try:
        return Units(reader, makers, row.counted(model.config) if row.counted else reader.shape[1], vectors)
    except ValueError as error:
        raise ValueError(
            f"structure {name!r} wants as many {row.units} in every block of {type(model).__name__}, and {error}: "
            "leave it out."
        ) from error


def zero_units(count: int) -> Tensor:
    """None of so many units, bool."""
    return torch.zeros(count, dtype=torch.bool)
