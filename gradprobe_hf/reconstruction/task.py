"""What is to be reconstructed, and what has been of it: blocks, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.model.targets import Target
from gradprobe_hf.probe.engine import Workload
from gradprobe_hf.reconstruction.block_matching import Matched
from gradprobe_hf.selection.packed_masks import PackedMasks


@dataclass(frozen=True)
class FinishedBlock:
    """One block's result.

    Attributes:
        new_weights: of each matrix, `[out, in]`.
        masks: of the weights that are zero.
        damping: where more than was asked for was needed, by matrix.
        vectors: gains and biases that were trained, by parameter.
        matched: how the training of the block went, if it was trained.
    """

    new_weights: Mapping[str, Tensor]
    masks: PackedMasks
    damping: dict[str, float]
    vectors: Mapping[str, Tensor] = field(default_factory=dict)
    matched: Matched | None = None


@dataclass(frozen=True)
class Reconstruction:
    """What is to be reconstructed.

    Attributes:
        masks: which weights go; None: the weight update chooses them.
        row_fisher: of each matrix, the mean Fisher information of the weights of a row, `[out]`, where it is known.
        folder: for the new weights of a model that is offloaded.
        finished: blocks that an earlier run has finished, in their order; gone through once, a block at a time.
        after_block: called with every further one and its number.
        silenced: blocks that go whole: nothing in them is left to change.
        routes: name of a router -> which of its experts go, bool `[experts]`: the pruned model sends them no token.
    """

    work: Workload
    targets: Sequence[Target]
    config: GradProbeConfig
    masks: PackedMasks | None
    row_fisher: Mapping[str, Sequence[float]] = field(default_factory=dict)
    folder: Path | None = None
    finished: Iterable[FinishedBlock] = ()
    after_block: Callable[[int, FinishedBlock], None] | None = None
    silenced: frozenset[str] = frozenset()
    routes: Mapping[str, Tensor] = field(default_factory=dict)
