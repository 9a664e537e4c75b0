"""Together: which options cannot be combined, and which have no effect without others.

What an option may be by itself is in `values.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from gradprobe_hf.config.derived import ResolvedOptions
from gradprobe_hf.config.presets import METHOD
from gradprobe_hf.runtime.option_checks import number
from gradprobe_hf.tasks.table import TASKS

# Options of one part of a method -> whether that part is there, and what it is.
BELONGS: dict[str, tuple[Callable[[ResolvedOptions], bool], str]] = {
    "fisher": (lambda c: c.uses_fisher, "score='fisher', or probes=2 with rule='budget'"),
    "gradient_threshold": (lambda c: c.decision_row.filters is not None, "rule='threshold'"),
    "reduction_factor": (lambda c: c.decision_row.has_second_probe, "probes=2"),
    "spike_limit": (lambda c: c.decision_row.limits_spikes, "probes=2 with rule='budget'"),
    "dense_target": (lambda c: c.updates, "a weight update (update='admm', ...)"),
    "importance": (lambda c: c.weighs_units, "structure={'ffn': ...} or structure={'kv_groups': ...}"),
    "structure_rounds": (
        lambda c: bool(c.in_rounds),
        "channels by importance='fisher' or 'taylor', heads by one of these, and experts",
    ),
    "measure_speed": (lambda c: c.structure is not None, "structure"),
    "damping": (lambda c: c.updates or c.weighs_inputs, "a weight update (update='admm', ...)"),
    "recovery_learning_rate": (lambda c: c.recovery_steps > 0, "recovery_steps"),
    "block_order": (lambda c: c.order == "sequential", "order='sequential'"),
    "document_separator": (lambda c: c.packing, "packing=True"),
    "blocks_per_step": (lambda c: c.order == "sequential", "order='sequential'"),
    "evaluation_samples": (lambda c: c.evaluation_protocol == "windows", "evaluation_protocol='windows'"),
    "checkpointing": (
        lambda c: c.needs.probes,
        "a probe (score='fisher', probes=2, importance='fisher', or experts that go)",
    ),
    "accumulator_dtype": (lambda c: c.needs.accumulates, "a probe of weights (score='fisher', or probes=2)"),
    "accumulator_device": (lambda c: c.needs.accumulates, "a probe of weights (score='fisher', or probes=2)"),
    "initial_sparsity": (lambda c: c.max_metric_drop is not None, "max_metric_drop"),
    "sparsity_step": (lambda c: c.max_metric_drop is not None, "max_metric_drop"),
}


def check_together(config: ResolvedOptions) -> None:
    """Raise ValueError for options that contradict each other, or that would be accepted and change nothing."""
    _check_rows(config)
    check_task(config.task, config.label_column, config.metric)
    _check_scope(config)
    _check_bounds(config)
    _check_schedule(config)
    _check_effect(config)


def refusal(config: ResolvedOptions, option: str, other: str, why: str) -> str:
    return (
        f"{option}={getattr(config, option)!r} cannot be combined with {other}={getattr(config, other)!r}: "
        f"{why.format(option=other)}"
    )


def _check_rows(config: ResolvedOptions) -> None:
    """What each row of the method says it cannot be combined with."""
    defaults = config.defaults()
    rows = {"score": config.score_row, "rule": config.decision_row, "update": config.update_row}
    for option, row in rows.items():
        for other, why in (row.refuses if row else {}).items():
            if other not in METHOD and getattr(config, other) != defaults[other]:
                # Of what goes whole the row is no part at all.
                unset = option if other == "structure" else other
                raise ValueError(f"{refusal(config, option, other, why)}; leave {unset} unset.")


def check_task(task: str | None, label_column: str | None, metric: str | None) -> None:
    """Raise ValueError for a metric that is none of the task's, or a column of labels that it does not read."""
    if label_column is not None and not isinstance(label_column, str):
        raise ValueError(f"label_column must be the name of a column, got {label_column!r}.")
    if task is None:
        return
    first = TASKS[task][0]
    if metric is not None:
        first.metric(metric)
    if label_column is not None and not first.labels:
        raise ValueError(
            f"label_column={label_column!r} has no effect here: task={task!r} reads no labels. Leave label_column "
            "unset."
        )


def _check_scope(config: ResolvedOptions) -> None:
    if config.scope is None:
        return
    if config.group is not None:
        raise ValueError(
            f"scope={config.scope!r} cannot hold with pattern={config.pattern!r}, which spends its budget in every "
            "group of inputs; leave scope unset."
        )
    if config.update_row.chooses_mask and config.scope != config.update_row.scope:
        raise ValueError(
            f"update={config.update!r} spends its budget over scope={config.update_row.scope!r}, not over "
            f"scope={config.scope!r}; leave scope unset."
        )


def _check_bounds(config: ResolvedOptions) -> None:
    if config.bounds is None:
        return
    low, high = config.bounds
    least, most = min(config.rounds or (config.final_sparsity,)), config.final_sparsity
    between = f"sparsity ({most:g})" if least == most else f"the first of rounds ({least:g}), the last ({most:g})"
    wanted = f"0 <= min_matrix_sparsity <= {between} <= max_matrix_sparsity <= 1"
    if not 0 <= low <= least <= most <= high <= 1:
        raise ValueError(f"a budget between the bounds needs {wanted}, got {low:g} and {high:g}.")
    if config.group is not None or config.budget_scope not in ("global", "block"):
        spent = f"pattern={config.pattern!r}" if config.group else f"scope={config.budget_scope!r}"
        raise ValueError(f"{spent} prunes every matrix alike: bounds on matrices are for 'global' and 'block'.")


def _check_schedule(config: ResolvedOptions) -> None:
    if config.initial_sparsity is not None and config.max_metric_drop is not None:
        most = config.final_sparsity
        number("initial_sparsity", config.initial_sparsity, f"a fraction in [0, {most:g}]", lambda x: 0 <= x <= most)
    several = "rounds" if config.rounds else "max_metric_drop" if config.max_metric_drop is not None else None
    if config.rounds and config.max_metric_drop is not None:
        raise ValueError("max_metric_drop makes rounds of its own; leave rounds unset.")
    if config.order == "sequential" and not config.decision_row.has_second_probe:
        raise ValueError(
            f"order='sequential' probes one step of blocks after the other: set probes=2, got probes={config.probes}."
        )
    if several is None:
        return
    if config.order == "sequential":
        raise ValueError(
            f"{several}={getattr(config, several)!r} is for order='joint': a sequential order decides about every "
            "block once."
        )
    if config.group is not None:
        raise ValueError(f"pattern={config.pattern!r} has one sparsity only; leave {several} unset.")
    if config.rounds and not config.needs.probes:
        raise ValueError(
            f"rounds={config.rounds!r} probe again at every sparsity, and score={config.score!r} makes no probe."
        )


def _check_effect(config: ResolvedOptions) -> None:
    """Refuse options that would be accepted and change nothing."""
    if config.holds_out and not config.update_row.chooses_damping:
        raise ValueError(
            f"damping='auto' is chosen by update='least_squares', got update={config.update!r}: set that, or a number."
        )
    defaults = config.defaults()
    for name, (has_effect, belongs_to) in BELONGS.items():
        if getattr(config, name) != defaults[name] and not has_effect(config):
            raise ValueError(
                f"{name}={getattr(config, name)!r} has no effect here: it belongs to {belongs_to}. Set that, or "
                f"leave {name} unset."
            )
