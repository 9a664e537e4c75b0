"""The configuration refuses what cannot hold, says what would, and forgets nothing."""

from __future__ import annotations

import dataclasses
from itertools import product

import numpy as np
import pytest

from gradprobe_hf import GradProbeConfig, RecoveryConfig
from gradprobe_hf.config.presets import PRESETS, PRESETS_IN_GROUPS
from gradprobe_hf.config.together import BELONGS
from gradprobe_hf.config.values import PROBES
from gradprobe_hf.decisions.table import DECISIONS, RULES
from gradprobe_hf.scores.table import SCORES
from gradprobe_hf.updates.table import UPDATES

METHODS = list(product([None, *SCORES], [None, *PROBES], [None, *RULES], [None, *UPDATES]))


def made(score, probes, rule, update, **options):
    """The configuration; None where these do not go together."""
    try:
        return GradProbeConfig(score=score, probes=probes, rule=rule, update=update, **options)
    except ValueError:
        return None


VALID = {method: config for method in METHODS if (config := made(*method)) is not None}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        # the target
        ({"sparsity": 1.0}, r"fraction in \[0, 1\).*got 1.0"),
        ({"sparsity": -0.1}, "got -0.1"),
        ({"sparsity": 50}, "got 50"),
        ({"sparsity": float("nan")}, "got nan"),
        ({"sparsity": "half"}, "got 'half'"),
        ({"sparsity": True}, "got True"),
        ({"pattern": "4:2"}, "0 < n < m"),
        ({"pattern": "dense"}, "got 'dense'"),
        ({"pattern": 24}, "got 24"),
        ({"pattern": "1:300"}, "m <= 256"),
        ({"pattern": "2:4", "sparsity": 0.6}, "contradicts pattern='2:4'"),
        ({"preset": "quick"}, "preset must be one of 'fast', 'balanced', 'best', got 'quick'"),
        # the method
        ({"score": "movement"}, "'fisher', 'wanda', 'magnitude', 'random', got 'movement'"),
        ({"score": "sparsegpt"}, "score must be one of"),
        ({"rule": "both"}, "rule must be one of 'budget', 'threshold', got 'both'"),
        ({"update": "none of these"}, "update must be one of 'none', 'obs', .*'sparsegpt', .* got 'none of these'"),
        ({"probes": 3}, "probes must be one of 0, 1, 2, got 3"),
        ({"probes": True}, "got True"),
        ({"score": "fisher", "probes": 0}, "score='fisher' is measured by a probe: set probes=1 or probes=2"),
        ({"probes": 0}, "score='fisher' is measured by a probe"),
        ({"score": "wanda", "probes": 1}, "score='wanda' takes no probe: set probes=0 .* or probes=2"),
        ({"rule": "threshold", "probes": 1}, "rule='threshold' needs probes=2, got probes=1"),
        ({"rule": "threshold", "score": "wanda", "probes": 0}, "needs probes=2, got probes=0"),
        ({"scope": "layer"}, "got 'layer'"),
        ({"pattern": "2:4", "scope": "row"}, "leave scope unset"),
        ({"update": "sparsegpt", "scope": "row"}, "update='sparsegpt' spends its budget over scope='tensor'"),
        ({"fisher": "full"}, "got 'full'"),
        ({"dense_target": 1.2, "update": "obs"}, r"dense_target must be a fraction in \[0, 1\], got 1.2"),
        ({"damping": 0, "update": "obs"}, "damping must be a number > 0, or 'auto', got 0"),
        ({"reduction_factor": 1.0}, "got 1.0"),
        ({"spike_limit": -1}, "spike_limit must be a factor >= 0"),
        ({"gradient_threshold": -0.5}, "got -0.5"),
        ({"gradient_threshold": "auto"}, "or 'adaptive', got 'auto'"),
        ({"gradient_threshold": {"mlp": -1}}, r"gradient_threshold\['mlp'\] must be"),
        ({"gradient_threshold": {}}, "got {}"),
        # bounds
        ({"min_matrix_sparsity": "0.1"}, "min_matrix_sparsity must be"),
        ({"max_matrix_sparsity": 0.4}, r"got 0 and 0.4"),
        ({"min_matrix_sparsity": 0.7}, r"got 0.7 and 1"),
        ({"min_matrix_sparsity": 0.3, "rounds": (0.2, 0.5)}, r"<= the first of rounds \(0.2\).*got 0.3 and 1"),
        ({"max_matrix_sparsity": 0.9, "scope": "row"}, "scope='row' prunes every matrix alike"),
        ({"max_matrix_sparsity": 0.9, "score": "wanda"}, "scope='row' prunes every matrix alike"),
        ({"max_matrix_sparsity": 0.9, "pattern": "2:4"}, "pattern='2:4' prunes every matrix alike"),
        # in which steps
        ({"order": "random"}, "order must be"),
        ({"order": "sequential", "probes": 1}, "set probes=2, got probes=1"),
        ({"order": "sequential", "score": "wanda"}, "set probes=2, got probes=0"),
        ({"order": "sequential", "update": "sparsegpt"}, "set probes=2, got probes=0"),
        ({"order": "sequential", "rounds": (0.2, 0.5)}, "decides about every block once"),
        ({"order": "sequential", "max_metric_drop": 1}, "decides about every block once"),
        ({"order": "sequential", "block_order": "random"}, "block_order must be one of"),
        ({"blocks_per_step": 0}, "blocks_per_step must be a whole number >= 1, got 0"),
        ({"rounds": (0.5, 0.2)}, "must rise"),
        ({"rounds": (0.5, 0.5)}, "must rise"),
        ({"rounds": 0.5}, "must be a list of sparsities"),
        ({"rounds": (0.2, 0.5), "sparsity": 0.6}, r"not the last of rounds"),
        ({"rounds": (0.2, 1.0)}, r"fractions in \(0, 1\), got 1.0"),
        ({"rounds": (0.2, 0.5), "score": "wanda"}, "makes no probe"),
        ({"rounds": (0.2, 0.5), "pattern": "2:4", "probes": 2}, "one sparsity only"),
        ({"max_metric_drop": 1, "initial_sparsity": 0.6}, r"initial_sparsity must be .* \[0, 0.5\], got 0.6"),
        ({"sparsity_step": -3}, "sparsity_step must be"),
        ({"max_metric_drop": 1, "sparsity_step": 0}, "sparsity_step must be"),
        ({"pattern": "2:4", "max_metric_drop": 0.1}, "one sparsity only"),
        ({"max_metric_drop": "five"}, "a share like '5%', got 'five'"),
        ({"max_metric_drop": -1}, "got -1"),
        ({"max_metric_drop": 1, "rounds": (0.1, 0.5)}, "leave rounds unset"),
        # text, matrices and memory
        ({"include": 5}, "got 5"),
        ({"include": ["re:("]}, "not a regular expression"),
        ({"exclude": [3]}, "got 3"),
        ({"exclude": [""]}, "got ''"),
        ({"num_samples": 0}, "whole number >= 1, got 0"),
        ({"num_samples": True}, "got True"),
        ({"evaluation_samples": 0}, "got 0"),
        ({"batch_size": 2.5}, "batch_size must be 'auto', or a whole number >= 1, got 2.5"),
        ({"batch_size": "most"}, "got 'most'"),
        ({"sequence_length": 1}, ">= 2, got 1"),
        ({"seed": -1}, "seed must be a whole number >= 0, got -1"),
        ({"save_every": 0}, "save_every must be a whole number >= 1, got 0"),
        ({"checkpointing": "on"}, "checkpointing must be True, False or 'auto', got 'on'"),
        ({"accumulator_dtype": "float16"}, "got 'float16'"),
        ({"accumulator_device": "cuda"}, "got 'cuda'"),
    ],
    ids=str,
)
def test_a_bad_value_is_refused_with_the_value(options, message):
    with pytest.raises(ValueError, match=message):
        GradProbeConfig(**options)


# A value of each option that a row refuses, other than its default, and what else it needs to be valid elsewhere.
GIVEN = {
    "score": "wanda",
    "probes": 2,
    "rule": "threshold",
    "pattern": "2:4",
    "min_matrix_sparsity": 0.1,
    "max_matrix_sparsity": 0.9,
    "rounds": (0.2, 0.5),
    "max_metric_drop": 0.1,
    "structure": {"ffn": 0.3},
}
REFUSALS = [
    *(({"score": name}, other, why) for name, row in SCORES.items() for other, why in row.refuses.items()),
    *(({"rule": row.rule}, other, why) for row in DECISIONS.values() for other, why in row.refuses.items()),
    *(({"update": name}, other, why) for name, row in UPDATES.items() for other, why in row.refuses.items()),
]


@pytest.mark.parametrize(("method", "other", "why"), REFUSALS, ids=str)
def test_what_a_row_refuses_is_refused_and_named(method, other, why):
    GradProbeConfig(**method)
    GradProbeConfig(**{other: GIVEN[other]})
    ((option, value),) = method.items()
    with pytest.raises(ValueError, match="cannot be combined with") as raised:
        GradProbeConfig(**method, **{other: GIVEN[other]})
    said = str(raised.value)
    assert f"{option}={value!r}" in said
    assert f"{other}={GIVEN[other]!r}" in said
    assert why.format(option=other) in said
    # Whoever asks for whole structures means those.
    assert f"leave {option if other == 'structure' else other} unset" in said


def test_the_rows_refuse_something():
    assert {tuple(method) for method, _, _ in REFUSALS} >= {("rule",), ("update",)}
    assert len(REFUSALS) >= 20


# A value of each option that belongs to a part of the method, where that part is, and where it is not.
OWNED = {
    "fisher": ("token", {"score": "wanda", "probes": 2}, {"score": "wanda"}),
    "gradient_threshold": (0.5, {"rule": "threshold"}, {}),
    "reduction_factor": (0.5, {"score": "random", "probes": 2}, {"probes": 1}),
    "spike_limit": (0.5, {"probes": 2}, {"rule": "threshold"}),
    "importance": ("fisher", {"structure": {"ffn": 0.3}}, {"structure": {"blocks": 1}}),
    "structure_rounds": (3, {"structure": {"experts": 2}}, {"structure": {"kv_groups": 1}}),
    "measure_speed": (True, {"structure": {"blocks": 1}}, {}),
    "dense_target": (0.75, {"score": "random", "update": "least_squares"}, {"probes": 2}),
    "damping": (0.5, {"update": "sparsegpt"}, {"score": "wanda"}),
    "checkpointing": (True, {}, {"score": "magnitude"}),
    "accumulator_dtype": ("int8", {}, {"score": "wanda"}),
    "accumulator_device": ("disk", {"score": "wanda", "probes": 2}, {"update": "sparsegpt"}),
    "recovery_learning_rate": (1e-3, {"recovery_steps": 5}, {}),
    "block_order": ("size", {"order": "sequential"}, {}),
    "blocks_per_step": (2, {"order": "sequential"}, {}),
    "evaluation_samples": (7, {}, {"evaluation_protocol": "paper"}),
    "initial_sparsity": (0.25, {"max_metric_drop": 1}, {"rounds": (0.2, 0.5)}),
    "sparsity_step": (0.25, {"max_metric_drop": 1}, {}),
    "document_separator": ("eos", {}, {"packing": False}),
}


def test_every_option_that_belongs_to_a_part_is_tried():
    assert set(OWNED) == set(BELONGS)


@pytest.mark.parametrize("name", OWNED)
def test_an_option_without_effect_names_what_it_belongs_to(name):
    value, where, elsewhere = OWNED[name]
    assert getattr(GradProbeConfig(**where, **{name: value}), name) == value
    with pytest.raises(ValueError, match="has no effect here: it belongs to") as raised:
        GradProbeConfig(**elsewhere, **{name: value})
    said = str(raised.value)
    assert f"{name}={value!r}" in said
    assert BELONGS[name][1] in said
    assert f"leave {name} unset" in said
    # Its default is what nothing was given: no error
    GradProbeConfig(**elsewhere, **{name: GradProbeConfig.__dataclass_fields__[name].default})


@pytest.mark.parametrize("of", [{}, {"pattern": "2:4"}, {"rounds": (0.1, 0.3)}], ids=str)
@pytest.mark.parametrize("to", [{"pattern": "1:4"}, {"rounds": (0.2, 0.6)}, {"structure": {"ffn": 0.3}}], ids=str)
def test_a_budget_that_nobody_named_gives_way_to_another(of, to):
    unset = {name: GradProbeConfig.defaults()[name] for name in of}
    assert GradProbeConfig(**of).varied(**unset | to) == GradProbeConfig(**to)
    with pytest.raises(ValueError, match=r"sparsity=0\.7.* unset"):
        GradProbeConfig(sparsity=0.7).varied(**to)


@pytest.mark.parametrize("value", [5, ["label"]])
def test_a_column_of_labels_has_a_name(value):
    with pytest.raises(ValueError, match="label_column must be the name of a column, got "):
        GradProbeConfig(label_column=value)


@pytest.mark.parametrize("name", OWNED)
def test_a_variation_drops_what_no_longer_applies_and_keeps_the_rest(name):
    value, where, elsewhere = OWNED[name]
    config = GradProbeConfig(**where, **{name: value}, seed=3, text_column="body", num_samples=7)
    same = config.varied(seed=4)
    assert getattr(same, name) == value
    assert same == dataclasses.replace(config, seed=4)
    cleared = {option: GradProbeConfig.__dataclass_fields__[option].default for option in where}
    if "update" in cleared:
        cleared["update"] = "none"
    plain = GradProbeConfig(**elsewhere)
    found = config.varied(
        **cleared | {"score": plain.score, "probes": plain.probes, "rule": plain.rule} | {"sparsity": None} | elsewhere
    )
    assert getattr(found, name) == getattr(plain, name)
    assert (found.seed, found.text_column, found.num_samples) == (3, "body", 7)


@pytest.mark.parametrize("pattern", ["unstructured", "2:4"])
@pytest.mark.parametrize("to", ["fast", "balanced", "best"])
@pytest.mark.parametrize("of", ["fast", "balanced", "best"])
def test_a_variation_of_the_preset_is_that_preset(of, to, pattern):
    """And not the method that the first one came to, under the name of another."""
    config = GradProbeConfig(preset=of, seed=3, pattern=pattern)
    assert config.varied(preset=to) == GradProbeConfig(preset=to, seed=3, pattern=pattern)
    chosen = GradProbeConfig(preset=of, score="magnitude", update="obs")
    assert chosen.varied(preset=to) == GradProbeConfig(preset=to, score="magnitude", update="obs")


@pytest.mark.parametrize("pattern", ["unstructured", "2:4"])
@pytest.mark.parametrize("to", ["fast", "balanced", "best"])
@pytest.mark.parametrize("of", [None, "fast", "balanced", "best"])
def test_so_is_one_of_what_was_read_from_a_file(of, to, pattern):
    """Where all that the preset came to stands beside it."""
    config = GradProbeConfig(preset=of, seed=3, pattern=pattern)
    read = GradProbeConfig.from_dict(config.to_dict())
    assert read == config
    assert read.varied(preset=to) == GradProbeConfig(preset=to, seed=3, pattern=pattern)
    assert read.varied(preset=to).varied(preset=of or "best") == config.varied(preset=of or "best")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"preset": "best", "update": "none"}, "fast"),
        ({"preset": "best", "probes": 2, "update": "none"}, "balanced"),
        ({"preset": "balanced", "probes": 1, "update": "admm"}, "best"),
        ({"preset": "best", "probes": 2}, None),
        ({"preset": "fast", "update": "obs"}, None),
        ({"preset": "fast", "pattern": "2:4", "update": "sparsegpt+admm"}, "balanced"),
        ({"preset": "fast", "pattern": "2:4", "score": "fisher"}, None),
        ({"preset": "fast", "score": "fisher"}, "fast"),
    ],
    ids=str,
)
def test_a_preset_is_what_the_method_is_called(options, name):
    """What is given beside it makes another method of it, which goes by its own name, if it has one."""
    config = GradProbeConfig(**options)
    assert config.preset == name
    assert GradProbeConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("config", [{"preset": "best"}, {}, {"preset": "balanced", "pattern": "2:4"}], ids=str)
def test_a_preset_beside_the_whole_of_another_method_is_an_error(config):
    """It ran the method that was there, under the name that was asked for."""
    config = GradProbeConfig(**config)
    for made in (
        lambda: dataclasses.replace(config, preset="fast"),
        lambda: GradProbeConfig.from_dict(config.to_dict() | {"preset": "fast"}),
    ):
        with pytest.raises(ValueError, match=r"preset='fast' has no effect beside score=.* which is another method"):
            made()


@pytest.mark.parametrize("change", [{"update": "obs"}, {"pattern": "2:4"}, {"probes": 1, "update": "none"}], ids=str)
def test_a_variation_of_the_method_has_no_name_of_the_earlier_one(change):
    assert GradProbeConfig(preset="balanced").varied(**change).preset is None


def test_a_variation_is_never_refused_for_what_was_set_before():
    """Every method after every other: what the new one has no use for is dropped, not complained of."""
    everything = {"fisher": "token", "reduction_factor": 0.5, "spike_limit": 0.5, "damping": 0.5, "dense_target": 0.75}
    owned = {name: has_effect for name, (has_effect, _) in BELONGS.items()}
    plain = list({config.to_dict().__repr__(): config for config in VALID.values()}.values())
    for config in plain:
        rich = config.varied(**{name: value for name, value in everything.items() if owned[name](config)})
        for other in plain:
            method = {name: getattr(other, name) for name in ("score", "probes", "rule", "update")}
            found = rich.varied(**method, dense_target=None)
            assert {name: getattr(found, name) for name in method} == method
            for name in ("fisher", "reduction_factor", "spike_limit", "damping"):
                kept = owned[name](config) and owned[name](other)
                assert getattr(found, name) == (everything[name] if kept else getattr(other, name))


def test_a_pattern_sets_the_sparsity():
    assert GradProbeConfig(pattern="2:4").sparsity == 0.5
    assert GradProbeConfig(pattern="1:4").sparsity == 0.75
    assert GradProbeConfig(pattern="1:4", sparsity=0.75).group == (1, 4)


@pytest.mark.parametrize(
    ("options", "candidates", "budget"),
    [
        ({}, "global", "global"),
        ({"probes": 1}, "global", "global"),
        ({"score": "wanda"}, "row", "row"),
        ({"score": "magnitude"}, "tensor", "tensor"),
        ({"score": "random"}, "tensor", "tensor"),
        ({"score": "wanda", "probes": 2}, "row", "global"),
        ({"score": "magnitude", "rule": "threshold"}, "tensor", "tensor"),
        ({"score": "wanda", "probes": 2, "scope": "block"}, "block", "block"),
        ({"update": "sparsegpt"}, "tensor", "tensor"),
        ({"update": "sparsegpt+admm", "scope": "tensor"}, "tensor", "tensor"),
    ],
    ids=str,
)
def test_scopes_follow_the_method_unless_given(options, candidates, budget):
    config = GradProbeConfig(**options)
    assert (config.candidate_scope, config.budget_scope) == (candidates, budget)


def test_it_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        GradProbeConfig().sparsity = 0.1


def test_round_trips(tmp_path):
    config = GradProbeConfig(pattern="2:4", include=["q_proj", "re:mlp"], seed=7, score="wanda", save_every=3)
    assert GradProbeConfig.from_dict(config.to_dict()) == config
    config.to_yaml(tmp_path / "c.yaml")
    assert GradProbeConfig.from_yaml(tmp_path / "c.yaml") == config
    config.save_pretrained(tmp_path / "model")
    assert (tmp_path / "model" / "gradprobe_config.json").is_file()
    assert GradProbeConfig.from_pretrained(tmp_path / "model") == config


def test_every_valid_method_round_trips():
    """And what is valid is what the tables say: 3 ways with Fisher, 3 with each other score, and each sweep alone."""
    resolved = {(c.score, c.probes, c.rule, c.update) for c in VALID.values()}
    kept_masks = [name for name, row in UPDATES.items() if not row.chooses_mask]
    others = [name for name in SCORES if name != "fisher"]
    wanted = {("fisher", 1, "budget", update) for update in kept_masks}
    wanted |= {(score, 0, "budget", update) for score in others for update in kept_masks}
    wanted |= {(score, 2, rule, update) for score in SCORES for rule in RULES for update in kept_masks}
    wanted |= {(None, 0, "budget", update) for update in UPDATES if update not in kept_masks}
    assert resolved == wanted
    for method in METHODS:
        for options in ({}, {"pattern": "2:4"}, {"preset": "balanced"}, {"preset": "best", "pattern": "2:4"}):
            config = made(*method, **options)
            if config is not None:
                again = GradProbeConfig.from_dict(config.to_dict())
                assert again == config
                assert again.to_dict() == config.to_dict()
                assert dataclasses.replace(config) == config


def test_numbers_of_numpy_are_numbers(tmp_path):
    """A sweep over `np.linspace` failed when the card was written, behind all the work."""
    given = {"dense_target": np.float64(0.3), "max_matrix_sparsity": np.float32(0.75), "num_samples": np.int64(8)}
    config = GradProbeConfig(update="admm", probes=1, rounds=[np.float64(0.25), 0.5], **given)
    config.to_yaml(tmp_path / "config.yaml")
    assert GradProbeConfig.from_yaml(tmp_path / "config.yaml") == config
    assert [type(getattr(config, name)) for name in given] == [float, float, int]
    assert type(config.rounds[0]) is float
    structure = GradProbeConfig(structure={"ffn": np.float64(0.25)})
    assert type(structure.structure["ffn"]) is float
    assert type(RecoveryConfig(learning_rate=np.float64(1e-4), steps=np.int32(3)).to_dict()["learning_rate"]) is float


def test_yaml_means_what_it_looks_like(tmp_path):
    """YAML 1.1 would read 2:4 as 124, and 1e-3 as text."""
    (tmp_path / "c.yaml").write_text("pattern: 2:4\nseed: 12\nupdate: obs\ndamping: 1e-3\n")
    config = GradProbeConfig.from_yaml(tmp_path / "c.yaml")
    assert (config.pattern, config.damping, config.seed) == ("2:4", 1e-3, 12)


def test_an_unknown_option_names_its_neighbour(tmp_path):
    with pytest.raises(ValueError, match="did you mean 'sparsity'"):
        GradProbeConfig.from_dict({"sparsty": 0.5})
    with pytest.raises(ValueError, match="it is called score here"):
        GradProbeConfig.from_dict({"strategy": "wanda"})
    (tmp_path / "list.yaml").write_text("- sparsity")
    with pytest.raises(ValueError, match="mapping of options"):
        GradProbeConfig.from_yaml(tmp_path / "list.yaml")
    (tmp_path / "broken.yaml").write_text("a: [")
    with pytest.raises(ValueError, match="not valid YAML"):
        GradProbeConfig.from_yaml(tmp_path / "broken.yaml")


FISHER_1 = {"score": "fisher", "probes": 1, "rule": "budget"}
FISHER_2 = {"score": "fisher", "probes": 2, "rule": "budget"}
OWN_MASK = {"score": None, "probes": 0, "rule": "budget"}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"preset": "fast"}, {**FISHER_1, "update": "none"}),
        ({"preset": "best", "score": "wanda"}, {"score": "wanda", "probes": 0, "rule": "budget", "update": "admm"}),
        ({"preset": "balanced"}, {**FISHER_2, "update": "none"}),
        ({"preset": "best"}, {**FISHER_1, "update": "admm"}),
        ({"preset": "fast", "pattern": "2:4"}, {**OWN_MASK, "update": "sparsegpt"}),
        ({"preset": "balanced", "pattern": "2:4"}, {**OWN_MASK, "update": "sparsegpt+admm"}),
        ({"preset": "best", "pattern": "2:4"}, {**FISHER_1, "update": "admm"}),
        ({"pattern": "2:4"}, {**FISHER_1, "update": "admm"}),
        # one option of the method is given: then an n:m pattern decides nothing about the others
        ({"pattern": "2:4", "update": "none"}, {**FISHER_2, "update": "none"}),
        ({"pattern": "2:4", "probes": 2}, {**FISHER_2, "update": "none"}),
        ({"pattern": "2:4", "score": "wanda"}, {"score": "wanda", "probes": 0, "update": "none"}),
        ({"pattern": "2:4", "update": "sparsegpt"}, {**OWN_MASK, "update": "sparsegpt"}),
        ({"preset": "fast", "pattern": "2:4", "score": "fisher"}, {**FISHER_1, "update": "none"}),
        ({"preset": "balanced", "pattern": "2:4", "update": "sparsegpt"}, {**OWN_MASK, "update": "sparsegpt"}),
        # what is given wins over a preset
        ({"preset": "balanced", "update": "sparsegpt"}, {**OWN_MASK, "update": "sparsegpt"}),
        ({"preset": "best", "update": "sparsegpt+admm"}, {**OWN_MASK, "update": "sparsegpt+admm"}),
        ({"preset": "best", "update": "none"}, {**FISHER_1, "update": "none"}),
        ({"preset": "best", "probes": 2}, {**FISHER_2, "update": "admm"}),
        ({"preset": "fast", "probes": 2}, {**FISHER_2, "update": "none"}),
        ({"preset": "balanced", "score": "wanda"}, {"score": "wanda", "probes": 2, "update": "none"}),
        ({"preset": "best", "score": "wanda", "probes": 0}, {"score": "wanda", "probes": 0, "update": "admm"}),
        # defaults
        ({}, {**FISHER_1, "update": "admm", "dense_target": 0.25}),
        ({"rounds": (0.2, 0.5)}, {**FISHER_1, "update": "admm"}),
        ({"max_metric_drop": 1}, {**FISHER_1, "update": "admm"}),
        ({"scope": "row"}, {**FISHER_1, "update": "admm"}),
        ({"dense_target": 0.5}, {**FISHER_1, "update": "admm", "dense_target": 0.5}),
        # what two probes alone have a use for is not given in vain
        ({"order": "sequential"}, {**FISHER_2, "update": "none", "dense_target": None}),
        ({"reduction_factor": 0.5}, {**FISHER_2, "update": "none"}),
        ({"spike_limit": 0.0}, {**FISHER_2, "update": "none"}),
        # one option of the method is given: then all say what they say
        ({"probes": 2}, {**FISHER_2, "update": "none"}),
        ({"probes": 1}, {**FISHER_1, "update": "none"}),
        ({"score": "fisher"}, {**FISHER_2, "update": "none"}),
        ({"update": "none"}, {**FISHER_2, "update": "none"}),
        ({"score": "wanda"}, {"score": "wanda", "probes": 0, "rule": "budget"}),
        ({"score": "magnitude"}, {"score": "magnitude", "probes": 0, "rule": "budget"}),
        ({"score": "random"}, {"score": "random", "probes": 0, "rule": "budget"}),
        ({"rule": "threshold"}, {"score": "fisher", "probes": 2, "rule": "threshold"}),
        ({"rule": "threshold", "score": "wanda"}, {"score": "wanda", "probes": 2}),
        ({"update": "sparsegpt"}, {**OWN_MASK, "dense_target": 0.0}),
        ({"update": "admm"}, {**FISHER_2, "dense_target": 0.25}),
        ({"update": "least_squares"}, {**FISHER_2, "dense_target": 0.25}),
        ({"update": "obs"}, {**FISHER_2, "dense_target": 0.25}),
        ({"update": "obs", "dense_target": 0.0}, {**FISHER_2, "dense_target": 0.0}),
        ({"update": "sparsegpt+least_squares"}, {**OWN_MASK, "dense_target": 0.25}),
    ],
    ids=str,
)
def test_a_preset_is_what_is_not_given(given, wanted):
    config = GradProbeConfig(**given)
    assert {name: getattr(config, name) for name in wanted} == wanted
    assert GradProbeConfig.from_dict(config.to_dict()) == config


def test_a_preset_is_short_for_its_options():
    for pattern, presets in (("unstructured", PRESETS), ("1:4", PRESETS_IN_GROUPS)):
        for name, options in presets.items():
            short, long = GradProbeConfig(preset=name, pattern=pattern), GradProbeConfig(pattern=pattern, **options)
            assert dataclasses.replace(short, preset=None) == long
