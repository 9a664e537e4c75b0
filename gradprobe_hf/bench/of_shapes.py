"""Shapes of a model beside the dense one, measured before there is a checkpoint of any.

How long a model takes does not depend on its weights. So each shape is made of random ones, by a process of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from gradprobe_hf.bench.bench import measured, started
from gradprobe_hf.bench.result import BenchResult
from gradprobe_hf.checkpoint.file_sizes import FileSizes
from gradprobe_hf.estimation.machine import fits
from gradprobe_hf.model.parameters import input_device, is_offloaded, parameter_bytes
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.run.decision import PruningDecision
from gradprobe_hf.structures.plan import Plan
from gradprobe_hf.structures.removal import Removal
from gradprobe_hf.structures.shapes import smaller_config
from gradprobe_hf.structures.table import shape_words

logger = logging.getLogger(__name__)
_REMEDY = "leave measure_speed out, and measure the checkpoint with gradprobe bench."


def check_measurable(model: PreTrainedModel) -> None:
    """Raise ValueError for a model that no other process can make, or has room for."""
    if is_offloaded(model):
        raise ValueError(f"measure_speed is about models in memory, and parts of this one are offloaded: {_REMEDY}")
    if not type(model).__module__.startswith("transformers."):
        raise ValueError(
            f"measure_speed makes the model's shapes in processes of their own, which cannot import "
            f"{type(model).__module__}.{type(model).__name__}: {_REMEDY}"
        )


def speed_of_decision(context: RunContext, decision: PruningDecision) -> BenchResult | None:
    """The dense model, what is left of it, and the other shapes that were tried; None where that failed."""
    assert decision.removal is not None, "whole structures go"
    tried = [one["removed"] for one in decision.diagnostics.shapes if one["loss"] is not None]
    others = [Removal.example(Plan.of(context.model, context.targets, going)) for going in tried[1:]]
    return bench_shapes(context, {shape_words(one.plan.going): one for one in (decision.removal, *others)})


def bench_shapes(context: RunContext, removals: Mapping[str, Removal]) -> BenchResult | None:
    """The dense model, and what is left without each of these; measured by the main process.

    All the work is done by then. So a failure is a warning, and None in all processes: no result is lost by it.

    Args:
        removals: by the names of their rows.
    """
    found = None
    if context.processes.is_main:
        try:
            found = _measured(context, removals)
        except Exception as error:
            logger.warning("speed was not measured: %s: %s", type(error).__name__, error)
    result: BenchResult | None = context.processes.broadcast(found, patiently=True)
    return result


def _measured(context: RunContext, removals: Mapping[str, Removal]) -> BenchResult:
    model = context.model
    configs = [model.config, *(smaller_config(model.config, removal) for removal in removals.values())]
    sizes = [parameter_bytes(model), *(removal.bytes(model) for removal in removals.values())]
    names, device = ["dense", *removals], str(input_device(model))
    if not fits(sum(sizes), input_device(model)):
        raise MemoryError(f"there is no room for {len(sizes)} models of {sum(sizes) / 1e9:,.1f} GB beside this one")
    made_by: list[tuple[Any, ...]] = [("of_config", type(model), config, model.dtype, device, {}) for config in configs]
    with started(names, made_by) as workers:
        found = measured(names, workers, progress=context.progress)
    return found.with_sizes([FileSizes(size, None) for size in sizes])
