"""The whole pipeline on every family: exact, repeatable, and harmless when it fails."""

from __future__ import annotations

import gradprobe_hf.run.inputs as preparation
import gradprobe_hf.checkpoint.result as result_module
import gradprobe_hf.run.probe_pair as trial
import gradprobe_hf.run.decide as verdict
import pytest
import torch

import gradprobe_hf.pruning as pruning
from gradprobe_hf import GradProbeConfig, prune_pretrained
from gradprobe_hf.checkpoint.inspect import pattern_holds
from gradprobe_hf.model.targets import find_targets
from tests import cases


def prune(model, name, *, apply=True, batch_size=2, evaluation=False, **options):
    return prune_pretrained(
        model,
        GradProbeConfig(**options),
        calibration=cases.batches(name, batch_size=batch_size),
        evaluation=evaluation,
        apply=apply,
        progress=False,
    )


def zeros(model, targets):
    return sum(int((target.matrix(model) == 0).sum()) for target in targets)


@pytest.mark.parametrize("name", cases.CASES)
def test_every_family_is_pruned_exactly_and_only_where_it_should_be(name):
    model = cases.build(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    result = prune(model, name, sparsity=0.37, evaluation=cases.batches(name, seed=9))
    total = cases.CASES[name].targets
    assert result.report.zeros == zeros(model, result.targets) == round(0.37 * total)
    assert result.report.weights == total
    for target in result.targets:
        mask, weight = result.masks[target.name], target.matrix(model)
        stored = target.view(before[target.parameter])
        assert (weight[mask] == 0).all()
        assert torch.equal(weight[~mask], stored[~mask])
    untouched = set(before) - {target.parameter for target in result.targets} - set(model.all_tied_weights_keys)
    assert all(torch.equal(model.state_dict()[key], before[key]) for key in untouched)
    assert result.report.evaluation["pruned"]["loss"] != result.report.evaluation["dense"]["loss"]


@pytest.mark.parametrize("scope", ["global", "block", "tensor", "row"])
@pytest.mark.parametrize("strategy", ["fisher", "wanda", "magnitude", "random"])
def test_the_budget_is_exact_in_every_unit(scope, strategy):
    model = cases.build("llama")
    result = prune(model, "llama", sparsity=0.43, scope=scope, strategy=strategy, decision="none")
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


@pytest.mark.parametrize("pattern", ["2:4", "4:8", "1:4"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("decision", ["path", "none"])
def test_a_pattern_holds_in_every_matrix(pattern, name, decision):
    model = cases.build(name)
    result = prune(model, name, pattern=pattern, decision=decision)
    n, m = map(int, pattern.split(":"))
    for target in result.targets:
        assert pattern_holds(target.matrix(model), n, m)
        assert result.masks[target.name].sum() == target.numel * (m - n) // m


def test_one_seed_one_mask_and_batching_changes_nothing():
    reference = prune(cases.build("llama", torch.float64), "llama", sparsity=0.5)
    for batch_size in (2, 1, 3, 6):
        other = prune(cases.build("llama", torch.float64), "llama", sparsity=0.5, batch_size=batch_size)
        assert all(torch.equal(mask, other.masks[name]) for name, mask in reference.masks.items())


@pytest.mark.parametrize("strategy", ["fisher", "random"])
def test_two_runs_with_one_seed_give_identical_masks(strategy, text_file):
    def run(seed):
        config = GradProbeConfig(
            sparsity=0.5,
            strategy=strategy,
            num_samples=4,
            sequence_length=16,
            seed=seed,
            decision="none" if strategy == "random" else "path",
        )
        return prune_pretrained(
            cases.build("llama"),
            config,
            calibration=str(text_file),
            evaluation=False,
            processing_class=cases.tokenizer(),
            progress=False,
        ).masks

    first, again, other = run(0), run(0), run(1)
    assert all(torch.equal(mask, again[name]) for name, mask in first.items())
    assert any(not torch.equal(mask, other[name]) for name, mask in first.items())


def test_apply_false_changes_nothing_and_measures_the_same(text_file):
    held_out = cases.batches("llama", seed=9)
    kept, changed = cases.build("llama"), cases.build("llama")
    before = {key: value.clone() for key, value in kept.state_dict().items()}
    dry = prune(kept, "llama", apply=False, evaluation=held_out)
    wet = prune(changed, "llama", evaluation=held_out)
    assert all(torch.equal(value, before[key]) for key, value in kept.state_dict().items())
    assert all(torch.equal(mask, wet.masks[name]) for name, mask in dry.masks.items())
    assert dry.report.evaluation == wet.report.evaluation
    with torch.no_grad():
        really = sum(float(pruning.measure(changed, [batch], progress=False).loss) for batch in held_out) / len(
            held_out
        )
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


def test_text_on_both_sides_is_pointed_out(text_file):
    config = GradProbeConfig(num_samples=40, sequence_length=16, evaluation_samples=1000)
    result = prune_pretrained(
        cases.build("llama"),
        config,
        calibration=str(text_file),
        evaluation=str(text_file),
        processing_class=cases.tokenizer(),
        progress=False,
    )
    assert "of the 1000 evaluation windows were also calibrated on" in result.report.warnings[0]


# Every stage, at each of the calls a run makes of it.
CALLS = {"load_batches": 2, "observe_inputs": 1, "run_probe": 2, "select_masks": 2, "measure": 2}
CALLS |= {"write_checkpoint": 1, "applied": 1}
MOMENTS = [(stage, call) for stage, calls in CALLS.items() for call in range(1, calls + 1)]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, MemoryError])
@pytest.mark.parametrize(("stage", "call"), MOMENTS)
def test_a_failure_at_any_stage_leaves_the_model_and_the_disk_alone(
    stage, call, error, monkeypatch, tmp_path, text_file
):
    owner = next(module for module in (pruning, preparation, trial, verdict, result_module) if hasattr(module, stage))
    real, calls = getattr(owner, stage), []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            raise error("on purpose")
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, stage, failing)
    model = cases.build("llama").train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    strategy = {"strategy": "wanda", "decision": "none"} if stage == "observe_inputs" else {}
    config = GradProbeConfig(num_samples=4, sequence_length=16, evaluation_samples=2, **strategy)

    with pytest.raises(error, match="on purpose"):
        prune_pretrained(
            model,
            config,
            calibration=str(text_file),
            evaluation="pydoc",
            processing_class=cases.tokenizer(),
            output_dir=tmp_path / "out",
            progress=False,
        )
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.training
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_while_weights_are_zeroed_gives_them_back():
    from gradprobe_hf.run.apply import applied

    model = cases.build("llama")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    targets = find_targets(model)
    masks = {target.name: torch.ones(target.shape, dtype=torch.bool) for target in targets}
    masks[targets[5].name] = torch.ones(3, 3, dtype=torch.bool)  # the sixth matrix fails half-way through
    with pytest.raises((RuntimeError, IndexError)), applied(model, targets, masks):
        raise AssertionError("not reached")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"calibration": ["short"]}, "full windows"),
        ({"config": GradProbeConfig(pattern="3:16")}, "not divisible by 16"),
        ({"config": GradProbeConfig(include=["nothing"])}, "matches no prunable module"),
        ({"push_to_hub": True}, "needs hub_model_id"),
        ({"dtype": "bfloat16"}, "is loaded already"),
    ],
)
def test_wrong_input_is_refused_before_any_pass(arguments, message, monkeypatch):
    monkeypatch.setattr(trial, "run_probe", lambda *_, **__: pytest.fail("work began"))
    config = arguments.pop("config", GradProbeConfig(num_samples=4, sequence_length=16))
    with pytest.raises(ValueError, match=message):
        prune_pretrained(cases.build("llama"), config, processing_class=cases.tokenizer(), progress=False, **arguments)


def test_something_that_is_no_model_is_refused():
    with pytest.raises(ValueError, match="got int"):
        prune_pretrained(3)
