"""The configuration refuses what cannot hold, and says what would."""

from __future__ import annotations

import dataclasses

import pytest

from gradprobe_hf import GradProbeConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": 1.0}, r"fraction in \[0, 1\).*got 1.0"),
        ({"sparsity": -0.1}, "got -0.1"),
        ({"sparsity": 50}, "got 50"),
        ({"sparsity": float("nan")}, "got nan"),
        ({"sparsity": "half"}, "got 'half'"),
        ({"strategy": "movement"}, "'fisher', 'wanda', 'magnitude', 'random', 'sparsegpt', got 'movement'"),
        ({"decision": "both"}, "got 'both'"),
        ({"scope": "layer"}, "got 'layer'"),
        ({"fisher": "full"}, "got 'full'"),
        ({"pattern": "4:2"}, "0 < n < m"),
        ({"pattern": "dense"}, "got 'dense'"),
        ({"pattern": "2:4", "sparsity": 0.6}, "contradicts pattern='2:4'"),
        ({"pattern": "2:4", "scope": "row"}, "leave scope unset"),
        ({"pattern": "2:4", "decision": "threshold"}, "would not hold"),
        ({"pattern": "1:300"}, "m <= 256"),
        ({"include": 5}, "got 5"),
        ({"reduction_factor": 1.0}, "got 1.0"),
        ({"gradient_threshold": -0.5}, "got -0.5"),
        ({"num_samples": 0}, "whole number >= 1, got 0"),
        ({"batch_size": 2.5}, "got 2.5"),
        ({"sequence_length": 1}, ">= 2, got 1"),
        ({"include": ["re:("]}, "not a regular expression"),
        ({"exclude": [3]}, "got 3"),
    ],
)
def test_a_bad_value_is_refused_with_the_value(options, message):
    with pytest.raises(ValueError, match=message):
        GradProbeConfig(**options)


def test_a_pattern_sets_the_sparsity():
    assert GradProbeConfig(pattern="2:4").sparsity == 0.5
    assert GradProbeConfig(pattern="1:4").sparsity == 0.75
    assert GradProbeConfig(pattern="1:4", sparsity=0.75).group == (1, 4)


def test_scopes_follow_the_strategy_unless_given():
    assert GradProbeConfig(strategy="wanda").candidate_scope == "row"
    assert GradProbeConfig(strategy="wanda").decision_scope == "global"
    assert GradProbeConfig(strategy="wanda", decision="none").decision_scope == "row"
    assert GradProbeConfig(strategy="wanda", scope="block").candidate_scope == "block"


def test_it_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        GradProbeConfig().sparsity = 0.1


def test_round_trips(tmp_path):
    config = GradProbeConfig(pattern="2:4", include=["q_proj", "re:mlp"], seed=7, strategy="wanda")
    assert GradProbeConfig.from_dict(config.to_dict()) == config
    config.to_yaml(tmp_path / "c.yaml")
    assert GradProbeConfig.from_yaml(tmp_path / "c.yaml") == config
    config.save_pretrained(tmp_path / "model")
    assert (tmp_path / "model" / "gradprobe_config.json").is_file()
    assert GradProbeConfig.from_pretrained(tmp_path / "model") == config


def test_yaml_means_what_it_looks_like(tmp_path):
    """YAML 1.1 would read 2:4 as 124, and 1e-3 as text."""
    (tmp_path / "c.yaml").write_text("pattern: 2:4\ngradient_threshold: 1e-3\nseed: 12\n")
    config = GradProbeConfig.from_yaml(tmp_path / "c.yaml")
    assert (config.pattern, config.gradient_threshold, config.seed) == ("2:4", 1e-3, 12)


def test_an_unknown_option_names_its_neighbour(tmp_path):
    with pytest.raises(ValueError, match="did you mean 'sparsity'"):
        GradProbeConfig.from_dict({"sparsty": 0.5})
    (tmp_path / "list.yaml").write_text("- sparsity")
    with pytest.raises(ValueError, match="mapping of options"):
        GradProbeConfig.from_yaml(tmp_path / "list.yaml")
    (tmp_path / "broken.yaml").write_text("a: [")
    with pytest.raises(ValueError, match="not valid YAML"):
        GradProbeConfig.from_yaml(tmp_path / "broken.yaml")


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"preset": "fast"}, {"strategy": "fisher", "decision": "none", "reconstruction": "none"}),
        ({"preset": "balanced"}, {"strategy": "fisher", "decision": "path", "reconstruction": "none"}),
        ({"preset": "best"}, {"strategy": "fisher", "decision": "none", "reconstruction": "admm"}),
        ({"preset": "fast", "pattern": "2:4"}, {"strategy": "sparsegpt", "reconstruction": "none"}),
        ({"preset": "balanced", "pattern": "2:4"}, {"strategy": "sparsegpt", "reconstruction": "admm"}),
        ({"preset": "best", "pattern": "2:4"}, {"strategy": "fisher", "decision": "none", "reconstruction": "admm"}),
        ({"pattern": "2:4"}, {"strategy": "fisher", "decision": "none", "reconstruction": "admm"}),
        ({"pattern": "2:4", "reconstruction": "none"}, {"decision": "path", "reconstruction": "none"}),
        ({"pattern": "2:4", "decision": "path"}, {"strategy": "fisher", "reconstruction": "none"}),
        ({"pattern": "2:4", "strategy": "wanda"}, {"decision": "path", "reconstruction": "none"}),
        ({"pattern": "2:4", "strategy": "sparsegpt"}, {"decision": "none", "reconstruction": "none"}),
        (
            {"preset": "balanced", "pattern": "2:4", "strategy": "sparsegpt"},
            {"decision": "none", "reconstruction": "admm"},
        ),
        ({"preset": "balanced", "strategy": "sparsegpt"}, {"decision": "none", "reconstruction": "none"}),
        ({"preset": "best", "strategy": "sparsegpt"}, {"decision": "none", "reconstruction": "admm"}),
        ({"preset": "best", "reconstruction": "none"}, {"decision": "none", "reconstruction": "none"}),
        ({"preset": "best", "decision": "path"}, {"decision": "path", "reconstruction": "admm"}),
        ({"preset": "fast", "decision": "path"}, {"decision": "path"}),
        ({"preset": "best", "pattern": "2:4", "strategy": "wanda"}, {"decision": "none", "reconstruction": "admm"}),
        ({}, {"strategy": "fisher", "decision": "path", "reconstruction": "none", "dense_target": None}),
        ({"strategy": "sparsegpt"}, {"decision": "none", "dense_target": 0.0}),
        ({"reconstruction": "admm"}, {"decision": "path", "dense_target": 0.25}),
        ({"reconstruction": "obs"}, {"decision": "path", "dense_target": 0.5}),
        ({"strategy": "sparsegpt", "reconstruction": "least_squares"}, {"decision": "none", "dense_target": 0.25}),
    ],
)
def test_a_preset_is_what_is_not_given(given, wanted):
    config = GradProbeConfig(**given)
    assert {name: getattr(config, name) for name in wanted} == wanted
    assert GradProbeConfig.from_dict(config.to_dict()) == config
