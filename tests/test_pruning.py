"""The whole pipeline on every family: exact, repeatable, and harmless when it fails."""

from __future__ import annotations

import re
from itertools import cycle

import pytest
import torch

from gradprobe_hf import prune_pretrained
from gradprobe_hf.checkpoint import destination, result
from gradprobe_hf.checkpoint.inspect import pattern_holds
from gradprobe_hf.evaluation import divergence
from gradprobe_hf.evaluation.perplexity import measure
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.reconstruction.new_weights import NewWeights
from gradprobe_hf.report.warnings import advice_where_emptied
from gradprobe_hf.run import decide
from gradprobe_hf.run.apply import applied
from gradprobe_hf.run.probing import pair_masks, probe_pair
from gradprobe_hf.run.request import reading
from tests import cases


def prune(model, name, *, apply=True, batch_size=2, **options):
    return cases.prune(model, cases.batches(name, batch_size=batch_size), apply=apply, **options)


def zeros(model, targets):
    return sum(int((target.matrix(model) == 0).sum()) for target in targets)


@pytest.mark.parametrize("name", cases.CASES)
def test_every_family_is_pruned_exactly_and_only_where_it_should_be(name):
    model = cases.build(name)
    before = cases.bits(model)
    result = prune(model, name, sparsity=0.37, evaluation=cases.batches(name, seed=9))
    total = cases.CASES[name].targets
    assert result.report.zeros == zeros(model, result.targets) == round(0.37 * total)
    assert result.report.weights == total
    for target in result.targets:
        mask, weight = result.masks[target.name], target.matrix(model)
        stored = target.view(before[target.parameter])
        assert (weight[mask] == 0).all()
        assert torch.equal(weight[~mask], stored[~mask])
    allowed = {target.parameter for target in result.targets} | set(model.all_tied_weights_keys)
    assert set(cases.changed(model, before)) <= allowed
    assert result.report.evaluation["pruned"]["loss"] != result.report.evaluation["dense"]["loss"]


@pytest.mark.parametrize(
    ("scope", "score"),
    [
        ("global", "fisher"),
        ("block", "fisher"),
        ("row", "fisher"),
        ("block", "wanda"),
        ("tensor", "wanda"),
        ("global", "magnitude"),
        ("row", "magnitude"),
        ("tensor", "random"),
        ("global", "random"),
    ],
)
def test_the_budget_is_exact_in_every_unit(scope, score):
    probes = 1 if score == "fisher" else 0
    result = prune(cases.build("llama"), "llama", sparsity=0.43, scope=scope, score=score, probes=probes)
    sizes = {}
    for target in result.targets:
        mask = result.masks[target.name]
        if scope == "row":
            assert (mask.sum(1) == round(0.43 * target.shape[1])).all()
        key = {"global": "", "block": target.block}.get(scope, target.name)
        pruned, weights = sizes.get(key, (0, 0))
        sizes[key] = (pruned + int(mask.sum()), weights + target.numel)
    if scope != "row":
        assert all(pruned == round(0.43 * weights) for pruned, weights in sizes.values())


@pytest.mark.parametrize(
    ("pattern", "name", "probes"),
    [("2:4", "llama", 2), ("2:4", "gpt2", 1), ("4:8", "gpt2", 2), ("4:8", "llama", 1), ("1:4", "llama", 2)],
)
def test_a_pattern_holds_in_every_matrix(pattern, name, probes):
    model = cases.build(name)
    result = prune(model, name, pattern=pattern, probes=probes)
    n, m = map(int, pattern.split(":"))
    for target in result.targets:
        assert pattern_holds(target.matrix(model), n, m)
        assert result.masks[target.name].sum() == target.numel * (m - n) // m


def test_one_seed_one_mask_and_batching_changes_nothing():
    reference = prune(cases.build("llama", torch.float64), "llama").masks
    for batch_size in (2, 1, 3, 6):
        other = prune(cases.build("llama", torch.float64), "llama", batch_size=batch_size).masks
        assert not cases.differing(reference, other)


@pytest.mark.parametrize("score", ["fisher", "random"])
def test_two_runs_with_one_seed_give_identical_masks(score, text_file):
    def run(seed):
        text = {"num_samples": 4, "sequence_length": 16, "processing_class": cases.tokenizer()}
        return cases.prune(cases.build("llama"), str(text_file), score=score, seed=seed, **text).masks

    first, again, other = run(0), run(0), run(1)
    assert not cases.differing(first, again)
    assert cases.differing(first, other)


def test_apply_false_changes_nothing_and_measures_the_same():
    held_out = cases.batches("llama", seed=9)
    kept, changed = cases.build("llama"), cases.build("llama")
    before = cases.bits(kept)
    dry = prune(kept, "llama", apply=False, evaluation=held_out)
    wet = prune(changed, "llama", evaluation=held_out)
    assert cases.changed(kept, before) == []
    assert not cases.differing(dry.masks, wet.masks)
    assert dry.report.evaluation == wet.report.evaluation
    really = sum(measure(cases.workload(changed, [batch])).loss for batch in held_out) / len(held_out)
    assert really == pytest.approx(wet.report.evaluation["pruned"]["loss"], rel=1e-5)


def test_zeros_that_are_there_count_and_are_reported():
    model = cases.build("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[:5] = 0
    result = prune(model, "llama", sparsity=0.3)
    assert result.report.zeros == round(0.3 * result.report.weights)
    row = next(row for row in result.report.matrices if row.name == "model.layers.0.mlp.up_proj.weight")
    assert row.zeros_before == 5 * 16
    assert not result.report.warnings
    again = prune(model, "llama", sparsity=0.1)
    assert again.report.sparsity == pytest.approx(0.3, abs=1e-4)
    assert "held more zeros" in again.report.warnings[0]


def test_a_budget_is_what_the_search_has_chosen():
    """Not the most that it might have: a tenth is no "more zeros" than 0.7."""
    model = cases.build("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.up_proj.weight[:12] = 0
    values = iter([1.0])
    options = {"score": "magnitude", "sparsity": 0.7, "max_metric_drop": 0.0, "metric_fn": lambda _: next(values, 0.0)}
    nothing = cases.prune(model, None, evaluation=cases.batches("llama"), **options).report
    assert nothing.sparsity == 0.1
    assert not any("held more zeros" in warning for warning in nothing.warnings)
    assert any("nothing was pruned" in warning for warning in nothing.warnings)


def test_a_share_that_rows_round_down_is_told():
    """Of 16 inputs 3% are none."""
    found = cases.prune(cases.build("llama"), cases.batches("llama"), score="wanda", sparsity=0.03).report
    assert found.sparsity < 0.02
    assert f"rounds its share, and they are small: sparsity is {found.sparsity:.4%}, not 3.0000%" in found.warnings[0]
    assert not cases.prune(cases.build("llama"), cases.batches("llama"), score="wanda", sparsity=0.5).report.warnings


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"score": "wanda"},
        {"scope": "row"},
        {"update": "sparsegpt"},
        {"update": "sparsegpt+admm"},
        {"pattern": "2:4"},
        {"order": "sequential", "probes": 2},
        {"probes": 2, "rule": "threshold"},
        {"rounds": (0.2, 0.5)},
        {"max_metric_drop": 0.1},
    ],
)
def test_what_a_warning_advises_is_an_option(options):
    config = cases.config(**options)
    advised = dict(re.findall(r"(\w+)=('?[\w.]+)", advice_where_emptied(config)))
    values = {name: value.strip("'") if "'" in value else float(value) for name, value in advised.items()}
    assert ("max_matrix_sparsity" in values) == ("lower" not in advice_where_emptied(config))
    assert cases.config(**options | values).bounds == (None if not values else (0, values["max_matrix_sparsity"]))


def test_text_on_both_sides_is_pointed_out(text_file):
    options = {"num_samples": 40, "sequence_length": 16, "evaluation_samples": 1000, "score": "wanda"}
    text = {"evaluation": str(text_file), "processing_class": cases.tokenizer()}
    result = cases.prune(cases.build("llama"), str(text_file), **options, **text)
    assert "of the 1000 evaluation windows were also calibrated on" in result.report.warnings[0]


# Every stage, at each of the calls a run makes of it: where it is looked up, what else it takes to come there.
CALLS = {
    "load_batches": (reading, 2, {}),
    "observe_inputs": (probe_pair, 1, {"score": "wanda"}),
    "run_probe": (probe_pair, 2, {}),
    "select_masks": (pair_masks, 2, {}),
    "reconstruct": (decide, 1, {"update": "obs"}),
    "next_token_logits": (divergence, 2, {}),
    "write_checkpoint": (destination, 1, {}),
    "applied": (result, 1, {}),
}
MOMENTS = [(stage, call) for stage, (_, calls, _) in CALLS.items() for call in range(1, calls + 1)]
ERRORS = cycle([KeyboardInterrupt, RuntimeError, MemoryError])


@pytest.mark.parametrize(("stage", "call", "error"), [(*moment, next(ERRORS)) for moment in MOMENTS])
def test_a_failure_at_any_stage_leaves_the_model_and_the_disk_alone(
    stage, call, error, monkeypatch, tmp_path, text_file
):
    owner, _, options = CALLS[stage]
    real, calls = getattr(owner, stage), []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            raise error("on purpose")
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, stage, failing)
    model = cases.build("llama").train()
    before = cases.bits(model)
    text = {"num_samples": 4, "sequence_length": 16, "evaluation_samples": 2, "processing_class": cases.tokenizer()}
    with pytest.raises(error, match="on purpose"):
        cases.prune(
            model, str(text_file), evaluation="pydoc", apply=True, output_dir=tmp_path / "out", **text, **options
        )
    assert cases.changed(model, before) == []
    assert model.training
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert list(tmp_path.iterdir()) == []


class Interrupted(dict):
    """Masks that cannot be had any more once half of the model is zero; asked again, they are there."""

    def __init__(self, model, targets):
        super().__init__({target.name: torch.ones(target.shape, dtype=torch.bool) for target in targets})
        self.model, self.first, self.last, self.raised = model, targets[: len(targets) // 2], targets[-1], False

    def __getitem__(self, name):
        if not self.raised and all(not target.matrix(self.model).any() for target in self.first):
            assert self.last.matrix(self.model).any(), "in the middle"
            self.raised = True
            raise KeyboardInterrupt("half-way through")
        return super().__getitem__(name)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_an_interrupt_while_weights_are_zeroed_gives_them_back(name):
    model = cases.build(name)
    targets, before = find_targets(model), cases.bits(model)
    masks = Interrupted(model, targets)
    with pytest.raises(KeyboardInterrupt, match="half-way"), applied(model, targets, masks):
        raise AssertionError("not reached")
    assert masks.raised
    assert cases.changed(model, before) == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_while_new_weights_are_written_gives_the_old_ones_back(when, monkeypatch):
    """Just before a matrix changes places with its new values, or just after."""
    model = cases.build("llama")
    targets, before = find_targets(model), cases.bits(model)
    new_weights = NewWeights()
    for target in targets:
        new_weights.add(target.name, torch.full(target.shape, 7.0))
    real, written = NewWeights.install, []

    def failing(self, name, matrix):
        fails = len(written) == len(targets) // 2
        if not fails or when == "after":
            real(self, name, matrix)
        written.append(name)
        if fails:
            raise KeyboardInterrupt("half-way through")

    monkeypatch.setattr(NewWeights, "install", failing)
    masks = {target.name: torch.zeros(target.shape, dtype=torch.bool) for target in targets}
    with (
        pytest.raises(KeyboardInterrupt, match="half-way"),
        applied(model, targets, masks, new_weights=new_weights),
    ):
        raise AssertionError("not reached")
    assert len(written) == len(targets) // 2 + 1
    assert cases.changed(model, before) == []
    assert all((new_weights[target.name] == 7).all() for target in targets), "they can be installed again"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"calibration": ["short"]}, "full windows"),
        ({"config": cases.config(pattern="3:16")}, "not divisible by 16"),
        ({"config": cases.config(include=["nothing"])}, "matches no prunable module"),
        ({"push_to_hub": True}, "push_to_hub=True names the repository after output_dir"),
        ({"dtype": "bfloat16"}, "is loaded already"),
    ],
)
def test_wrong_input_is_refused_before_any_pass(arguments, message, monkeypatch):
    monkeypatch.setattr(probe_pair, "run_probe", lambda *_, **__: pytest.fail("work began"))
    config = arguments.pop("config", cases.config(num_samples=4, sequence_length=16))
    with pytest.raises(ValueError, match=message):
        prune_pretrained(cases.build("llama"), config, processing_class=cases.tokenizer(), progress=False, **arguments)


def test_something_that_is_no_model_is_refused():
    with pytest.raises(ValueError, match="got int"):
        prune_pretrained(3)
