"""Legal shapes: the uniform smaller models that a budget allows and the model's own code takes.

A shape says how many of each structure go. Of two shapes that meet a budget the one that also gives less of everything
is better, so that only those are listed of which nothing can be given back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter

from transformers import PreTrainedModel

from gradprobe_hf.model.files.saving import bytes_beside_parameters
from gradprobe_hf.model.targets import Target
from gradprobe_hf.structures.budgets import ShapeBudget
from gradprobe_hf.structures.latency_table import LatencyTable
from gradprobe_hf.structures.plan import Plan
from gradprobe_hf.structures.removal import Removal
from gradprobe_hf.structures.shapes import FEW, unfit
from gradprobe_hf.structures.table import STRUCTURES


@dataclass(frozen=True)
class Shape:
    """A smaller model.

    Attributes:
        going: structure -> how many go, of those of which any do.
        parameters: that are left.
        bytes: that the files of these take at most.
        seconds: that it takes, as a table says; None: nothing was timed.
    """

    going: Mapping[str, int]
    parameters: int
    bytes: int
    seconds: float | None = None


def shapes_within(
    model: PreTrainedModel,
    targets: Sequence[Target],
    budget: ShapeBudget,
    without: Mapping[str, str] | None = None,
    table: LatencyTable | None = None,
    order: Sequence[str] = (),
) -> list[Shape]:
    """The shapes that meet a budget and have nothing to give back, the most parameters first.

    Args:
        without: structures that the model cannot do without, each with a sentence that says why.
        table: of seconds, for a budget of latency.
        order: in which blocks go, as far as it is known. Where they differ in size and it is not, the smallest are
            taken to go: what goes then leaves no more than a shape says.

    Raises:
        ValueError: the model is that small as it is, or never is that small.
    """
    axes = shape_axes(model, targets, without or {})
    whole = (*order, *smallest_first(model, targets))
    shaped = _Shaped(model, targets, table, bytes_beside_parameters(model), whole)
    sizes = table or _Sizes.of(shaped, budget, axes)
    limit = budget.most(sizes.dense)
    allowed = [going for going in _largest(axes, sizes, limit) if any(going.values())]
    # Pareto: what gives less of one thing and no more of another loses less, so that the other need not be tried.
    best = [going for going in allowed if not any(_is_better(other, going) for other in allowed)]
    found = [shaped(going) for going in best]
    if not found:
        raise _too_small(shaped, budget, limit, axes, sizes)
    return sorted(found, key=lambda shape: (-shape.parameters, tuple(shape.going.items())))


def is_legal(model: PreTrainedModel, targets: Sequence[Target], shape: Shape) -> bool:
    """Whether the model's code takes all of it together."""
    return unfit(model, Plan.of(model, targets, shape.going)) is None


def shape_axes(model: PreTrainedModel, targets: Sequence[Target], without: Mapping[str, str]) -> dict[str, list[int]]:
    """Structure -> how many of it can go, none first; the finest, of which there are the most steps, last.

    Args:
        without: structures that the model cannot do without, each with a sentence that says why.

    Raises:
        ValueError: there are none.
    """
    found, refused = {}, dict(without)
    for name, row in STRUCTURES.items():
        if name in without:
            continue
        try:
            plan = Plan.of(model, targets, {name: 1})
        except ValueError as error:  # the model has none of them, or not as many everywhere
            refused[name] = str(error)
            continue
        counts = [count for count in row.steps(plan.there(name)) if count <= plan.most(name)]
        # Heads have to divide this and that: each number is tried. Channels are alike, and so are blocks and experts.
        few = row.takes == "units" and plan.there(name) <= FEW
        tried = counts if few else [counts[0], counts[-1]] if counts else []
        reasons = {count: unfit(model, replace(plan, going={name: count})) for count in tried}
        legal = {count for count, reason in reasons.items() if reason is None}
        left = [count for count in counts if count in legal or (count not in tried and legal == set(tried))]
        if left:
            found[name] = [0, *left]
        else:
            why = next(iter(reasons.values()), None) or f"there are only {plan.there(name)} {row.units}"
            refused[name] = f"structure {name!r}: {why}."
    if not found:
        why = " ".join(dict.fromkeys(refused[name] for name in STRUCTURES))  # several may have one reason
        raise ValueError(
            f"structure='auto': there is nothing that {type(model).__name__} can do without. {why} Prune it without "
            "structure."
        )
    return dict(sorted(found.items(), key=lambda axis: STRUCTURES[axis[0]].rounded_to or 0))


@dataclass(frozen=True)
class _Shaped:
    """Makes shapes of a model.

    Attributes:
        beside: bytes of its files beside parameters.
        order: in which blocks go.
    """

    model: PreTrainedModel
    targets: Sequence[Target]
    table: LatencyTable | None
    beside: int
    order: Sequence[str]

    def __call__(self, going: Mapping[str, int]) -> Shape:
        going = {name: going[name] for name in STRUCTURES if going.get(name)}
        removal = Removal.example(Plan.of(self.model, self.targets, going), self.order)
        seconds = None if self.table is None else self.table(going)
        return Shape(going, removal.parameters(self.model), removal.bytes(self.model) + self.beside, seconds)


@dataclass(frozen=True)
class _Sizes:
    """Sizes of all shapes, from those of a few: what goes of a block does not depend on the other blocks.

    Attributes:
        left: what is left of the model without the first so many blocks of the order.
        units: structure -> what one of its units takes in a block, and how many of the blocks that are left have it,
            without the first so many: the first blocks of a mixture may have no experts.
    """

    left: Sequence[int]
    units: Mapping[str, tuple[float, Sequence[int]]]

    @classmethod
    def of(cls, shaped: _Shaped, budget: ShapeBudget, axes: Mapping[str, Sequence[int]]) -> _Sizes:
        count = attrgetter(budget.unit)
        (whole,) = [name for name in STRUCTURES if STRUCTURES[name].takes == "blocks"]
        plan = Plan.of(shaped.model, shaped.targets, {})
        gone = plan.first_to_go(shaped.order, max(axes.get(whole, [0])))
        of_blocks = block_sizes(shaped.model, plan, in_bytes=budget.unit == "bytes")
        dense = count(shaped({}))
        inside = {}
        for name in axes:
            if name == whole:
                continue
            plan = Plan.of(shaped.model, shaped.targets, {name: 1})
            holding = {one.mixture.block for one in plan.experts} or {*plan.blocks}
            unit = (dense - count(shaped({name: 1}))) / len(holding)
            inside[name] = unit, [len(holding - {*gone[:number]}) for number in range(len(gone) + 1)]
        return cls([dense - sum(of_blocks[one] for one in gone[:number]) for number in range(len(gone) + 1)], inside)

    @property
    def dense(self) -> int:
        return self.left[0]

    def __call__(self, going: Mapping[str, int]) -> float:
        gone = sum(count for name, count in going.items() if name not in self.units)
        return self.left[gone] - sum(
            unit * left[gone] * going.get(name, 0) for name, (unit, left) in self.units.items()
        )


def smallest_first(model: PreTrainedModel, targets: Sequence[Target]) -> list[str]:
    """The blocks that may go, those with the fewest parameters first."""
    plan = Plan.of(model, targets, {})
    sizes = block_sizes(model, plan)
    return sorted(plan.blocks[1:-1], key=lambda block: sizes[block])


def block_sizes(model: PreTrainedModel, plan: Plan, in_bytes: bool = False) -> dict[str, int]:
    """Block -> its parameters, or their bytes."""
    return {
        block: sum(one.nbytes if in_bytes else one.numel() for one in model.get_submodule(block).parameters())
        for block in plan.blocks
    }


def _largest(
    axes: Mapping[str, Sequence[int]], sizes: Callable[[Mapping[str, int]], float], limit: float
) -> Iterator[dict[str, int]]:
    """Of each combination of all but the finest structure the shape that takes least of that to meet the limit."""
    *coarse, finest = axes
    for counts in product(*(axes[name] for name in coarse)):
        going = dict(zip(coarse, counts, strict=True))
        least = next((count for count in axes[finest] if sizes({**going, finest: count}) <= limit), None)
        if least is not None:
            yield {**going, finest: least}


def _is_better(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    """Whether it gives less of something, and no more of anything."""
    return one != other and all(one[name] <= other[name] for name in other)


def _too_small(
    shaped: _Shaped,
    budget: ShapeBudget,
    limit: float,
    axes: Mapping[str, Sequence[int]],
    sizes: _Sizes | LatencyTable,
) -> ValueError:
    """What is said where even the smallest shape is larger than the budget."""
    every = [dict(zip(axes, counts, strict=True)) for counts in product(*axes.values()) if any(counts)]
    nearest = [shaped(going) for going in sorted(every, key=sizes)[:2]]
    named = " and ".join(
        f"structure={dict(shape.going)} with {budget.as_given(getattr(shape, budget.unit), sizes.dense)}"
        for shape in nearest
    )
    return ValueError(
        f"{budget} ({budget.shown(limit)}) is less than any shape of {type(shaped.model).__name__} has; the nearest "
        f"are {named}."
    )
