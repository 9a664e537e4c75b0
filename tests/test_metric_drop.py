"""Searching for the largest sparsity that keeps a promise about a metric (`max_metric_drop`)."""

from __future__ import annotations

import pytest
import torch

from gradprobe_hf.decisions.search import allowed
from gradprobe_hf.model.loss import summed_loss
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.run import probe_pair
from tests import cases


def text(seed=0):
    return cases.batches("llama", rows=4, batch_size=2, seed=seed)


def searched(model, *, evaluation=None, **options):
    return cases.prune(model, text(), evaluation=text(3) if evaluation is None else evaluation, **options)


def test_the_search_keeps_its_promise_and_goes_as_far_as_it_can(monkeypatch):
    calls = []
    real = probe_pair.run_probe
    monkeypatch.setattr(probe_pair, "run_probe", lambda *args, **kwargs: calls.append(1) or real(*args, **kwargs))
    model = cases.build("llama")
    wanted = searched(model, sparsity=0.0).report.evaluation["dense"]["perplexity"]
    calls.clear()
    result = searched(model, sparsity=0.9, max_metric_drop="0.2%", sparsity_step=0.3)
    curve = result.report.curve
    assert result.report.evaluation["pruned"]["perplexity"] <= 1.002 * wanted
    kept = max((point for point in curve if point["within"]), key=lambda point: point["sparsity"])
    broken = min((point for point in curve if not point["within"]), key=lambda point: point["sparsity"])
    assert result.report.sparsity == pytest.approx(kept["sparsity"], abs=1e-3)
    assert broken["metric"] > 1.002 * wanted
    assert 0 < broken["sparsity"] - kept["sparsity"] <= 0.005
    assert [point["sparsity"] for point in curve if point["probed"]] == [0.3, 0.6, 0.9][: len(calls) // 2]
    assert len(calls) < 2 * len(curve), "bisection makes no probe"


def test_a_metric_of_ones_own_is_to_stay_high():
    """A made-up accuracy that falls with every zero: the promise is kept to the resolution of the bisection."""
    model = cases.build("llama")
    targets = find_targets(model)

    def accuracy(model):
        """Of the outputs, to see the weights as they are served."""
        zeros = sum(int((target_seen(model, target) == 0).sum()) for target in targets)
        return 1 - zeros / sum(target.numel for target in targets)

    result = searched(model, sparsity=0.8, max_metric_drop=0.4, metric_fn=accuracy)
    assert 0.395 <= result.report.sparsity <= 0.4
    for point in result.report.curve:  # as it was measured, not as it is searched
        assert point["metric"] == pytest.approx(1 - point["sparsity"], abs=1e-3)
        assert point["limit"] == pytest.approx(0.6)
        assert point["within"] == (point["metric"] >= point["limit"])


def test_a_metric_is_of_the_model_as_it_predicts():
    model, seen = cases.build("gpt2").train(), []

    def accuracy(model):
        seen.append(model.training)
        return 1.0

    batches = cases.batches("gpt2", rows=4, batch_size=2)
    cases.prune(model, batches, sparsity=0.1, max_metric_drop=0.1, metric_fn=accuracy)
    assert seen == [False, False]
    assert model.training


def test_an_attempt_whose_loss_is_no_number_went_too_far():
    model = cases.build("llama")
    target = find_targets(model)[0]

    def loss(model, batch):
        found = summed_loss(model, batch)[0]
        broken = not torch.is_grad_enabled() and bool((target_seen(model, target) == 0).float().mean() > 0.3)
        return found * float("nan") if broken else found

    result = searched(model, sparsity=0.9, sparsity_step=0.2, max_metric_drop=1e9, loss_fn=loss)
    assert any(point["metric"] != point["metric"] and not point["within"] for point in result.report.curve)
    assert 0.1 < result.report.sparsity < 0.6


def target_seen(model, target):
    """The matrix as its module serves it: what it makes of the unit vectors."""
    module = model.get_submodule(target.sites[0].module)
    return module(torch.eye(target.shape[1]).unsqueeze(0))[0].t()


def test_a_drop_that_allows_everything_ends_at_the_sparsity_asked_for():
    result = searched(cases.build("llama"), sparsity=0.35, max_metric_drop=1e9)
    assert result.report.sparsity == pytest.approx(0.35, abs=1e-3)
    assert [point["sparsity"] for point in result.report.curve] == [0.1, 0.2, 0.3, 0.35]


@pytest.mark.parametrize("update", ["obs", "admm"])
def test_the_promise_is_about_the_reconstructed_model(update):
    options = {"sparsity": 0.9, "sparsity_step": 0.3, "update": update}
    result = searched(cases.build("llama"), max_metric_drop="0.2%", **options)
    found = result.report.evaluation
    assert found["pruned"]["perplexity"] <= 1.002 * found["dense"]["perplexity"]
    kept = max((point for point in result.report.curve if point["within"]), key=lambda point: point["sparsity"])
    assert kept["metric"] == found["pruned"]["perplexity"], "what was measured is what is delivered"


def test_what_was_kept_is_delivered_where_bisection_finds_nothing_more(monkeypatch):
    """A metric that allows the first attempt, and nothing behind it."""
    seen = []

    def metric(model):
        seen.append([target_seen(model, target).clone() for target in find_targets(model)])
        return [1.0, 1.0][len(seen) - 1] if len(seen) <= 2 else 0.0

    result = searched(
        cases.build("llama"),
        sparsity=0.9,
        sparsity_step=0.3,
        max_metric_drop=0.5,
        update="admm",
        metric_fn=metric,
    )
    assert [point["within"] for point in result.report.curve][:2] == [True, False]
    assert not any(point["within"] for point in result.report.curve[1:])
    for target, values in zip(result.targets, seen[1], strict=True):
        torch.testing.assert_close(result.new_weights[target.name], values, rtol=0, atol=1e-6)


@pytest.mark.parametrize("worst", [-1.0, float("nan")])
@pytest.mark.parametrize("options", [{}, {"score": "wanda"}, {"min_matrix_sparsity": 0.2}])
def test_nothing_goes_where_no_sparsity_keeps_the_promise(options, worst):
    values = iter([1.0])
    result = searched(cases.build("llama"), max_metric_drop=0, metric_fn=lambda model: next(values, worst), **options)
    assert result.report.zeros == 0
    assert any("nothing was pruned" in warning for warning in result.report.warnings)


def test_scores_that_need_no_probe_are_made_once_for_all_attempts():
    result = searched(cases.build("llama"), score="wanda", sparsity=0.4, max_metric_drop=1e9)
    assert result.report.passes == {"forward": 1.0, "backward": 0.0}
    once = searched(cases.build("llama"), score="wanda", sparsity=0.4)
    assert result.report.zeros == once.report.zeros
    assert any("sparsity=0.4, the most that was allowed" in warning for warning in result.report.warnings)


def test_attempts_below_the_least_of_a_matrix_take_as_much_of_each():
    result = searched(cases.build("llama"), sparsity=0.5, min_matrix_sparsity=0.4, max_metric_drop=1e9)
    assert [point["sparsity"] for point in result.report.curve] == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert all(row.pruned >= 0.4 * row.weights for row in result.report.matrices)
    first = searched(cases.build("llama"), sparsity=0.1, min_matrix_sparsity=0.1)
    shares = [row.pruned / row.weights for row in first.report.matrices]
    assert min(shares) > 0.09, "of whole weights"
    assert max(shares) < 0.14


def test_allowed():
    assert allowed(10.0, 0.5) == 10.5
    assert allowed(10.0, "5%") == 10.5
    assert allowed(-0.8, "10%") == pytest.approx(-0.72), "an accuracy of 0.8, of which more is better"


def test_a_metric_without_a_limit_is_refused():
    with pytest.raises(ValueError, match="metric_fn is what max_metric_drop is about"):
        searched(cases.build("llama"), metric_fn=lambda _: pytest.fail("work began"))


def test_something_has_to_be_measured():
    with pytest.raises(ValueError, match="max_metric_drop needs something to measure"):
        searched(cases.build("llama"), evaluation=False, max_metric_drop=0.1)
