"""Damping that is chosen on held-out batches: against ridge regressions written out, and in a run."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from gradprobe_hf import GradProbeConfig
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.reconstruction.hessians import BlockHessians
from gradprobe_hf.reconstruction.steps import held_rows
from gradprobe_hf.run.request import foreseen
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.scores.budget import Budget
from gradprobe_hf.updates.least_squares import DAMPINGS, held_out_damping, solve_least_squares
from gradprobe_hf.updates.problem import InputSums, MatrixProblem
from tests import cases


def texts(tokens, noise):
    """Inputs that have much in common, and the dense model's of the same tokens."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(4, 16, generator=generator, dtype=torch.float64)
    x = torch.randn(tokens, 4, generator=generator, dtype=torch.float64) @ mixing
    x += noise * torch.randn(tokens, 16, generator=generator, dtype=torch.float64)
    return x, x + 0.1 * torch.randn(tokens, 16, generator=generator, dtype=torch.float64)


def ridge_error(weight, mask, share, damping, fitted, held):
    """Of outputs of the held-out tokens, with weights fitted to the others row by row."""
    (x, dense), (other, other_dense), total = fitted, held, 0.0
    hessian = x.T @ x + damping * (x.T @ x).diagonal().mean() * torch.eye(16, dtype=torch.float64)
    for row, gone in zip(weight, mask, strict=True):
        kept = ~gone
        # Ridge towards the dense weights, to outputs a share of the way to the dense model's.
        wanted = (hessian @ row + share * ((dense - x) @ row) @ x)[kept]
        found = torch.zeros_like(row)
        found[kept] = torch.linalg.solve(hessian[kept][:, kept], wanted)
        goal = other @ row + share * ((other_dense - other) @ row)
        total += float((other @ found - goal).square().sum())
    return total


@pytest.mark.parametrize(("tokens", "noise", "share"), [(20, 1.0, 0.0), (20, 0.3, 0.25), (400, 0.3, 0.25)])
def test_it_is_the_one_that_serves_the_held_out_rows_best(tokens, noise, share):
    x, dense = texts(tokens, noise)
    weight = torch.randn(6, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mask = torch.zeros(6, 16, dtype=torch.bool)
    mask[:, [1, 4, 5, 9, 12]] = True
    fitted, held = (x[4:], dense[4:]), (x[:4], dense[:4])
    drift, its_drift = (dense - x).T @ x, (held[1] - held[0]).T @ held[0]
    of_held = InputSums(held[0].T @ held[0], its_drift, tokens=4)
    problem = MatrixProblem(weight, x.T @ x, drift, share, 0.01, Budget(0.0, "block"), held_out=of_held)
    errors = {damping: ridge_error(weight, mask, share, damping, fitted, held) for damping in DAMPINGS}
    best = min(errors, key=errors.get)
    assert held_out_damping(problem, mask) == best
    assert solve_least_squares(problem, mask).damping == best
    of_none = InputSums(torch.zeros_like(drift), None, tokens=0)
    none = MatrixProblem(weight, x.T @ x, drift, share, 0.02, Budget(0.0, "block"), held_out=of_none)
    assert held_out_damping(none, mask) == 0.02  # an expert that no held-out token was sent to


def test_held_out_sums_are_those_of_their_rows():
    """Of H, and of D where the dense model runs beside; without padding."""
    model = cases.build("llama")
    (target, *_) = cases.prune(model, cases.batches("llama"), sparsity=0.5, probes=1).targets
    collected = BlockHessians(model, Processes(), has_drift=True)
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    inputs, dense = torch.randn(2, 4, 2, 6, 16).unbind()
    for one, other, rows in zip(inputs, dense, held_rows([2, 2, 2, 2]), strict=True):
        batch = {"input_ids": torch.zeros(2, 6, dtype=torch.long), "attention_mask": mask}
        with collected.batch(batch, held_rows=rows):
            with collected.dense_pass():
                collected.add(target, target.sites[0], other)
            collected.add(target, target.sites[0], one)
    held, drift, tokens = collected.held_out(target)
    assert tokens == 4
    x, dense_x = inputs[3, 1, :4], dense[3, 1, :4]  # the eighth row, of which four tokens count
    torch.testing.assert_close(held, x.T @ x)
    torch.testing.assert_close(drift, (dense_x - x).T @ x)
    whole, counts = inputs.flatten(0, 2), mask.bool().repeat(4, 1).flatten()
    sums = collected.of(target)
    torch.testing.assert_close(sums.hessian, whole[counts].T @ whole[counts])
    assert sums.tokens == counts.sum()


def test_an_eighth_of_the_rows_is_held_out_however_they_are_batched():
    for counts in ([20], [4] * 5, [1] * 20, [3, 7, 10]):
        found = zip(counts, held_rows(counts), strict=True)
        flags = [flag for count, rows in found for flag in ([False] * count if rows is None else rows.tolist())]
        assert [number for number, flag in enumerate(flags) if flag] == [7, 15]
    assert held_rows([1]) == [None]
    assert [rows is not None for rows in held_rows([2, 2])] == [False, True]


def test_batches_have_no_part_in_it():
    found = []
    for batch_size in (1, 3, 8):
        text = cases.batches("llama", rows=8, batch_size=batch_size)
        model = cases.build("llama", torch.float64)
        found.append(cases.prune(model, structure={"ffn": 8}, calibration=text).new_weights)
    for name, values in found[0].items():
        for other in found[1:]:
            torch.testing.assert_close(other[name], values, rtol=1e-9, atol=1e-12)


def test_a_run_chooses_for_itself():
    options = {"structure": {"ffn": 8}, "calibration": cases.batches("llama", rows=8, batch_size=2)}
    found = [cases.prune(cases.build("llama"), damping=damping, **options) for damping in ("auto", 0.01, 1.0)]
    said = [" ".join(one.report.warnings) for one in found]
    assert ["num_samples, or damping='auto'" in one for one in said] == [False, True, True]
    name = "model.layers.1.mlp.down_proj.weight"
    values = [one.new_weights[name] for one in found]
    kept = ~found[0].masks[name]
    assert not torch.equal(values[0][kept], values[1][kept]) or not torch.equal(values[0][kept], values[2][kept])
    assert torch.equal(values[0] == 0, values[1] == 0)
    assert GradProbeConfig.from_dict(found[0].config.to_dict()) == found[0].config


def test_it_is_said_before_any_work(monkeypatch, caplog):
    """What text there is is known then; and nothing can be held out of one row."""
    monkeypatch.setattr("gradprobe_hf.pruning.decide_pruning", lambda *_: pytest.fail("work began"))
    few, one = cases.batches("llama", rows=8, batch_size=2), cases.batches("llama", rows=1, batch_size=1)
    for text, options, wanted in (
        (few, {"damping": 0.01}, "Give more num_samples, or damping='auto'"),
        (one, {}, "none can be held out to choose the damping by, and 0.01 is taken"),
    ):
        caplog.clear()
        with pytest.raises(pytest.fail.Exception):
            cases.prune(cases.build("llama"), structure={"ffn": 8}, calibration=text, **options)
        assert wanted in caplog.text


def test_enough_text_is_no_warning():
    text = cases.batches("llama", rows=80, batch_size=16)
    tokens = sum(batch["input_ids"].numel() for batch in text)
    assert tokens >= 10 * max(target.shape[1] for target in find_targets(cases.build("llama")))
    assert not cases.prune(cases.build("llama"), structure={"ffn": 8}, calibration=text).report.warnings


def test_fewer_tokens_than_inputs_are_told_where_weights_are_updated():
    model = cases.build("llama")
    inputs = max(target.shape[1] for target in find_targets(model))
    few = cases.batches("llama", rows=2, length=inputs // 2 - 1)
    said = f"has {inputs - 2} tokens, and `model.layers.0.mlp.down_proj.weight` {inputs} inputs: with fewer tokens than"
    for update, count in (("admm", 1), ("sparsegpt", 1), ("none", 0)):
        found = cases.prune(model, few, sparsity=0.5, update=update, apply=False).report.warnings
        assert sum(said in warning for warning in found) == count, update
    enough = cases.batches("llama", rows=2, length=inputs // 2)
    assert not cases.prune(model, enough, sparsity=0.5, update="obs", apply=False).report.warnings


def test_maps_that_see_are_not_told_by_tokens_of_text():
    """They have patches."""
    tower, text = (SimpleNamespace(name=name, shape=(4, width)) for name, width in (("vision_tower.0", 64), ("0", 8)))
    context = SimpleNamespace(
        config=GradProbeConfig(update="admm"),
        calibration=SimpleNamespace(tokens=10),
        model=SimpleNamespace(main_input_name="input_ids"),
        targets=[tower, text],
    )
    assert foreseen._about_tokens(context) == []
    text.shape = (4, 16)
    assert "`0` 16 inputs" in foreseen._about_tokens(context)[0]
    context.targets = [tower]
    assert foreseen._about_tokens(context) == []


def test_images_are_not_counted_as_tokens():
    assert not cases.prune(cases.build("vit"), structure={"ffn": 7}, calibration=cases.batches("vit")).report.warnings


def test_structures_take_it_unless_told_otherwise():
    whole = GradProbeConfig(structure={"ffn": 8})
    assert whole.damping == "auto"
    assert GradProbeConfig.from_dict(whole.to_dict()) == whole
    told = GradProbeConfig(structure={"ffn": 8}, damping=0.01)
    assert told.damping == GradProbeConfig.from_dict(told.to_dict()).damping == told.varied(seed=1).damping == 0.01
    assert GradProbeConfig(structure={"ffn": 8}, update="none").damping == GradProbeConfig().damping == 0.01
    assert whole.varied(update="none").damping == 0.01  # nobody asked for "auto", which is an error there
    assert whole.varied(seed=1).damping == "auto"


REFUSED = [
    ({"damping": "auto", "update": "admm"}, "damping='auto' is chosen by update='least_squares', got update='admm'"),
    ({"damping": "auto", "structure": {"ffn": 8}, "update": "none"}, "damping='auto'"),
    ({"damping": "much"}, "damping must be a number > 0, or 'auto', got 'much'"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=str)
def test_where_nothing_can_choose_it_it_is_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        GradProbeConfig(**options)
