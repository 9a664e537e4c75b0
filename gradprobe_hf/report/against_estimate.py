"""A finished run beside its estimate: the memory and the passes that were expected, and those it took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.estimation.estimate import Estimate, estimate
from gradprobe_hf.estimation.footprint import PlacementName
from gradprobe_hf.model.loading.load import skeleton
from gradprobe_hf.model.pooler import without_pooler
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.report.report import Report

Unit = Literal["bytes", "passes", "operations", "seconds"]


@dataclass(frozen=True)
class Expectation:
    """One figure of a run. None: the estimate, or the run, has none."""

    what: str
    unit: Unit
    estimated: float | None
    measured: float | None


def planned(report: Report) -> GradProbeConfig:
    """The configuration of a run, with the batch size and the place of statistics that it chose, if it was to."""
    config, chosen = GradProbeConfig.from_dict(report.config), report.execution
    if config.batch_size == "auto" and "batch_size" in chosen:
        config = config.varied(batch_size=int(chosen["batch_size"].split()[0]))
    if config.accumulator_device == "auto" and "accumulators" in chosen:
        config = config.varied(accumulator_device=chosen["accumulators"].partition(":")[0])
    return config


def placement_of(execution: Mapping[str, str]) -> PlacementName:
    """Which of the placements of an estimate a run had."""
    if execution.get("placement", "").startswith("offloaded"):
        return "offloaded"
    return "checkpointed" if execution.get("checkpointing", "").startswith("on") else "resident"


def against_estimate(report: Report, found: Estimate) -> tuple[Expectation, ...]:
    """What was estimated of the run's own placement beside what the run took.

    Memory is that of the process at its highest, and that a CUDA device had allocated. No seconds are estimated: these
    are what the operations took.
    """
    name = placement_of(report.execution)
    placement, work = next(one for one in found.placements if one.name == name), found.work[name]
    # Its seconds are among those of all stages, too.
    operations = work.flops + (found.recovery.flops if found.recovery else 0)
    memory: list[tuple[str, float | None, str]] = [
        ("memory of the host", placement.peak("host"), "peak_resident_bytes")
    ]
    if "peak_cuda_bytes" in report.memory:
        expected = placement.peak("accelerator") if "accelerator" in placement.room else None
        memory.append(("memory of the accelerator", expected, "peak_cuda_bytes"))
    return (
        *(Expectation(what, "bytes", expected, report.memory.get(key)) for what, expected, key in memory),
        Expectation("forward passes", "passes", work.forwards, _with_recomputed(report, name)),
        Expectation("backward passes", "passes", work.backwards, report.passes.get("backward")),
        Expectation("floating-point operations", "operations", operations, None),
        Expectation("all stages", "seconds", None, sum(report.timings.values())),
    )


def estimate_of(report: Report, model: PreTrainedModel, base: int | None = None) -> Estimate:
    """What would have been estimated of a run.

    Args:
        model: as it was loaded; its weights are not read.
        base: bytes of the process before it loaded a model.

    Raises:
        ValueError: the passes of such a run depend on what it finds out.
    """
    config, device = planned(report), next(model.parameters()).device
    bare = skeleton(model.config, type(model), dtype=model.dtype, **without_pooler(model))
    targets = find_targets(bare, config.include, config.exclude)
    device = torch.device("cpu") if device.type == "meta" else device
    return estimate(bare, targets, config, device=device, base=base)


def rows_of(expectations: Sequence[Expectation]) -> list[list[str]]:
    """What, estimated, measured: as text."""
    return [[one.what, _shown(one.estimated, one.unit), _shown(one.measured, one.unit)] for one in expectations]


def _with_recomputed(report: Report, name: PlacementName) -> float | None:
    """The estimate counts what checkpointing computes again as forward; the run counts it as backward's own."""
    passes: Mapping[str, Any] = report.passes
    return None if "forward" not in passes else passes["forward"] + (passes["backward"] if name != "resident" else 0)


def _shown(number: float | None, unit: Unit) -> str:
    if number is None:
        return "-"
    words = {"bytes": f"{number / 1e6:,.0f} MB", "passes": f"{number:.3g}", "seconds": f"{number:.3g} s"}
    return words.get(unit, f"{number:.3g}")
