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


def first_two_blocks(model, batch):
    """A loss that the last block has no part in."""
    hidden = model.model(**batch, output_hidden_states=True).hidden_states[2]
    return hidden.square().sum()


def test_a_matrix_the_loss_never_reaches_is_pruned_last_and_named():
    model = cases.build("llama")
    found = cases.prune(model, cases.batches("llama"), loss_fn=first_two_blocks)
    assert not any(mask.any() for name, mask in found.masks.items() if ".layers.2." in name)
    assert found.report.sparsity == pytest.approx(0.5, abs=1e-4)
    # where a budget is its own, an unreached matrix loses its smallest weights
    by_row = cases.prune(model, cases.batches("llama"), loss_fn=first_two_blocks, scope="row")
    name = "model.layers.2.mlp.up_proj.weight"
    weight = model.get_parameter(name).abs()
    for row, mask in zip(weight, by_row.masks[name], strict=True):
        assert row[mask].max() <= row[~mask].min()
    assert any("7 of 21 matrices" in warning for warning in found.report.warnings)


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
