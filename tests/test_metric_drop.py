"""Searching for the largest sparsity that keeps a promise about a metric (`max_metric_drop`)."""

from __future__ import annotations

import math

import pytest
import torch

from gradprobe_hf.data.batches import from_iterable
from gradprobe_hf.data.windows import EVALUATION_SEED
from gradprobe_hf.decisions.search import Limit
from gradprobe_hf.model.fingerprint import weights_fingerprint
from gradprobe_hf.model.passes.loss import summed_loss
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.probe.maps.attachment import serving
from gradprobe_hf.report.card.build import build_card
from gradprobe_hf.run.probing import probe_pair
from tests import cases


def text(seed=0):
    return cases.batches("llama", rows=4, batch_size=2, seed=seed)


def searched(model, *, evaluation=None, **options):
    return cases.prune(model, text(), evaluation=text(3) if evaluation is None else evaluation, **options)


def perplexity(model, batches):
    with torch.no_grad():
        losses = [model(**batch, labels=batch["input_ids"]).loss for batch in batches]
    return math.exp(sum(losses) / len(losses))


def halves():
    """The rows of the evaluation that choose, and those that are reported."""
    return from_iterable(text(3), "text").halves(EVALUATION_SEED)


def test_the_search_keeps_its_promise_and_goes_as_far_as_it_can(monkeypatch):
    calls = []
    real = probe_pair.run_probe
    monkeypatch.setattr(probe_pair, "run_probe", lambda *args, **kwargs: calls.append(1) or real(*args, **kwargs))
    model = cases.build("llama")
    wanted = perplexity(model, halves()[0])
    result = searched(model, sparsity=0.9, max_metric_drop="0.2%", sparsity_step=0.3)
    curve = result.report.curve
    assert result.report.selection["value"] <= 1.002 * wanted
    assert result.report.selection["limit"] == pytest.approx(1.002 * wanted)
    kept = max((point for point in curve if point["within"]), key=lambda point: point["sparsity"])
    broken = min((point for point in curve if not point["within"]), key=lambda point: point["sparsity"])
    assert result.report.sparsity == pytest.approx(kept["sparsity"], abs=1e-3)
    assert broken["metric"] > 1.002 * wanted
    assert 0 < broken["sparsity"] - kept["sparsity"] <= 0.005
    assert [point["sparsity"] for point in curve if point["probed"]] == [0.3, 0.6, 0.9][: len(calls) // 2]
    assert len(calls) < 2 * len(curve), "bisection makes no probe"


def test_what_chose_the_sparsity_is_not_what_is_reported():
    model = cases.build("llama")
    chosen_by, reported = halves()
    dense = perplexity(model, reported)
    result = searched(model, sparsity=0.9, max_metric_drop="0.2%", sparsity_step=0.3, apply=True)
    report = result.report
    assert report.evaluation["fingerprint"] == reported.fingerprint
    assert report.selection["fingerprint"] == chosen_by.fingerprint != reported.fingerprint
    assert report.selection["value"] == pytest.approx(perplexity(model, chosen_by), rel=1e-6)
    assert report.evaluation["dense"]["perplexity"] == pytest.approx(dense, rel=1e-6)
    assert report.evaluation["pruned"]["perplexity"] == pytest.approx(perplexity(model, reported), rel=1e-6)
    card = str(build_card(report, result.config, {}, "here"))
    assert "**Chosen apart.**" in card
    assert report.selection["protocol"] in card


def test_a_promise_that_does_not_hold_elsewhere_is_said():
    """The half that chose is all that a loss falls on; on the other it rises with every zero."""
    model, (chosen_by, _) = cases.build("llama"), halves()
    rows = {tuple(row.tolist()) for batch in chosen_by for row in batch["input_ids"]}
    target = find_targets(model)[0]

    def loss(model, batch):
        found = summed_loss(model, batch)[0]
        if torch.is_grad_enabled() or tuple(batch["input_ids"][0].tolist()) in rows:
            return found
        return found * (1 + (target_seen(model, target) == 0).float().mean())

    report = searched(model, sparsity=0.2, max_metric_drop="1%", loss_fn=loss).report
    assert all(point["within"] for point in report.curve)
    assert any("beyond max_metric_drop=1%" in warning for warning in report.warnings)


def test_a_metric_of_ones_own_is_called_what_chose():
    found = searched(cases.build("llama"), sparsity=0.1, max_metric_drop=0.5, metric_fn=lambda _: 0.75)
    assert found.report.selection == {"source": None, "metric": "metric_fn", "limit": 0.25, "value": 0.75}
    assert found.report.evaluation["samples"] == 4, "its own loss is measured on all rows, which chose nothing"
    assert "**Chosen by the same measurement.**" in str(build_card(found.report, found.config, {}, "here"))


def test_one_row_cannot_choose_and_report():
    with pytest.raises(ValueError, match=r"has 1 row in 1 batch.*at least two rows: evaluation_samples \(--eval"):
        searched(cases.build("llama"), evaluation=cases.batches("llama", rows=1), max_metric_drop=0.1)


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


@pytest.mark.parametrize("update", ["none", "admm"])
def test_a_metric_may_save_the_model_or_read_its_weights(update, tmp_path):
    """They were the dense ones, so that any sparsity kept the promise, in silence."""
    model, values = cases.build("llama"), []
    before = weights_fingerprint(model)

    def saved(model):
        model.save_pretrained(tmp_path)
        other = type(model).from_pretrained(tmp_path)
        values.append((-perplexity(other, text(3)), -perplexity(model, text(3))))
        return values[-1][0]

    found = searched(model, sparsity=0.8, max_metric_drop=1000.0, update=update, metric_fn=saved, apply=False)
    (dense, _), (pruned, _) = values[0], values[-1]
    assert found.report.sparsity == pytest.approx(0.8, abs=1e-3)
    assert pruned < dense
    assert all(one == pytest.approx(other, rel=1e-5) for one, other in values)
    assert weights_fingerprint(model) == before


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
    kept = max((point for point in result.report.curve if point["within"]), key=lambda point: point["sparsity"])
    model = cases.build("llama")
    assert kept["metric"] <= 1.002 * perplexity(model, halves()[0])
    with serving(model, result.targets, result.masks, new_weights=result.new_weights):
        delivered = perplexity(model, halves()[0])
    assert kept["metric"] == pytest.approx(delivered, rel=1e-6), "what was measured is what is delivered"


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


@pytest.mark.parametrize("update", ["obs", "admm", "least_squares"])
def test_where_nothing_goes_nothing_changes(update):
    """A fit to the same outputs has other last bits, and fills the zeros of a model that is sparse."""
    model = cases.build("llama")
    for target in find_targets(model):
        target.matrix(model)[:, ::2] = 0
    before, values = cases.bits(model), iter([1.0])
    result = searched(
        model, max_metric_drop=0, metric_fn=lambda model: next(values, 0.0), update=update, apply=True, sparsity=0.9
    )
    assert cases.changed(model, before) == []
    assert not any("are none now" in warning for warning in result.report.warnings)
    card = str(build_card(result.report, result.config, {}, "me/half"))
    assert "so that nothing was pruned." in card
    assert "were changed" not in card
    assert "of the way" not in card


@pytest.mark.parametrize("rows", [50, 100, 1000])
@pytest.mark.parametrize("drop", [0.02, 0.1, "10%"])
def test_an_accuracy_that_falls_by_exactly_as_much_is_within(rows, drop):
    for right in range(rows // 10, rows + 1, 10):
        fewer = right // 10 if drop == "10%" else round(drop * rows)
        limit = Limit.of(-right / rows, drop)
        assert limit.keeps(-(right - fewer) / rows), right
        assert not limit.keeps(-(right - fewer - 1) / rows), right
    as_float32 = [float(torch.tensor(value, dtype=torch.float32)) for value in (-0.8, -0.7)]
    assert Limit.of(as_float32[0], 0.1).keeps(as_float32[1])
    assert not Limit.of(1.0, 0.5).keeps(math.nan)


@pytest.mark.parametrize(
    ("before", "drop", "after"), [(-3e6, 0, -2_999_998), (-5e6, 1, -4_999_994.9), (50_000.0, 0.01, 50_000.05)]
)
def test_what_is_forgiven_is_small_beside_the_drop(before, drop, after):
    assert not Limit.of(before, drop).keeps(after)


def test_rows_that_choose_the_sparsity_are_not_to_be_calibrated_on():
    choosing, reported = halves()
    for half, told in ((choosing, " of the half that chooses"), (reported, "")):
        found = cases.prune(cases.build("llama"), list(half.items), evaluation=text(3), max_metric_drop="5%").report
        assert f"2 of the 2 evaluation windows{told} were also calibrated on; evaluate on others." in found.warnings
        assert sum("calibrated on" in warning for warning in found.warnings) == 1


def test_what_a_drop_allows():
    assert Limit.of(10.0, 0.5).value == 10.5
    assert Limit.of(10.0, "5%").value == 10.5
    assert Limit.of(-0.8, "10%").value == pytest.approx(-0.72), "an accuracy of 0.8, of which more is better"


def test_a_metric_without_a_limit_is_refused():
    with pytest.raises(ValueError, match="metric_fn is what max_metric_drop is about"):
        searched(cases.build("llama"), metric_fn=lambda _: pytest.fail("work began"))


def test_something_has_to_be_measured():
    with pytest.raises(ValueError, match="max_metric_drop needs something to measure"):
        searched(cases.build("llama"), evaluation=False, max_metric_drop=0.1)
