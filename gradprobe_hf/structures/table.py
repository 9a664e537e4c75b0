"""The table of structures: what can go whole.

To add one: a row, made of its roles in `model/block_roles.py` and of what the configuration of a model with fewer of
them says, in `model/config_names.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from gradprobe_hf.model.block_roles import attention_matrices, feed_forward_matrices
from gradprobe_hf.model.config_names import (
    Left,
    key_value_heads,
    narrower,
    with_fewer_blocks,
    with_fewer_experts,
    with_fewer_heads,
)

AUTO: Final = "auto"  # in place of amounts: the best shape that meets a budget
WIDTH_UNIT = 64  # a share of the channels is rounded so that a multiple of this is kept: what kernels are tuned for

NARROW = 8  # such multiples: a network that has fewer is narrowed in smaller steps

FEWER_BLOCKS = 8  # that are left out in turn once one has gone: those without which the loss was lowest before

# What each block is left out of: so many calibration rows, or tokens where each has a loss, whichever is less. Two
# blocks that they cannot tell apart are as good as each other.
ROWS_WITHOUT = 32
TOKENS_WITHOUT = 4096


@dataclass(frozen=True, kw_only=True)
class Structure:
    """One kind of structure.

    Attributes:
        unit, units: what one of them and several are called.
        takes: units inside of blocks, experts, or whole blocks.
        configured: what the configuration of a model with fewer of them says otherwise, under the family's names.
        matrices: roles of the matrices in a block -> the one that reads what the units make, and those that make it,
            each with how many rows side by side it has for a unit (gate and up in one matrix: 2); None where a block
            has no such units. For what is no units: None.
        counted: how many units a block has, by the configuration; None: as many as the reader has columns.
        vectors: what families call parameters beside these matrices that have as many values for each unit.
        normed_together: whether a norm may go over all that a block's units make, with a gain for each row of a maker.
        importance: of units, which of `UNIT_SCORES` tells which of them go where none is asked for.
        rounded_to: of what is kept where the amount is a share; None: only counts are taken.
        included: what goes with one of them, for the model card.
    """

    unit: str
    units: str
    takes: Literal["units", "experts", "blocks"]
    configured: Callable[[Any, Left], dict[str, Any]]
    matrices: Callable[[frozenset[str]], tuple[str, dict[str, int]] | None] | None = None
    counted: Callable[[Any], int] | None = None
    vectors: tuple[str, ...] = ()
    normed_together: bool = False
    importance: str | None = None
    rounded_to: int | None = None
    included: str = ""

    @property
    def wanted(self) -> str:
        """What an amount has to be."""
        share = "a share in (0, 1), or " if self.rounded_to else ""
        return f"{share}how many {self.units} go, a whole number >= 1"

    def count_of(self, amount: float, there: int) -> int:
        """How many of the units that are there go.

        Raises:
            ValueError: none of them, or all.
        """
        if isinstance(amount, int):
            gone = amount
        else:
            assert self.rounded_to is not None, "a share was refused"
            gone = there - self.rounded_to * round((1 - amount) * there / self.rounded_to)
        if 0 < gone < there:
            return gone
        if isinstance(amount, int):
            what = self.units if there > 1 else self.unit
            raise ValueError(f"{amount} of {there} {what} cannot go: {at_most(there - 1)}.")
        kept = "" if self.rounded_to == 1 else f", of which a multiple of {self.rounded_to} is kept,"
        raise ValueError(
            f"a share of {amount:g} of {there} {self.units}{kept} is {'none' if gone <= 0 else 'all'} of them. Give "
            f"how many go, {min(max(1, round(amount * there)), there - 1)} say."
        )

    def steps(self, there: int) -> list[int]:
        """How many of the units that are there may go, ascending, where a shape is chosen for a budget."""
        step = 1 if self.rounded_to is None else width_step(there, self.rounded_to)
        return [there - kept for kept in range(there, 0, -1) if kept % step == 0 and kept < there]


def at_most(count: int) -> str:
    """What an error says can go.

    >>> at_most(3), at_most(1), at_most(0)
    ('1 to 3 can', '1 can', 'none can')
    """
    return f"1 to {count} can" if count > 1 else "1 can" if count == 1 else "none can"


def width_step(there: int, usual: int) -> int:
    """Channels that a width changes by: as many as usual; of a narrow network an eighth, rounded to a power of two.

    >>> width_step(1536, 64), width_step(24, 64)
    (64, 2)
    """
    return usual if there >= NARROW * usual else 2 ** int(math.log2(max(1, there / NARROW)))


# What tells which units go was chosen for each of them, on the texts that docs/guides/smaller.md names.
STRUCTURES: dict[str, Structure] = {
    "ffn": Structure(
        unit="FFN channel",
        units="FFN channels",
        takes="units",
        configured=narrower,
        matrices=feed_forward_matrices,
        importance="fisher",
        rounded_to=WIDTH_UNIT,
    ),
    "kv_groups": Structure(
        unit="key-value head",
        units="key-value heads",
        takes="units",
        configured=with_fewer_heads,
        matrices=attention_matrices,
        # The query heads of a group are side by side in what `o_proj` reads: a group is a stretch of its columns.
        counted=key_value_heads,
        vectors=("sinks",),  # GPT-OSS, Granite with a window
        normed_together=True,
        importance="obs",
        included="the query heads that read it",
    ),
    "experts": Structure(
        unit="expert",
        units="experts",
        takes="experts",
        configured=with_fewer_experts,
        rounded_to=1,
        included="the row of the router that sends tokens to it",
    ),
    "blocks": Structure(
        unit="block",
        units="blocks",
        takes="blocks",
        configured=with_fewer_blocks,
    ),
}


def blocks_in(going: Mapping[str, float]) -> int:
    """How many blocks go whole in a shape."""
    return sum(int(count) for name, count in going.items() if STRUCTURES[name].takes == "blocks")


def shape_words(going: Mapping[str, float]) -> str:
    """What goes in a shape: `256 FFN channels of every block, 2 blocks`."""
    return ", ".join(
        f"{count} {row.units if count > 1 else row.unit}{'' if row.takes == 'blocks' else ' of every block'}"
        for name, count in going.items()
        for row in [STRUCTURES[name]]
    )


def checked(amounts: Any) -> dict[str, float] | Literal["auto"]:
    """Amounts of structures, by name; `"auto"` as it is.

    Raises:
        ValueError: no such structure, or an amount that is wrong by itself.

    >>> checked({"ffn": 0.3, "blocks": 4})
    {'ffn': 0.3, 'blocks': 4}
    """
    named = ", ".join(map(repr, STRUCTURES))
    if amounts == AUTO:
        return AUTO
    if not isinstance(amounts, Mapping) or not amounts:
        raise ValueError(
            f"structure must be a dict from structures ({named}) to how much of each goes, like "
            f"{{'ffn': 0.3, 'blocks': 4}}, or 'auto' beside a budget (params=0.75), got {amounts!r}."
        )
    for name, amount in amounts.items():
        if name not in STRUCTURES:
            raise ValueError(f"structure has no {name!r}: there are {named}.")
        row = STRUCTURES[name]
        if not _is_amount(amount, is_share=row.rounded_to is not None):
            raise ValueError(f"structure {name!r} must be {row.wanted}, got {amount!r}.")
    return {name: amounts[name] for name in STRUCTURES if name in amounts}


def _is_amount(amount: object, is_share: bool) -> bool:
    if isinstance(amount, bool) or not isinstance(amount, (int, float)):
        return False
    if isinstance(amount, int):
        return amount >= 1
    return is_share and math.isfinite(amount) and 0 < amount < 1
