"""The decision of a run, and how it is saved: once when the masks are known, then block by block as weights change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field

from torch import Tensor

from gradprobe_hf.reconstruction.block_matching import Matched
from gradprobe_hf.reconstruction.new_weights import NewWeights
from gradprobe_hf.reconstruction.task import FinishedBlock
from gradprobe_hf.run.diagnostics import Diagnostics
from gradprobe_hf.run.snapshots import Snapshots, Step
from gradprobe_hf.selection.packed_masks import PackedMasks
from gradprobe_hf.structures.removal import Removal


@dataclass(frozen=True)
class PruningDecision:
    """What goes, and what is known about why.

    Attributes:
        masks: parameter name -> bool `[out, in]`, True = pruned.
        diagnostics: of the probe pairs that led there.
        unreached: matrices the calibration loss does not depend on.
        new_weights: of the matrices whose kept weights change.
        damping: what it was raised to in the matrices whose Hessian could not be inverted otherwise.
        matched: how the training of each block went, where blocks were trained.
        removal: which structures go, where whole ones do: what the masks are of.
    """

    masks: Mapping[str, Tensor]
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    unreached: tuple[str, ...] = ()
    new_weights: NewWeights = field(default_factory=NewWeights)
    damping: dict[str, float] = field(default_factory=dict)
    matched: dict[str, Matched] = field(default_factory=dict)
    removal: Removal | None = None


def save_decision(snapshots: Snapshots, masks: PackedMasks | None, diagnostics: Diagnostics) -> None:
    """All that a run which goes on from here needs of what came before it."""
    values = {"diagnostics": diagnostics.to_dict(), "columns": None if masks is None else masks.all_columns}
    snapshots.enter(Step.of("decision"), values, [("masks", {} if masks is None else masks.all_packed)])


def recall_decision(snapshots: Snapshots, diagnostics: Diagnostics) -> PackedMasks | None:
    """The masks that were saved; the diagnostics become what they were then."""
    kept = snapshots.read(Step.of("decision"))
    diagnostics.load(kept.values["diagnostics"])
    columns = kept.values["columns"]
    return None if columns is None else PackedMasks.from_packed(kept.part("masks"), columns)


@dataclass(frozen=True)
class BlockSaver:
    """Saves every block that reconstruction has finished."""

    snapshots: Snapshots

    def __call__(self, number: int, block: FinishedBlock) -> None:
        matched = None if block.matched is None else asdict(block.matched)
        values = {"columns": block.masks.all_columns, "damping": block.damping, "matched": matched}
        parts = [("weights", block.new_weights), ("vectors", block.vectors), ("masks", block.masks.all_packed)]
        self.snapshots.record(Step.of("block", number), values, parts)


def blocks_before(snapshots: Snapshots | None) -> Iterator[FinishedBlock]:
    """The blocks that an earlier run has finished, in all processes; each is read when its turn has come."""
    latest = snapshots.latest() if snapshots else None
    if snapshots is None or latest is None or latest.stage != "block":
        return
    for number in range(latest.number + 1):
        kept = snapshots.read(Step.of("block", number))
        values, masks = kept.values, PackedMasks.from_packed(kept.part("masks"), kept.values["columns"])
        matched = Matched(**values["matched"]) if values["matched"] else None
        yield FinishedBlock(kept.part("weights"), masks, values["damping"], kept.part("vectors"), matched)
