"""Defaults: what the options that are not given come to beside those that are.

In this order: the preset; the method (score, probes, rule, update) or the structure; the sparsity. Each finds the ones
before it filled in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gradprobe_hf.config.derived import ResolvedOptions
from gradprobe_hf.config.presets import (
    DEFAULT_OF_TWO_PROBES,
    DEFAULT_PRESET,
    METHOD,
    OF_TWO_PROBES,
    PRESETS,
    PRESETS_IN_GROUPS,
    Preset,
)
from gradprobe_hf.config.together import refusal
from gradprobe_hf.decisions.table import DECISIONS
from gradprobe_hf.runtime.option_checks import number
from gradprobe_hf.scores.table import SCORES
from gradprobe_hf.structures.budgets import BUDGETS
from gradprobe_hf.structures.table import AUTO, checked
from gradprobe_hf.updates.table import UPDATES

# Options about single weights, which whole structures have no use for; and what those come to, with a structure.
NOT_OF_STRUCTURES = (
    *("sparsity", "pattern", "preset", "score", "probes", "rule", "scope", "fisher", "gradient_threshold"),
    *("min_matrix_sparsity", "max_matrix_sparsity", "reduction_factor", "spike_limit", "order", "block_order"),
    *("blocks_per_step", "rounds", "max_metric_drop", "initial_sparsity", "sparsity_step", "include", "exclude"),
)
OF_STRUCTURES: dict[str, Any] = {"sparsity": 0.0, "probes": 0, "rule": "budget"}


def fill_in(config: ResolvedOptions) -> None:
    """Set what is not given, in a configuration that is being made.

    Raises:
        ValueError: what is given contradicts itself.
    """
    _fill(config, _preset_values(config))
    if config.structure is not None:
        _resolve_structure(config)
    else:
        _refuse_budgets(config)
        _resolve_method(config)
        _rename_preset(config)
    _set(config, sparsity=_sparsity(config))
    if config.dense_target is None and config.updates:
        _set(config, dense_target=config.update_row.dense_target)


def _set(config: ResolvedOptions, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(config, name, value)  # frozen, for everybody but those who make it


def _fill(config: ResolvedOptions, values: Mapping[str, Any]) -> None:
    """Set those of the values that are not given."""
    _set(config, **{name: value for name, value in values.items() if getattr(config, name) is None})


def _preset_values(config: ResolvedOptions) -> dict[str, Any]:
    """What the preset comes to."""
    is_free = all(getattr(config, name) is None for name in METHOD) and config.structure is None
    preset = config.preset or (_default_preset(config) if is_free else None)
    if preset is None:
        return {}
    if config.group is not None and is_free:
        return PRESETS_IN_GROUPS[preset]
    values = dict(PRESETS[preset])
    chooses_mask = config.update is not None and UPDATES[config.update].chooses_mask
    scores_alone = config.score is not None and SCORES[config.score].measured != "gradients"
    # One probe is no choice where the update, or a score that needs none, is given.
    if chooses_mask or (scores_alone and values.get("probes") == 1):
        values.pop("probes", None)
    return values


def _default_preset(config: ResolvedOptions) -> Preset:
    defaults = config.defaults()
    two_probes = any(getattr(config, name) != defaults[name] for name in OF_TWO_PROBES)
    return DEFAULT_OF_TWO_PROBES if two_probes and config.group is None else DEFAULT_PRESET


def _resolve_method(config: ResolvedOptions) -> None:
    """Score, probes, rule and update, each as given or by default; only some go together."""
    _fill(config, {"update": "none"})
    if config.update_row.chooses_mask:
        for name, value in {"score": None, "probes": 0, "rule": "budget"}.items():
            if getattr(config, name) not in (None, value):
                raise ValueError(
                    f"{refusal(config, 'update', name, config.update_row.refuses[name])}; leave {name} unset."
                )
            _set(config, **{name: value})
        return
    _fill(config, {"score": "fisher", "rule": "budget"})
    score = SCORES[config.score or ""]
    known = {probes for row in DECISIONS.values() if row.rule == config.rule for probes in row.probes}
    _fill(config, {"probes": score.default_probes if score.default_probes in known else max(known)})
    if config.probes not in known:
        raise ValueError(f"rule={config.rule!r} needs probes={max(known)}, got probes={config.probes}.")
    if score.measured == "gradients" and config.probes == 0:
        raise ValueError(f"score={config.score!r} is measured by a probe: set probes=1 or probes=2, got probes=0.")
    if score.measured != "gradients" and config.probes == 1:
        raise ValueError(
            f"score={config.score!r} takes no probe: set probes=0 to prune by it alone, or probes=2 to decide about "
            "its candidates by two probes, got probes=1."
        )


def _rename_preset(config: ResolvedOptions) -> None:
    """Let `preset` be what the method is called: what was given beside it may have made another of it, or none.

    Raises:
        ValueError: the whole method was given, and is not the preset's, so that the preset would change nothing.
    """
    if config.preset is None or not config.given & set(METHOD):
        return

    def is_called(preset: Preset) -> bool:
        plain = type(config)(preset=preset, pattern=config.pattern)
        return all(getattr(plain, name) == getattr(config, name) for name in METHOD)

    if is_called(config.preset):
        return
    if all(name in config.given or getattr(config, name) is None for name in METHOD):
        given = ", ".join(f"{name}={getattr(config, name)!r}" for name in METHOD)
        raise ValueError(
            f"preset={config.preset!r} has no effect beside {given}, which is another method: leave preset unset, or "
            f"those four. Of a configuration that is there, varied(preset={config.preset!r}) makes that preset's."
        )
    _set(config, preset=next((preset for preset in PRESETS if is_called(preset)), None))


def _resolve_structure(config: ResolvedOptions) -> None:
    """Whole structures go: no weight has a score or a budget."""
    assert config.structure is not None
    _set(config, structure=checked(config.structure))
    if config.shape_budget is None:
        _refuse_budgets(config)
    defaults = config.defaults()
    for name in NOT_OF_STRUCTURES:
        value = getattr(config, name)
        if value not in (defaults[name], OF_STRUCTURES.get(name, defaults[name])):
            again = ", and prune the smaller checkpoint once more: zeros go on top" * (name in ("sparsity", "pattern"))
            raise ValueError(
                f"{refusal(config, 'structure', name, 'it says itself how much goes, and of what')}; leave {name} "
                f"unset{again}."
            )
    _fill(config, {"update": "least_squares"})
    _set(config, **OF_STRUCTURES)
    if "damping" not in config.given and config.update_row.chooses_damping:
        _set(config, damping=AUTO)


def _refuse_budgets(config: ResolvedOptions) -> None:
    """What a model may be left with is asked of `structure="auto"` alone."""
    for name in BUDGETS:
        value = getattr(config, name)
        if value is not None and config.structure is None:
            raise ValueError(
                f"{name}={value!r} has no effect here: it belongs to structure='auto'. Set that, or leave {name} unset."
            )
        if value is not None:
            raise ValueError(
                f"{refusal(config, 'structure', name, 'it says itself how much goes')}; leave {name} unset, or set "
                "structure='auto'."
            )


def _sparsity(config: ResolvedOptions) -> float:
    """As given, or as the rounds, the structure or the pattern imply."""
    given = config.sparsity
    if config.rounds:
        if given not in (None, config.rounds[-1]):
            raise ValueError(f"sparsity={given} is not the last of rounds={tuple(config.rounds)}; leave it unset.")
        return config.rounds[-1]
    if config.structure is not None:
        return 0.0
    implied = None if config.group is None else 1 - config.group[0] / config.group[1]
    if given is None:
        return 0.5 if implied is None else implied
    number("sparsity", given, "a fraction in [0, 1), 0.5 for half of the weights", lambda x: 0 <= x < 1)
    if implied is not None and not math.isclose(given, implied):
        raise ValueError(
            f"sparsity={given} contradicts pattern={config.pattern!r}, which prunes exactly {implied:g} of the "
            "weights; leave sparsity unset."
        )
    return float(given)
