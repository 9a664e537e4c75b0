"""A sweep of thresholds against runs at each of them."""

from __future__ import annotations

import math

import pytest
import torch

from gradprobe_hf import GradProbeConfig, sweep_gradient_thresholds
from gradprobe_hf.decisions.search import Limit
from gradprobe_hf.model.passes.loss import summed_loss
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.run.probing import probe_pair
from gradprobe_hf.threshold_sweep.bisection import BISECTIONS, refined
from gradprobe_hf.threshold_sweep.rows import ThresholdRow
from tests import cases

THRESHOLDS = (0.0, {"*mlp*": 0.5, "*": 0.1}, "adaptive", 3.0)


def texts():
    return {"calibration": cases.batches("llama"), "evaluation": cases.batches("llama", seed=9), "progress": False}


def at(threshold):
    options = {"rule": "threshold", "gradient_threshold": threshold, "sparsity": 0.6}
    return cases.prune(cases.build("llama"), cases.batches("llama"), evaluation=texts()["evaluation"], **options).report


def test_every_row_is_what_a_run_gives_and_there_are_two_probes(monkeypatch):
    wanted = [at(threshold) for threshold in THRESHOLDS]
    probes, real = [], probe_pair.run_probe
    monkeypatch.setattr(probe_pair, "run_probe", lambda *a, **k: probes.append(1) or real(*a, **k))
    model = cases.build("llama")
    before = cases.bits(model)
    found = sweep_gradient_thresholds(model, THRESHOLDS, GradProbeConfig(sparsity=0.6), **texts())
    assert len(probes) == 2
    assert cases.changed(model, before) == []
    assert [row.zeros for row in found.rows] == [report.zeros for report in wanted]
    assert len({row.zeros for row in found.rows}) == len(THRESHOLDS)
    for row, report in zip(found.rows, wanted, strict=True):
        assert row.loss == pytest.approx(report.evaluation["pruned"]["loss"], rel=1e-6)
        assert row.sparsity == report.sparsity
    assert found.tuned is None
    assert found.to_dict()["rows"][1]["gradient_threshold"] == THRESHOLDS[1]


def row(threshold):
    """Of a model whose perplexity is 10 + threshold."""
    value = 10.0 + (threshold if isinstance(threshold, float) else 0)
    return ThresholdRow(threshold, 0.5, 100, math.log(value), value, 0.5)


@pytest.mark.parametrize(("limit", "wanted"), [(12.3, 2.3), (10.0, 0.0), (11.999, 1.999)])
def test_bisection_ends_at_the_limit_and_keeps_it(limit, wanted):
    start = [row(threshold) for threshold in (4.0, "adaptive", 0.0, 1.0, 2.0)]
    found = refined(start, Limit(10.0, limit), row)
    assert len(found) == BISECTIONS
    within = [one.gradient_threshold for one in [*start, *found] if one.perplexity <= limit and one != start[1]]
    assert wanted - 2 / 2**BISECTIONS <= max(within) <= wanted


def test_what_is_nan_does_not_keep_the_limit():
    broken, limit = ThresholdRow(4.0, 0.5, 100, math.nan, math.nan, 0.5), Limit(10.0, 12.0)
    assert refined([row(0.0), row(1.0), broken], limit, row) == refined([row(0.0), row(1.0), row(4.0)], limit, row)


@pytest.mark.parametrize("limit", [9.0, 20.0])
def test_there_is_nothing_to_bisect_where_all_or_none_keep_the_limit(limit):
    assert refined([row(0.0), row(1.0)], Limit(10.0, limit), lambda _: pytest.fail("tried")) == []


@pytest.mark.parametrize("drop", ["10%", 0.0])
def test_what_is_tuned_is_the_sparsest_that_keeps_the_promise(drop):
    found = sweep_gradient_thresholds(cases.build("llama"), THRESHOLDS, max_metric_drop=drop, **texts())
    limit = found.dense.perplexity * (1.1 if drop == "10%" else 1)
    kept = [one for one in found.rows if one.perplexity <= limit]
    assert kept
    tuned = next(one for one in found.rows if one.gradient_threshold == found.tuned)
    assert tuned in kept
    assert tuned.zeros == max(one.zeros for one in kept)
    assert found.reported.row.zeros == tuned.zeros
    assert found.reported.row.loss != tuned.loss, "measured on rows that did not choose"
    everywhere = (found.dense.loss + found.reported.dense.loss) / 2  # halves of six rows
    whole = sweep_gradient_thresholds(cases.build("llama"), [0.0], **texts())
    assert whole.dense.loss == pytest.approx(everywhere, rel=1e-6)
    assert whole.reported is None


@pytest.mark.parametrize(
    ("thresholds", "message"), [((), "nothing to try"), ((-1.0,), "gradient_threshold must be"), (("no",), "must be")]
)
def test_wrong_thresholds_are_refused_before_any_pass(thresholds, message):
    with pytest.raises(ValueError, match=message):
        sweep_gradient_thresholds(3, thresholds)


def test_a_pattern_that_matches_nothing_is_refused_before_any_pass():
    wrong = {"*.mpl.*": 0.5, "*": 0.1}
    with pytest.raises(ValueError, match=r"'\*\.mpl\.\*' decides about no matrix"):
        sweep_gradient_thresholds(
            cases.build("llama"), (0.0, wrong), **texts(), loss_fn=lambda *_: pytest.fail("work began")
        )


def test_a_threshold_that_breaks_the_model_is_a_row():
    """All candidates gone, the loss is NaN: what was tried before is kept, and it is not what is tuned."""
    model = cases.build("llama")
    size = find_targets(model)[0].shape[1]

    def loss(model, batch):
        found = summed_loss(model, batch)[0]
        served = model.model.layers[0].self_attn.q_proj(torch.eye(size)[None])
        broken = not torch.is_grad_enabled() and bool((served == 0).float().mean() > 0.3)
        return found * float("nan") if broken else found

    found = sweep_gradient_thresholds(model, (0.0, 1e9), max_metric_drop=1e9, loss_fn=loss, **texts())
    assert math.isnan(found.rows[1].loss)
    assert found.tuned is not None
    assert found.tuned < 1e9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsities": 0.5}, "sparsities must be a list"),
        ({"sparsities": [0.3, 1.5]}, "sparsity must be"),
        ({"sparsities": [0.3], "config": cases.config(sparsity=0.6)}, r"sparsity=0.6 has no part"),
        ({"config": cases.config(order="sequential"), "max_metric_drop": 1.0}, "leave out {'"),
        ({"max_metric_drop": "five"}, "max_metric_drop must be"),
        ({"max_metric_drop": "5"}, "a share like '5%'"),
        ({"config": cases.config(order="sequential")}, "order='sequential' has no part"),
        ({"config": cases.config(metric="accuracy")}, "metric='accuracy' has no part in a sweep"),
    ],
)
def test_options_without_a_part_in_it_are_refused_before_any_pass(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        sweep_gradient_thresholds(3, THRESHOLDS, **options)


def test_sparsities_and_thresholds_from_one_pair(monkeypatch):
    """At the largest sparsity a row is what a run gives; below it, its candidates are those that a run proposes."""
    probes, real = [], probe_pair.run_probe
    monkeypatch.setattr(probe_pair, "run_probe", lambda *a, **k: probes.append(1) or real(*a, **k))
    found = sweep_gradient_thresholds(cases.build("llama"), (0.1, 1e9), sparsities=[0.3, 0.6], **texts())
    assert len(probes) == 2
    assert [(one.candidates, one.gradient_threshold) for one in found.rows] == [
        (0.3, 0.1), (0.3, 1e9), (0.6, 0.1), (0.6, 1e9)
    ]  # fmt: skip
    assert found.rows[2].zeros == at(0.1).zeros
    # Whatever growth is tolerated, what is left are the candidates that had a gradient.
    assert found.rows[1].sparsity == pytest.approx(0.3, abs=0.02)
    assert found.rows[0].zeros < found.rows[1].zeros < found.rows[3].zeros


def test_sparsity_and_threshold_are_tuned_together():
    found = sweep_gradient_thresholds(
        cases.build("llama"), (0.0, 2.0), sparsities=[0.2, 0.6], max_metric_drop="5%", **texts()
    )
    kept = [one for one in found.rows if one.perplexity <= found.dense.perplexity * 1.05]
    best = max(kept, key=lambda one: one.zeros)
    assert (found.tuned, found.tuned_sparsity) == (best.gradient_threshold, best.candidates)
    assert found.reported.row.zeros == best.zeros


def test_thresholds_in_turn_keep_the_promise_and_are_a_run():
    """Block by block; the dict of thresholds gives the same zeros in a run of its own."""
    config = cases.config(probes=2, rule="threshold", update="none", preset=None, order="sequential", sparsity=0.6)
    found = sweep_gradient_thresholds(cases.build("llama"), (0.0, 0.5, 2.0), config, max_metric_drop="50%", **texts())
    (row,) = found.rows
    assert found.tuned == row.gradient_threshold
    assert row.perplexity <= found.dense.perplexity * 1.5
    assert found.left_dense == ()
    assert list(found.tuned) == [f"model.layers.{number}.*" for number in range(3)]
    assert row.zeros == at(found.tuned).zeros == found.reported.row.zeros


def test_where_no_block_keeps_the_limit_nothing_is_tuned():
    def loss(model, batch):
        found = summed_loss(model, batch)[0]
        served = (layer.self_attn.q_proj(torch.eye(model.config.hidden_size)[None]) for layer in model.model.layers)
        return found + 100 * sum((one == 0).sum() for one in served)

    sequential = cases.config(order="sequential")
    found = sweep_gradient_thresholds(
        cases.build("llama"), (0.0,), sequential, max_metric_drop="1%", loss_fn=loss, **texts()
    )
    assert [row.gradient_threshold for row in found.rows] == [{}]
    assert found.tuned is None
    assert found.reported is None


def test_structures_have_no_part_in_it():
    with pytest.raises(ValueError, match=r"structure={'ffn': 8} has no part"):
        sweep_gradient_thresholds(3, (0.0,), cases.config(structure={"ffn": 8}))


def test_what_no_threshold_keeps_stays_dense():
    """A drop of nothing: whatever a block loses, it is not pruned."""

    def loss(model, batch):
        found = summed_loss(model, batch)[0]
        served = model.model.layers[0].self_attn.q_proj(torch.eye(model.config.hidden_size)[None])
        return found + 100 * (served == 0).sum()

    found = sweep_gradient_thresholds(
        cases.build("llama"), (0.0,), cases.config(order="sequential"), max_metric_drop="900%", loss_fn=loss, **texts()
    )
    assert found.left_dense == ("model.layers.0.*",)
    assert list(found.tuned) == ["model.layers.1.*", "model.layers.2.*"]
