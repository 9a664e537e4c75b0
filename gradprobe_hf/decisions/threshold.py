"""The published GradProbe rule: a candidate is pruned if its gradient does not grow when the candidates shrink.

Source: github.com/dcifrian/GradProbe. The publication takes the largest gradient over batches of the mean loss; over
sequences it does not depend on the batch size, and for windows of one length the scale of the loss cancels.
"""

from __future__ import annotations

from torch import Tensor


def threshold_mask(candidates: Tensor, before: Tensor, after: Tensor, threshold: float, weight: Tensor) -> Tensor:
    """Prune candidates with `G_1 <= G_0 (1 + threshold)`, give the others back. Everything is `[rows, in]`.

    A gradient of zero in both probes is no evidence (an input never seen, an underflow): the weight is kept, unless it
    is zero already.

    Args:
        candidates: bool.
        before, after: G, the largest magnitude of the gradient over the calibration sequences, at the original and at
            the shrunk weights.
        threshold: relative growth that is tolerated, >= 0.
    """
    return candidates & ((after <= before * (1 + threshold)) & ~no_evidence(before, after) | (weight == 0))


def no_evidence(before: Tensor, after: Tensor) -> Tensor:
    """Where neither probe saw a gradient."""
    return (before == 0) & (after == 0)
