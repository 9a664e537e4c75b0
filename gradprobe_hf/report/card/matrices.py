"""What a card says of the matrices: by block, those that are not reached, and what changed outside of them."""

from __future__ import annotations

from dataclasses import replace

from gradprobe_hf.model.families import stack_of
from gradprobe_hf.report.report import Group, Report, grouped


def block_rows(report: Report) -> list[Group]:
    """A row for each block; where all are alike, as with a pattern, one that names the first and the last."""
    blocks = grouped((row.block, row.weights, report.counted(row)) for row in report.matrices)
    if len({(block.weights, block.zeros) for block in blocks}) > 1 or len(blocks) < 2:
        return blocks
    return [replace(blocks[0], label=f"{blocks[0].label}` to `{blocks[-1].label}")]  # the template quotes both ends


def unreached(report: Report) -> str:
    """What was left out of the budget: each place in the model once, with its number of matrices."""
    if not report.unreached:
        return ""
    places: dict[str, int] = {}
    for one in report.unreached:
        place = stack_of(one.block) if one.block else one.name
        places[place] = places.get(place, 0) + 1
    where = ", ".join(f"{count} in `{place}`" for place, count in places.items())
    return (
        f"{len(report.unreached)} further matrices ({where}; {sum(one.weights for one in report.unreached):,} weights) "
        "are as they were, and not part of the budget: the calibration data does not reach them."
    )


def changed_outside(report: Report) -> str:
    """What was changed outside of the pruned matrices, and what training their blocks gained."""
    found = report.refinement.values()
    if not found:
        return ""
    before, after = (sum(block[when] for block in found) / len(found) for when in ("before", "after"))
    return (
        "Outside of these matrices only gains of norms and biases in the same blocks were changed. On the calibration "
        f"windows that were held out, training took the relative squared error of a block's output from {before:.2e} "
        f"to {after:.2e} (mean over {len(found)} blocks)."
    )
