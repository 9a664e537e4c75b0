"""The table of refinements: what is done to a block when the weight updates of its matrices are through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Refinement:
    """One way to train a block's kept weights and its vectors (gains of norms, biases) under a mask that is fixed.

    Attributes:
        epochs: walks over the calibration data, at most; 0: nothing is trained.
        rate: learning rate of a tensor, as a fraction of the root mean square of what it holds.
        last_rate: the rate at the end of a cosine, as a fraction of `rate`.
        betas: of Adam.
        windows: sequences in a step.
        held_out: fraction of the windows that are not trained on, and tell which epoch was the best.
        patience: epochs without a better one, after which it stops.
        dense_target: which outputs of the block are aimed at, from 0 (of the dense block on the inputs that the pruned
            blocks before it give) to 1 (of the dense model).
        sentence: what it did, for the model card.
        source: paper and section.
    """

    epochs: int = 0
    rate: float = 0.0
    last_rate: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    windows: int = 4
    held_out: float = 0.1
    patience: int = 2
    dense_target: float = 0.0
    sentence: str = ""
    source: str = ""
    refuses: Mapping[str, str] = field(default_factory=dict)


REFINEMENTS: dict[str, Refinement] = {
    "none": Refinement(),
    "blocks": Refinement(
        epochs=8,
        rate=0.01,
        dense_target=0.5,
        sentence="Behind the update of its matrices, each block was trained as a whole, its mask fixed: its kept "
        "weights, the gains of its norms, its biases and other vectors, towards the outputs of the dense block (Adam, "
        "as long as calibration windows that were held out gained from it).",
        source="Shin et al. 2024 (arXiv:2406.15524); Makni et al. 2026, 3BASiL (arXiv:2603.01376)",
    ),
}
