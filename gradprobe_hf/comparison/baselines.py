"""Baselines: what a configuration is compared with, and what configurations can share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.config.presets import METHOD
from gradprobe_hf.scores.terms import Term
from gradprobe_hf.structures.unit_scores import UNIT_SCORES

# The published ways first, then what this package adds.
BASELINES: dict[str, dict[str, Any]] = {
    "magnitude": {"score": "magnitude", "probes": 0},
    "wanda": {"score": "wanda", "probes": 0},
    "sparsegpt": {"score": None, "probes": None, "update": "sparsegpt"},
    "one probe": {"score": "fisher", "probes": 1},
    "two probes": {"score": "fisher", "probes": 2},
    "one probe + admm": {"score": "fisher", "probes": 1, "update": "admm"},
}
# The same of whole structures: each way to tell which units go, changing nothing else, and what makes up for them.
_CUT: dict[str, Any] = {"update": "none", "damping": GradProbeConfig.damping}
_MADE_UP = {"update": "least_squares"}
BASELINES_OF_UNITS: dict[str, dict[str, Any]] = {
    **{name: {"importance": name, **_CUT} for name in UNIT_SCORES},
    "least squares": {"importance": None, **_MADE_UP},
}
BASELINES_OF_THE_WHOLE: dict[str, dict[str, Any]] = {"cut": _CUT, "least squares": _MADE_UP}
AS_CONFIGURED = "as configured"  # the row of the configuration itself, where no baseline is the same
# A baseline is made as it was published: what else the configuration does is not done to it.
_PLAIN: dict[str, Any] = {
    "preset": None,
    "rule": "budget",
    "scope": None,
    "update": "none",
    "dense_target": None,
    "refinement": "none",
    "min_matrix_sparsity": None,
    "max_matrix_sparsity": None,
    "order": "joint",
    "rounds": (),
    "max_metric_drop": None,
    "initial_sparsity": None,
}
_PLAIN_STRUCTURE: dict[str, Any] = {"dense_target": None, "refinement": "none", "structure_rounds": 1}


def baselines(config: GradProbeConfig) -> dict[str, GradProbeConfig]:
    """The configurations to compare `config` with: at its sparsity, pattern or structure, on its text and matrices."""
    if config.structure is not None:
        rows = BASELINES_OF_UNITS if config.weighs_units else BASELINES_OF_THE_WHOLE
        return {name: config.varied(**_PLAIN_STRUCTURE | options) for name, options in rows.items()}
    return {name: config.varied(**{**_PLAIN, **options}) for name, options in BASELINES.items()}


def rows_of(config: GradProbeConfig) -> dict[str, GradProbeConfig]:
    """The baselines, and the configuration itself where it is none of them."""
    found = baselines(config)
    return found if config.varied(preset=None) in found.values() else {**found, AS_CONFIGURED: config}


def check_common(common: GradProbeConfig, rows: Mapping[str, GradProbeConfig]) -> None:
    """Raise ValueError for an option of what all rows have in common that none of them has."""
    of_rows = {*METHOD, *_PLAIN, "sparsity", "pattern"} - {"preset"}
    asked = common.given | set(METHOD) if "preset" in common.given else common.given
    for name in sorted(asked & of_rows):
        if all(getattr(row, name) != getattr(common, name) for row in rows.values()):
            raise ValueError(
                f"{name}={getattr(common, name)!r} has no effect here: none of the rows has it. Leave {name} unset, or "
                f"make a row with it (configs=; {AS_CONFIGURED!r} among --methods)."
            )


def most_demanding(configs: Sequence[GradProbeConfig]) -> GradProbeConfig:
    """The first that probes, if any does: what memory has to be planned for."""
    return next((config for config in configs if config.needs.probes), configs[0])


def shared_terms(configs: Sequence[GradProbeConfig]) -> frozenset[Term]:
    """What a first probe that serves all of them has to keep; nothing, where none would share it."""
    probing = [config.needs.terms for config in configs if config.needs.probes and config.structure is None]
    return frozenset().union(*probing) if len(probing) > 1 else frozenset()
