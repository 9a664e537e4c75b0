"""Presets: the methods that are worth having a name, and which is taken where none is asked for."""

from __future__ import annotations

from typing import Any, Literal

Preset = Literal["fast", "balanced", "best"]

# The options that a preset stands for.
METHOD = ("score", "probes", "rule", "update")
# One probe, a second, and one with a revised mask. The second is there because no kept weight changes; in time and
# perplexity alone SparseGPT with ADMM is ahead of it on the calibration's kind of text: see docs/method.md.
PRESETS: dict[Preset, dict[str, Any]] = {
    "fast": {"probes": 1},
    "balanced": {"probes": 2},
    "best": {"probes": 1, "update": "admm"},  # ADMM decides again what a second probe would
}
# Inside small groups there is no budget to spend elsewhere, and what the kept weights can make up for counts for more
# than which of them go.
PRESETS_IN_GROUPS: dict[Preset, dict[str, Any]] = {
    "fast": {"update": "sparsegpt"},
    "balanced": {"update": "sparsegpt+admm"},
    "best": {"probes": 1, "update": "admm"},
}
# What nothing that is given speaks against: the best for its time, by benchmarks/results/wikitext.json.
DEFAULT_PRESET: Preset = "best"
DEFAULT_OF_TWO_PROBES: Preset = "balanced"
# Options that only two probes have a use for: who gives one of these gets them, in place of an error.
OF_TWO_PROBES = ("order", "reduction_factor", "spike_limit")
