"""What a sweep of thresholds returns: a row for each, and the one that was chosen."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from gradprobe_hf.config.values import GradientThreshold
from gradprobe_hf.evaluation.perplexity import Measurement


@dataclass(frozen=True)
class ThresholdRow:
    """One threshold: the true sparsity of the target matrices, and the loss (in nats) and perplexity there.

    Attributes:
        candidates: the share of the weights that was proposed.
    """

    gradient_threshold: GradientThreshold
    sparsity: float
    zeros: int
    loss: float
    perplexity: float | None
    candidates: float


@dataclass(frozen=True)
class TunedMeasurement:
    """What a tuned threshold comes to on text that did not choose it: the dense model, and the threshold's row."""

    dense: Measurement
    row: ThresholdRow


@dataclass(frozen=True)
class ThresholdSweep:
    """What `sweep_gradient_thresholds` returns.

    Attributes:
        dense: the loss of the model as it is.
        rows: in the order in which they were tried; those of the bisection are the last.
        tuned: the threshold with the most zeros whose metric is within `max_metric_drop`; None if there is none, or
            nothing was asked.
        reported: the tuned threshold and the dense model on the half of the evaluation that did not choose it; `dense`
            and `rows` are of the half that did. None where nothing was tuned.
        tuned_sparsity: of the candidates that go with the tuned threshold: the configuration's `sparsity`.
        left_dense: blocks for which no threshold kept the limit (`order="sequential"`): the `exclude` of what is tuned;
            empty where that is None, and every block is.
    """

    dense: Measurement
    rows: list[ThresholdRow]
    tuned: GradientThreshold | None = None
    reported: TunedMeasurement | None = None
    tuned_sparsity: float | None = None
    left_dense: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        reported = None if self.reported is None else asdict(self.reported)
        rows = [asdict(row) for row in self.rows]
        return {
            "dense": self.dense.to_dict(),
            "rows": rows,
            "tuned": self.tuned,
            "tuned_sparsity": self.tuned_sparsity,
            "left_dense": list(self.left_dense),
            "reported": reported,
        }


def metric_of(found: Measurement | ThresholdRow) -> float:
    return found.loss if found.perplexity is None else found.perplexity
