"""What may be asked of a sweep of thresholds; everything else is refused before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.config.values import GradientThreshold

# The method of every row.
METHOD: dict[str, Any] = {"probes": 2, "rule": "threshold", "update": "none"}


def checked_thresholds(thresholds: Any, config: GradProbeConfig) -> list[GradientThreshold]:
    if isinstance(thresholds, str) or not isinstance(thresholds, Sequence):
        raise TypeError(f"thresholds must be a list of thresholds, like [0.1, 0.5], got {thresholds!r}.")
    wanted = [replace(config, gradient_threshold=one).gradient_threshold for one in thresholds]
    if not wanted:
        raise ValueError("thresholds is empty: there is nothing to try.")
    return wanted


def checked_sparsities(sparsities: Any, config: GradProbeConfig) -> list[float]:
    """Each one that a configuration may have."""
    if sparsities is None:
        return [config.final_sparsity]
    if isinstance(sparsities, str) or not isinstance(sparsities, Sequence) or not sparsities:
        raise TypeError(f"sparsities must be a list of them, like [0.3, 0.5], got {sparsities!r}.")
    if "sparsity" in config.given:
        raise ValueError(
            f"sparsity={config.sparsity!r} has no part in a sweep with sparsities={list(sparsities)!r}: leave it unset."
        )
    return [config.varied(sparsity=one).final_sparsity for one in sparsities]


def check_in_turn(wanted: Sequence[GradientThreshold], max_metric_drop: float | str | None) -> None:
    """Raise ValueError for what cannot be chosen block by block."""
    if max_metric_drop is None:
        raise ValueError(
            "order='sequential' has no part in a sweep without max_metric_drop, by which thresholds are chosen block "
            "by block: set that, or leave order unset."
        )
    for one in wanted:
        if not isinstance(one, (int, float)):
            raise ValueError(f"order='sequential' chooses numbers, one for each block: leave out {one!r}.")


def threshold_rule(config: GradProbeConfig) -> GradProbeConfig:
    """The configuration with the method of every row.

    Raises:
        ValueError: another method was asked for.
    """
    of_preset = "preset" in config.given
    for name, value in METHOD.items():
        if (of_preset or name in config.given) and getattr(config, name) != value:
            option = "preset" if of_preset and (config.preset or name not in config.given) else name
            stands_for = f"preset={config.preset!r}, which is " if config.preset else ""
            raise ValueError(
                f"{stands_for}{name}={getattr(config, name)!r} has no part in a sweep of thresholds, which is of two "
                f"probes and changes no kept weight: leave {option} unset, or set {name}={value!r}."
            )
    if "gradient_threshold" in config.given and config.rule == "threshold":
        raise ValueError(
            f"gradient_threshold={config.gradient_threshold!r} has no part in a sweep, which takes thresholds=: leave "
            "it unset."
        )
    return config.varied(**METHOD, preset=None)
