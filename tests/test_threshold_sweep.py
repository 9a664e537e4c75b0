"""A sweep of thresholds against runs at each of them."""

from __future__ import annotations

import math

import pytest
import torch

from gradprobe_hf import GradProbeConfig, sweep_gradient_thresholds
from gradprobe_hf.model.loss import summed_loss
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.run import probe_pair
from gradprobe_hf.threshold_sweep import BISECTIONS, ThresholdRow, refined
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
    return ThresholdRow(threshold, 0.5, 100, math.log(value), value)


@pytest.mark.parametrize(("limit", "wanted"), [(12.3, 2.3), (10.0, 0.0), (11.999, 1.999)])
def test_bisection_ends_at_the_limit_and_keeps_it(limit, wanted):
    start = [row(threshold) for threshold in (4.0, "adaptive", 0.0, 1.0, 2.0)]
    found = refined(start, limit, row)
    assert len(found) == BISECTIONS
    within = [one.gradient_threshold for one in [*start, *found] if one.perplexity <= limit and one != start[1]]
    assert wanted - 2 / 2**BISECTIONS <= max(within) <= wanted


@pytest.mark.parametrize("limit", [9.0, 20.0])
def test_there_is_nothing_to_bisect_where_all_or_none_keep_the_limit(limit):
    assert refined([row(0.0), row(1.0)], limit, lambda _: pytest.fail("tried")) == []


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
        ({"max_metric_drop": "five"}, "max_metric_drop must be"),
        ({"max_metric_drop": "5"}, "a share like '5%'"),
        ({"config": cases.config(order="sequential")}, "order='sequential' has no part"),
    ],
)
def test_options_without_a_part_in_it_are_refused_before_any_pass(options, message):
    with pytest.raises(ValueError, match=message):
        sweep_gradient_thresholds(3, THRESHOLDS, **options)
