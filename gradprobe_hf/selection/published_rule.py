"""The published rule's thresholds: how much a gradient may grow in each matrix before its weights are given back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gradprobe_hf.config.values import GradientThreshold
from gradprobe_hf.model.targets import Target, matches


def thresholds(targets: Sequence[Target], gradient_threshold: GradientThreshold) -> list[float]:
    """The threshold of each target, a factor of growth minus 1.

    Args:
        gradient_threshold: one number for all; name pattern -> number; or `"adaptive"`: `sqrt(numel / mean numel)`, so
            that larger matrices tolerate more.

    Raises:
        ValueError: a target that no pattern names, or a pattern that names no target.
    """
    if gradient_threshold == "adaptive":
        mean = sum(target.numel for target in targets) / len(targets)
        return [math.sqrt(target.numel / mean) for target in targets]
    if isinstance(gradient_threshold, (int, float)):
        return [float(gradient_threshold)] * len(targets)
    assert isinstance(gradient_threshold, Mapping), "checked by the configuration"
    found, used = [], set()
    for target in targets:
        names = [target.name, *(site.module for site in target.sites)]
        hits = [pattern for pattern in gradient_threshold if any(matches(pattern, name) for name in names)]
        if not hits:
            raise ValueError(
                f"gradient_threshold has no pattern for {target.name}; add one, or '*' as the last for all the rest."
            )
        used.add(hits[0])  # the first match wins, so that '*' can stand last
        found.append(float(gradient_threshold[hits[0]]))
    if unused := [pattern for pattern in gradient_threshold if pattern not in used]:
        raise ValueError(
            f"gradient_threshold pattern {unused[0]!r} decides about no matrix: none matches it, or an earlier "
            "pattern matches the same ones."
        )
    return found
