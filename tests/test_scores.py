"""The scores against independent re-statements."""

from __future__ import annotations

import pytest
import torch

from gradprobe_hf.scores.random import random_score
from tests import cases
from tests.reference import naive


def test_magnitude_and_wanda_are_what_they_are_called():
    model = cases.build("llama")
    magnitude = cases.prune(model, cases.batches("llama"), score="magnitude")
    wanda = cases.prune(model, cases.batches("llama"), score="wanda")
    energy, _ = naive.statistics(model, cases.batches("llama", batch_size=1), list(magnitude.masks))
    for target in magnitude.targets:
        weight = target.matrix(model)
        half = target.numel // 2
        assert set(weight.abs().flatten().argsort()[:half].tolist()) == set(
            magnitude.masks[target.name].flatten().nonzero().flatten().tolist()
        )
        score = weight.abs() * energy[target.name]["x_sq"].sqrt()
        for row, mask in zip(score, wanda.masks[target.name], strict=True):
            assert set(row.argsort()[: len(row) // 2].tolist()) == set(mask.nonzero().flatten().tolist())


def test_an_expert_that_sees_no_token_is_pruned_last_and_named():
    model = cases.build("mixtral")
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _gate, _args, out: (*out[:2], out[2].clamp(max=2)))
    found = cases.prune(model, cases.batches("mixtral"))
    unseen = [name for name in found.masks if name.endswith("[3]")]
    assert unseen
    assert not any(found.masks[name].any() for name in unseen)
    assert found.report.unreached == []
    assert found.report.sparsity == pytest.approx(0.5, abs=1e-4)
    assert any("belong to experts that no token was sent to" in warning for warning in found.report.warnings)
    # where a budget is its own, such a matrix loses its smallest weights
    by_row = cases.prune(model, cases.batches("mixtral"), scope="row")
    target = next(target for target in by_row.targets if target.name == unseen[0])
    for row, mask in zip(target.matrix(model).abs(), by_row.masks[target.name], strict=True):
        assert row[mask].max() <= row[~mask].min()


def test_only_what_is_needed_is_measured():
    def needs(**options):
        return cases.config(**options).needs

    assert needs().terms == {"sequence", "marginals"}
    assert needs(fisher="factored").terms == {"marginals"}
    assert needs(fisher="token").terms == {"token"}
    assert needs(rule="threshold", score="magnitude").terms == {"peak"}
    assert needs(rule="threshold", score="wanda").terms == {"peak", "marginals"}
    assert needs(score="wanda").passes == "forward"
    assert needs(score="wanda").terms == {"marginals"}
    assert needs(score="magnitude").passes == "none"
    assert needs(score="magnitude", update="obs").passes == "forward"
    assert needs(score="random").terms == set()
    assert needs(update="sparsegpt").passes == "forward"
    assert needs(score="random", probes=2).passes == needs(probes=1).passes == "probe"


def test_a_random_score_is_the_same_whatever_part_is_drawn():
    whole = random_score(slice(0, 150), 7, "a", seed=3)
    assert whole.shape == (150, 7)
    assert len(whole.unique()) > 1000, "no part repeats another"
    for rows in (slice(0, 64), slice(63, 65), slice(100, 150), slice(5, 6)):
        assert torch.equal(random_score(rows, 7, "a", seed=3), whole[rows])
    assert not torch.equal(random_score(slice(0, 150), 7, "b", seed=3), whole)
    assert not torch.equal(random_score(slice(0, 150), 7, "a", seed=4), whole)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_a_random_score_is_the_same_whatever_the_caller_s_dtype(default):
    wanted = random_score(slice(0, 70), 9, "w", 1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        assert torch.equal(random_score(slice(0, 70), 9, "w", 1), wanted)
    finally:
        torch.set_default_dtype(before)
