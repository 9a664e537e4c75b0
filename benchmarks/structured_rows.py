"""The rows of `structured_quality.py`: published ways to make a model smaller, beside those of the package.

Layout: a column is the share of the parameters of all blocks that goes. It is what so many whole blocks have, and where
channels go in their place, as many of each feed-forward network as comes nearest to that: within 0.1% of it.

Scores that the package does not have are functions of a run context here: block -> a score for each channel, lowest
gone first; or for each block. Their formulas are restated from the papers, and their own remedies are left out where a
plain checkpoint has no place for them (FLAP's biases) or the budget is the same everywhere (FLAP's and GISP's
normalization across blocks).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from gradprobe_hf.model.passes.loss import forward_only, summed_loss
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.run.shapes.structured import packed
from gradprobe_hf.selection.packed_masks import PackedMasks
from gradprobe_hf.structures.plan import Plan, Units
from gradprobe_hf.structures.removal import Removal

COLUMNS = ("0.2", "0.3", "0.5")
Hook = Callable[[nn.Module, tuple[Any, ...], Any], None]


@dataclass(frozen=True)
class Row:
    """One way to make a model smaller.

    Attributes:
        axis: what goes: `"ffn"`, `"blocks"`, `"both"`, half of each, or `"auto"`, whatever the package chooses.
        options: of the configuration.
        channels, blocks: a score of its own: block -> scores of its channels, or block -> its score.
        recovered: whether what is left is trained towards the dense model.
        rates: learning rates to train it with, in place of `--recovery-rates`.
        own_text: whether half of the calibration windows are of text that the model writes.
        trained_on_own_text: whether half of the windows that it is trained on are.
    """

    axis: str
    options: Mapping[str, Any] = field(default_factory=dict)
    channels: Callable[[RunContext, Plan], dict[str, Tensor]] | None = None
    blocks: Callable[[RunContext, Plan], dict[str, float]] | None = None
    recovered: bool = False
    rates: tuple[float, ...] = ()
    own_text: bool = False
    trained_on_own_text: bool = False


def chosen_masks(context: RunContext, row: Row) -> PackedMasks | None:
    """What a score that is the row's own lets go; None: the package says it."""
    if row.channels is None and row.blocks is None:
        return None
    plan = Plan.of(context.model, context.targets, context.config.amounts)
    if row.blocks is not None:
        influence = row.blocks(context, plan)
        gone = sorted(influence, key=lambda block: influence[block])[: plan.going["blocks"]]
        return packed(Removal(plan, frozenset(gone)), context.targets)
    assert row.channels is not None, "one of the two"
    scores = row.channels(context, plan)
    units = {one.reader.name: _lowest(scores[one.reader.block], plan.going["ffn"]) for one in plan.units["ffn"]}
    return packed(Removal(plan, units=units), context.targets)


@torch.no_grad()
def block_influence(context: RunContext, plan: Plan) -> dict[str, float]:
    """`1 - mean_t cos(h_t, h'_t)` of what a block is given and hands on (ShortGPT, Men et al. 2024, arXiv:2403.03853).

    Any block may go, the first and the last among them.
    """
    sums = dict.fromkeys(plan.blocks, 0.0)

    def hook(block: str) -> Hook:
        def add(_: nn.Module, given: tuple[Any, ...], output: Any) -> None:
            after = output if isinstance(output, Tensor) else output[0]
            sums[block] += float((1 - torch.cosine_similarity(given[0].float(), after.float(), dim=-1)).sum())

        return add

    with _hooked(context.model, {block: hook(block) for block in plan.blocks}):
        for batch in context.calibration:
            forward_only(context.model, batch)
    return sums


@torch.no_grad()
def flap_scores(context: RunContext, plan: Plan) -> dict[str, Tensor]:
    """`var_t(x_c) ||W_c||^2` of the matrix that reads the channels (FLAP, An et al. 2023, arXiv:2312.11983)."""
    total, squares = dict[str, Tensor](), dict[str, Tensor]()
    tokens = 0

    def hook(block: str) -> Hook:
        def add(_: nn.Module, given: tuple[Any, ...], __: Any) -> None:
            x = given[0].double().flatten(0, -2)
            total[block] = total.get(block, 0) + x.sum(0)
            squares[block] = squares.get(block, 0) + x.square().sum(0)

        return add

    with _hooked(context.model, {_module(one): hook(one.reader.block) for one in plan.units["ffn"]}):
        for batch in context.calibration:
            forward_only(context.model, batch)
            tokens += batch["input_ids"].numel()
    found = {}
    for one in plan.units["ffn"]:
        block = one.reader.block
        variance = (squares[block] - total[block].square() / tokens) / (tokens - 1)
        found[block] = variance * one.reader.matrix(context.model).double().square().sum(0)
    return found


def gisp_scores(context: RunContext, plan: Plan) -> dict[str, Tensor]:
    """`sum |w dL/dw|` over all weights of a channel, in one step (GISP, Wang et al. 2025, arXiv:2510.18030)."""
    model = context.model
    model.requires_grad_(False)
    matrices = {
        target.name: model.get_parameter(target.parameter)
        for one in plan.units["ffn"]
        for target in (one.reader, *(maker for maker, _ in one.makers))
    }
    for parameter in matrices.values():
        parameter.requires_grad_(True)
    try:
        for batch in context.calibration:
            summed_loss(model, batch)[0].backward()
        found = {}
        for one in plan.units["ffn"]:
            scores = _first_order(matrices[one.reader.name]).sum(0)
            for maker, parts in one.makers:
                scores = scores + _first_order(matrices[maker.name]).sum(1).unflatten(0, (parts, one.count)).sum(0)
            found[one.reader.block] = scores
    finally:
        for parameter in matrices.values():
            parameter.requires_grad_(False).grad = None
    return found


def _lowest(scores: Tensor, count: int) -> Tensor:
    return torch.zeros(len(scores), dtype=torch.bool).index_fill_(0, scores.argsort(stable=True)[:count], True)


def _first_order(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "the loss depends on it"
    return (parameter.detach() * parameter.grad).abs()


def _module(one: Units) -> str:
    return one.reader.sites[0].module


@contextmanager
def _hooked(model: nn.Module, hooks: Mapping[str, Hook]) -> Iterator[None]:
    with ExitStack() as undo:
        for name, hook in hooks.items():
            undo.callback(model.get_submodule(name).register_forward_hook(hook).remove)
        yield


CUT: dict[str, Any] = {"update": "none"}
ROWS = {
    "auto": Row("auto"),
    "channels, OBS + least squares": Row("ffn", {"importance": "obs"}),
    "channels, Fisher + least squares": Row("ffn", {"importance": "fisher"}),
    "channels, OBS x Fisher + least squares": Row("ffn", {"importance": "obs+fisher"}),
    "channels, Fisher + least squares, blocks matched": Row("ffn", {"importance": "fisher", "refinement": "blocks"}),
    "channels, Wanda-sp": Row("ffn", {"importance": "wanda", **CUT}),
    "channels, FLAP's score": Row("ffn", CUT, channels=flap_scores),
    "channels, GISP's score": Row("ffn", CUT, channels=gisp_scores),
    "channels, random + least squares": Row("ffn", {"importance": "random"}),
    "channels, Wanda-sp + least squares": Row("ffn", {"importance": "wanda"}),
    "channels, FLAP's score + least squares": Row("ffn", channels=flap_scores),
    "channels, GISP's score + least squares": Row("ffn", channels=gisp_scores),
    "blocks, ShortGPT's influence": Row("blocks", CUT, blocks=block_influence),
    "blocks, greedy by loss": Row("blocks", CUT),
    "blocks, greedy by loss + least squares": Row("blocks"),
    "blocks and channels, Fisher + least squares": Row("both", {"importance": "fisher"}),
}
WITH_OWN_TEXT = (
    "channels, OBS + least squares",
    "channels, Fisher + least squares",
    "channels, Fisher + least squares, blocks matched",
    "channels, OBS x Fisher + least squares",
    "channels, Wanda-sp",
    "channels, FLAP's score",
    "channels, GISP's score",
    "blocks, ShortGPT's influence",
    "blocks, greedy by loss",
    "blocks and channels, Fisher + least squares",
)
ROWS |= {f"{name}, half own text": replace(ROWS[name], own_text=True) for name in WITH_OWN_TEXT}
TRAINED = (
    "channels, OBS + least squares",
    "channels, Fisher + least squares",
    "channels, Fisher + least squares, half own text",
    "channels, Fisher + least squares, blocks matched",
    "channels, Fisher + least squares, blocks matched, half own text",
    "blocks and channels, Fisher + least squares, half own text",
    "channels, Wanda-sp",
    "channels, Wanda-sp, half own text",
    "blocks, ShortGPT's influence",
    "blocks, greedy by loss",
)
ROWS |= {f"{name}, recovered": replace(ROWS[name], recovered=True) for name in TRAINED}
# Weights that were fitted to outputs already are thrown further off than they gain by the steps that serve others.
SLOWER, FASTER = 1e-4, 4e-4
ROWS |= {
    f"{name}, recovered, at {rate:g}": replace(ROWS[name], recovered=True, rates=(rate,))
    for rate, names in {
        SLOWER: (
            "channels, OBS + least squares",
            "channels, Fisher + least squares",
            "channels, Fisher + least squares, blocks matched",
            "channels, Fisher + least squares, blocks matched, half own text",
        ),
        FASTER: (
            "channels, Fisher + least squares, half own text",
            "channels, Wanda-sp",
            "channels, Wanda-sp, half own text",
            "blocks, ShortGPT's influence",
        ),
    }.items()
    for name in names
}
# Beside them: what a text that is like no evaluation text leaves out, own text may bring back.
ROWS |= {
    f"{name}, recovered on half own text, at {FASTER:g}": replace(
        ROWS[name], recovered=True, rates=(FASTER,), trained_on_own_text=True
    )
    for name in (
        "channels, Fisher + least squares, half own text",
        "blocks and channels, Fisher + least squares, half own text",
        "blocks, ShortGPT's influence",
    )
}
