"""Values: what each option may be by itself, whatever the others are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from gradprobe_hf.config.presets import Preset
from gradprobe_hf.decisions.table import RULES
from gradprobe_hf.runtime.option_checks import check_drop, number, one_of, whole
from gradprobe_hf.scores.budget import Scope
from gradprobe_hf.scores.fisher import FISHER_ESTIMATES
from gradprobe_hf.scores.table import SCORES
from gradprobe_hf.structures.unit_scores import UNIT_SCORES
from gradprobe_hf.tasks.metrics import METRICS
from gradprobe_hf.tasks.table import TASKS
from gradprobe_hf.updates.refinement import REFINEMENTS
from gradprobe_hf.updates.table import UPDATES

Order = Literal["joint", "sequential"]
BlockOrder = Literal["forward", "reverse", "size"]
GradientThreshold = float | Mapping[str, float] | Literal["adaptive"]
AccumulatorDtype = Literal["float32", "bfloat16", "int8"]
EvaluationProtocol = Literal["windows", "paper"]
AccumulatorDevice = Literal["same", "cpu", "disk"]
PLACES: tuple[AccumulatorDevice, ...] = get_args(AccumulatorDevice)  # the fastest first

PROBES = (0, 1, 2)
LARGEST_SEED = 2**63 - 1  # of torch's generators

CHOICES: dict[str, Sequence[Any] | Mapping[str, Any]] = {
    "preset": get_args(Preset),
    "score": SCORES,
    "probes": PROBES,
    "rule": RULES,
    "scope": get_args(Scope),
    "fisher": FISHER_ESTIMATES,
    "importance": UNIT_SCORES,
    "update": UPDATES,
    "refinement": REFINEMENTS,
    "order": get_args(Order),
    "block_order": get_args(BlockOrder),
    "task": TASKS,
    "metric": METRICS,
    "accumulator_dtype": get_args(AccumulatorDtype),
    "accumulator_device": ("auto", *PLACES),
    "evaluation_protocol": get_args(EvaluationProtocol),
}
SWITCHES = ("measure_speed",)  # those of texts are checked by `TextOptions`
WHOLE = {  # the least of each
    "num_samples": 1,
    "evaluation_samples": 1,
    "batch_size": 1,
    "save_every": 1,
    "sequence_length": 2,
    "seed": 0,
    "blocks_per_step": 1,
    "structure_rounds": 1,
    "recovery_steps": 0,
}
NUMBERS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "reduction_factor": ("a fraction in [0, 1)", lambda x: 0 <= x < 1),
    "spike_limit": ("a factor >= 0 (0: no limit)", lambda x: x >= 0),
    "dense_target": ("a fraction in [0, 1]", lambda x: 0 <= x <= 1),
    "damping": ("a number > 0, or 'auto'", lambda x: x > 0),
    "recovery_learning_rate": ("a number > 0, like 2e-4", lambda x: x > 0),
    "sparsity_step": ("a fraction in (0, 1)", lambda x: 0 < x < 1),
    "min_matrix_sparsity": ("a fraction in [0, 1]", lambda x: 0 <= x <= 1),
    "max_matrix_sparsity": ("a fraction in [0, 1]", lambda x: 0 <= x <= 1),
}


def check_values(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise ValueError for a value that is wrong by itself; None where that is the default stands for none given."""
    given = {name: value for name, value in values.items() if not (value is None and defaults[name] is None)}
    for name, choices in CHOICES.items():
        if name in given:
            one_of(name, given[name], tuple(choices))
    for name in SWITCHES:
        if not isinstance(values[name], bool):
            raise ValueError(f"{name} must be True or False, got {values[name]!r}.")
    if values["checkpointing"] != "auto" and not isinstance(values["checkpointing"], bool):
        raise ValueError(f"checkpointing must be True, False or 'auto', got {values['checkpointing']!r}.")
    for name, least in WHOLE.items():
        if name in given and not (name == "batch_size" and given[name] == "auto"):
            other = "'auto', or " if name == "batch_size" else ""
            whole(name, given[name], at_least=least, other=other)
    if values["seed"] > LARGEST_SEED:
        raise ValueError(f"seed must be at most {LARGEST_SEED}, got {values['seed']}.")
    for name, (wanted, holds) in NUMBERS.items():
        if name in given and not (name == "damping" and given[name] == "auto"):
            number(name, given[name], wanted, holds)
    if values["max_metric_drop"] is not None:
        check_drop(values["max_metric_drop"])
