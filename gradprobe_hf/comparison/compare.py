"""compare_pretrained: one model, one text and one budget through several configurations."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from gradprobe_hf.bench.of_shapes import bench_shapes, check_measurable
from gradprobe_hf.comparison.baselines import (
    baselines,
    check_common,
    most_demanding,
    rows_of,
    shared_terms,
)
from gradprobe_hf.comparison.rows import ComparedRow, Comparison
from gradprobe_hf.config.config import GradProbeConfig, resolve_config
from gradprobe_hf.data.text.text_options import TEXT_OPTIONS
from gradprobe_hf.evaluation.perplexity import Measurement
from gradprobe_hf.memory.memory_plan import open_run
from gradprobe_hf.model.passes.loss import LossFunction
from gradprobe_hf.model.passes.own_forward import with_own_forward
from gradprobe_hf.report.build import published_name, versions
from gradprobe_hf.report.original import Original, original_of
from gradprobe_hf.report.plots import save_comparison
from gradprobe_hf.report.report import finite, without_examples
from gradprobe_hf.run.context import RunContext, RunRequest
from gradprobe_hf.run.reach import reachable
from gradprobe_hf.run.request.agreement import check_same_call
from gradprobe_hf.run.request.checks import check_request
from gradprobe_hf.run.request.compatibility import check_targets
from gradprobe_hf.run.request.foreseen import foreseen_warnings
from gradprobe_hf.run.request.inputs import choosing_apart, load_inputs, written
from gradprobe_hf.runtime.option_checks import check_callable
from gradprobe_hf.runtime.paths import expanded, expanded_folder, expanded_model
from gradprobe_hf.runtime.plain_computation import plain_computation

logger = logging.getLogger(__name__)

# What all configurations of a comparison have in common.
_SHARED = (
    "num_samples",
    "sequence_length",
    "seed",
    "include",
    "exclude",
    "evaluation_samples",
    "task",
    "label_column",
    "metric",
    "evaluation_protocol",
    *TEXT_OPTIONS,
)

RESULT_NAME = "comparison.json"


def check_without_recovery(config: GradProbeConfig) -> None:
    """Raise ValueError for steps of training, which a measurement without applying a mask leaves out."""
    if config.recovery_steps:
        raise ValueError(
            f"recovery_steps={config.recovery_steps} has no part here: what is measured is what pruning leaves. Leave "
            "recovery_steps unset, and recover the checkpoint that was chosen."
        )


def feasible(context: RunContext, configs: Mapping[str, GradProbeConfig]) -> dict[str, GradProbeConfig]:
    """Those that these matrices can be pruned with; of the others the log says why not."""
    found = {}
    for name, config in configs.items():
        try:
            check_targets(context.model, context.targets, config)
            found[name] = config
        except ValueError as error:
            logger.warning("%s is left out of the comparison: %s", name, error)
    return found


@dataclass(frozen=True)
class Compared:
    """What `compare_pretrained` returns.

    Attributes:
        model: its name.
        dense: the loss of the model as it is.
        rows: one for each configuration.
        configs: the configurations, as plain data.
        speed: with `measure_speed` what `BenchResult.to_dict` has, of the dense model and of each shape among the rows.
        calibration, evaluation: the texts, with their protocols and fingerprints; with the name of the task's metric,
            and its value for the dense model, where one is measured.
        warnings: what is known of the texts that makes the comparison less than it seems.
        origin: what the model was before, as in a report: the sparsity that it had been `pruned_to`, say.
    """

    model: str
    dense: Measurement
    rows: list[ComparedRow]
    configs: dict[str, dict[str, Any]]
    calibration: dict[str, Any]
    evaluation: dict[str, Any]
    speed: dict[str, Any] | None = None
    warnings: list[str] = field(default_factory=list)
    origin: dict[str, Any] = field(default_factory=dict)

    @property
    def original(self) -> Original:
        """What the model is called that all rows are beside: it may have been pruned before."""
        return original_of(self.origin)

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return finite(
            {
                "model": self.model,
                "dense": self.dense.to_dict(),
                "rows": [row.to_dict() for row in self.rows],
                "configs": self.configs,
                "calibration": without_examples(self.calibration),
                "evaluation": without_examples(self.evaluation),
                "speed": self.speed,
                "warnings": self.warnings,
                "origin": self.origin,
                "versions": versions(),
            }
        )

    def save(self, directory: str | Path) -> None:
        """Write `comparison.json` and the figures into `directory`; whole, or not at all."""
        folder = Path(expanded(directory))
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".comparison-") as beside:
            scratch, rows = Path(beside), [row.to_dict() for row in self.rows]
            (scratch / RESULT_NAME).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
            measured, name = self.dense.to_dict(), self.original.column
            save_comparison(rows, measured, self.evaluation["source"], scratch, self.speed, name)
            # An earlier comparison's picture of speed would stand beside rows that it does not show.
            if self.speed is None and _has_speed(folder / RESULT_NAME):
                (folder / "speed.png").unlink(missing_ok=True)
            for made in scratch.iterdir():
                made.replace(folder / made.name)


def _has_speed(result: Path) -> bool:
    """Whether a comparison was written here that measured speed."""
    try:
        return json.loads(result.read_text(encoding="utf-8")).get("speed") is not None
    except (OSError, ValueError, AttributeError):
        return False


@plain_computation()
@with_own_forward
def compare_pretrained(
    model_or_id: PreTrainedModel | str | Path,
    config: GradProbeConfig | None = None,
    configs: Mapping[str, GradProbeConfig] | None = None,
    *,
    calibration: Any = None,
    processing_class: Any = None,
    evaluation: Any = None,
    loss_fn: LossFunction | None = None,
    on_row: Callable[[Compared], None] | None = None,
    progress: bool = True,
    **from_pretrained_kwargs: Any,
) -> Compared:
    """One model, text and budget through several configurations. The model is left as it was.

    Args:
        model_or_id: a Hub id, a folder, or a loaded model.
        config: the budget, the pattern, the text and the memory that all have in common.
        configs: what is compared, by name; default: the baselines, and `config` itself where it is none of them.
        calibration, processing_class, evaluation, loss_fn, from_pretrained_kwargs: as in `prune_pretrained`; an
            evaluation there must be.
        on_row: called with what there is whenever a row is made.
        progress: show progress bars.

    Raises:
        ValueError: configurations on other text or matrices, or nothing to measure on; and what `prune_pretrained`
            raises.
    """
    config = resolve_config(config)
    check_callable("on_row", on_row, ("compared",))
    known = baselines(config)
    if not isinstance(configs, (Mapping, type(None))):
        raise TypeError(f"configs must be a dict from names to configurations, got {type(configs).__name__}.")
    chosen = dict(rows_of(config) if configs is None else configs)
    if not chosen:
        raise ValueError("configs is empty: there is nothing to compare.")
    for name, other in chosen.items():
        if not isinstance(other, GradProbeConfig):
            raise TypeError(f"configs[{name!r}] must be a GradProbeConfig, got {type(other).__name__}.")
        _check_text(name, other, config)
        check_without_recovery(other)
    check_common(config, chosen)
    request = RunRequest(
        expanded_model(model_or_id),
        most_demanding([config, *chosen.values()]),
        calibration,
        processing_class,
        evaluation,
        loss_fn,
        expanded_folder(from_pretrained_kwargs),
        always_calibrate=True,
        progress=progress,
    )
    check_request(request, compare_pretrained)
    check_same_call(
        {f"configs[{name!r}].{key}": value for name, one in chosen.items() for key, value in one.to_dict().items()},
        loss_fn=loss_fn,
    )
    loaded = load_inputs(request)
    check_evaluation(loaded)
    measures_speed = any(one.measure_speed for one in (config, *chosen.values()))
    if measures_speed:
        check_measurable(loaded.model)
    _check_own(loaded, chosen, known)
    if any(other.max_metric_drop is not None for other in chosen.values()):
        loaded = choosing_apart(loaded)
    with open_run(written(loaded), shares_probe=bool(shared_terms(list(chosen.values())))) as context:
        context = reachable(context)
        foreseen = foreseen_warnings(context)
        chosen = _possible(context, chosen, known)
        comparison = Comparison(context, list(chosen.values()))
        found = Compared(
            published_name(context.model),
            comparison.measured(None, "dense"),
            [],
            {name: other.to_dict() for name, other in chosen.items()},
            context.calibration.describe(),
            {**context.evaluation.describe(), "metric": _dense_metric(context, comparison)},
            warnings=foreseen,
            origin=dict(context.origin),
        )
        for name, other in chosen.items():
            made = comparison.row_if_possible if known.get(name) == other else comparison.row
            with context.stopwatch(name):
                row = made(name, other)
            if row is None:
                continue
            found.rows.append(row)
            found.origin.update(comparison.origin)
            if on_row is not None:
                on_row(found)
        if measures_speed:
            with context.stopwatch("speed"):
                speed = bench_shapes(context, comparison.removals)
            found = replace(found, speed=None if speed is None else speed.to_dict())
    if not found.rows:
        raise ValueError("this model could be pruned in none of these ways; the log says why.")
    return found


def _dense_metric(context: RunContext, comparison: Comparison) -> dict[str, Any] | None:
    """The task's metric of the model as it is, and its name; None where there is none."""
    if context.metric is None:
        return None
    named = {"name": context.metric.name, "title": context.metric.metric.title}
    return {**named, "dense": comparison.metric(None, "dense")}


def check_evaluation(context: RunContext) -> None:
    """Raise ValueError where there is nothing to measure on."""
    if not context.evaluation:
        raise ValueError("this needs an evaluation: give a text to measure on (--evaluation).")


def _possible(
    context: RunContext, chosen: Mapping[str, GradProbeConfig], known: Mapping[str, GradProbeConfig]
) -> dict[str, GradProbeConfig]:
    """What this model can be pruned with. A baseline that it cannot is left out; any other is an error."""
    _check_own(context, chosen, known)  # once more: a pattern may name only what the text does not reach
    possible = feasible(context, {name: other for name, other in chosen.items() if known.get(name) == other})
    found = {name: other for name, other in chosen.items() if name in possible or known.get(name) != other}
    if not found:
        raise ValueError("this model can be pruned in none of these ways; the log says why.")
    return found


def _check_own(
    context: RunContext, chosen: Mapping[str, GradProbeConfig], known: Mapping[str, GradProbeConfig]
) -> None:
    """Raise ValueError for a configuration, no baseline, that this model cannot be pruned with."""
    for name, other in chosen.items():
        if known.get(name) != other:
            check_targets(context.model, context.targets, other)


def _check_text(name: str, config: GradProbeConfig, common: GradProbeConfig) -> None:
    for option in _SHARED:
        if getattr(config, option) != getattr(common, option):
            raise ValueError(
                f"{name!r} has {option}={getattr(config, option)!r} and the others {getattr(common, option)!r}: a "
                "comparison is made on the same text and matrices."
            )
