"""What a decision does to the model: it is measured as it would be, its own weights untouched."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from gradprobe_hf.evaluation.divergence import PairedMeasurement, measure_pair
from gradprobe_hf.evaluation.perplexity import Measurement, measure
from gradprobe_hf.evaluation.task_metric import measure_metric
from gradprobe_hf.model.fsdp import is_sharded, telling
from gradprobe_hf.model.parameters import is_offloaded
from gradprobe_hf.model.passes.patches import eval_mode
from gradprobe_hf.model.passes.routing import routed
from gradprobe_hf.probe.maps.attachment import serving
from gradprobe_hf.run.apply import applied
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.run.decision import PruningDecision

Metric = Callable[[Any], float]


@dataclass(frozen=True)
class Judge:
    """The user's own metric, of which more is better: what `max_metric_drop` is about in place of perplexity.

    Attributes:
        dense: its value for the model as it is.
    """

    metric: Metric
    dense: float

    @classmethod
    def of(cls, context: RunContext, metric: Metric) -> Judge:
        """Called before anything is computed, because a function that fails fails here.

        Raises:
            ValueError: it returns no number.
        """
        with context.stopwatch("evaluate attempts"):
            dense = judged(context, metric)
        if math.isnan(dense):
            raise ValueError("metric_fn returned nan for the model as it is: nothing compares with that.")
        return cls(metric, dense)


def evaluate(
    context: RunContext, decision: PruningDecision | None, label: str, allows_nan: bool = False
) -> Measurement:
    """The loss of the model as a decision would leave it, or as it is; its weights are untouched.

    Args:
        label: what the progress bar says.
        allows_nan: as in `measure`.
    """
    made = decision or PruningDecision({})
    with served(context, made):
        return measure(context.workload_on(context.evaluation), f"evaluation ({label})", allows_nan)


def evaluate_pair(context: RunContext, decision: PruningDecision, label: str = "evaluation") -> PairedMeasurement:
    """The losses of the model as it is and as a decision would leave it, and how far apart their predictions are."""
    work = context.workload_on(context.evaluation)
    # Both through measured maps: transformers multiplies with all experts of a mixture at once and rounds otherwise, so
    # that a model of which nothing goes would differ from itself.
    dense, pruned = (partial(served, context, made) for made in (PruningDecision({}), decision))
    return measure_pair(work, work, pruned, label, dense)


def evaluate_metric(context: RunContext, decision: PruningDecision | None, label: str) -> float:
    """The task's metric of the model as a decision would leave it, or as it is; its weights are untouched."""
    assert context.metric is not None, "asked for where there is one"
    made = decision or PruningDecision({})
    with served(context, made):
        return measure_metric(context.workload_on(context.evaluation), context.metric, f"evaluation ({label})")


@contextmanager
def served(context: RunContext, decision: PruningDecision) -> Iterator[None]:
    """The model as a decision would leave it."""
    targets = [*context.targets, *decision.new_weights.vectors]
    routes = {} if decision.removal is None else decision.removal.routes
    # Routers first: vectors of theirs are served around what is put there.
    with (
        routed(context.model, routes),
        serving(context.model, targets, decision.masks, new_weights=decision.new_weights),
    ):
        yield


@contextmanager
def written(context: RunContext, decision: PruningDecision) -> Iterator[None]:
    """The same, in its weights too: a metric of the user's own may save them, or read them into another model.

    Of a model that is not in memory in one piece, whose weights would have to be written and read back, as `served`.
    """
    model = context.model
    if is_offloaded(model) or is_sharded(model):
        with served(context, decision):
            yield
        return
    routes = {} if decision.removal is None else decision.removal.routes
    with applied(model, context.targets, decision.masks, False, decision.new_weights, routes):
        yield


def judged(context: RunContext, metric: Metric) -> float:
    """What the user's metric says of the model as it is served now, the same in all processes. A collective.

    Raises:
        ValueError: it returns no number.
    """
    with telling(context.model, context.processes), eval_mode(context.model):
        value = _number(metric(context.model))
    # Rounding may differ between processes, and with it the branch that each would take.
    return float(context.processes.broadcast(value))


def _number(value: Any) -> float:
    """What a metric returned, as a number."""
    shown = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__} {value!r:.80}"
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError("text")
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"metric_fn must return a number, of which more is better, got {shown}.") from error
