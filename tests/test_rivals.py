"""The rivals of the benchmark against restatements that share no code with them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import rivals
from benchmarks.gradient_admm import BETAS, GradientAdmm
from gradprobe_hf.run.context import RunRequest
from gradprobe_hf.run.diagnostics import Diagnostics
from gradprobe_hf.run.request.inputs import load_inputs
from gradprobe_hf.scores.table import SCORES
from gradprobe_hf.training import attached
from gradprobe_hf.updates.table import UPDATES
from tests import cases

LENGTH, ROWS = 12, 6


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(SCORES, "gblm", rivals.gblm(ROWS, LENGTH))
    for name, row in rivals.RIVAL_UPDATES.items():
        monkeypatch.setitem(UPDATES, name, row)


@pytest.fixture(scope="module")
def model():
    return cases.build("llama")


@pytest.fixture(scope="module")
def batches():
    return cases.batches("llama", rows=ROWS, length=LENGTH)


def linear_maps(model):
    return {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }


def inputs_of(model, batches):
    """Every map's inputs `[tokens, in]`, by hooks."""
    seen = {name: [] for name in linear_maps(model)}
    hooks = [
        module.register_forward_hook(lambda _, args, __, name=name: seen[name].append(args[0].flatten(0, 1)))
        for name, module in linear_maps(model).items()
    ]
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts) for name, parts in seen.items()}


def lowest_half(scores):
    """Of each row, as a mask, by sorting."""
    mask = torch.zeros_like(scores, dtype=torch.bool)
    for row, values in zip(mask, scores, strict=True):
        row[values.sort(stable=True).indices[: len(values) // 2]] = True
    return mask


def test_gblm_is_the_weight_times_its_input_and_its_gradient(model, batches):
    found = cases.prune(model, batches, score="gblm", probes=1)
    inputs = inputs_of(model, batches)
    weights = {name: module.weight for name, module in linear_maps(model).items()}
    squares = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for ids in torch.cat([batch["input_ids"] for batch in batches]):
        loss = model(input_ids=ids[None], labels=ids[None]).loss  # a mean over the sequence
        for name, gradient in zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True):
            squares[name] += gradient**2
    for name, weight in weights.items():
        norms = (inputs[name] ** 2).sum(0).div(ROWS).sqrt()
        expected = lowest_half(weight.detach().abs() * (norms + 100 * squares[name].sqrt()))
        assert cases.differing({"": found.masks[name]}, {"": expected}) <= 2, "ties aside"


def test_wanda_by_block_sees_what_the_pruned_blocks_hand_on(model, batches):
    found = cases.prune(model, batches, update="wanda by block")
    again = cases.build("llama")
    for block in range(3):
        inputs = inputs_of(again, batches)
        for name, module in linear_maps(again).items():
            if f"layers.{block}." in name:
                mask = lowest_half(module.weight.abs() * (inputs[name] ** 2).sum(0).sqrt())
                module.weight.data[mask] = 0
                assert torch.equal(found.masks[name], mask)
    at_once = cases.prune(model, batches, score="wanda")
    assert cases.differing(found.masks, at_once.masks), "the first block alone is the same"


def owl_context(model, batches, sparsity=0.5):
    config = cases.config(score="wanda", update="none", sparsity=sparsity)
    return load_inputs(RunRequest(model, config, batches, evaluation=False, progress=False))


def test_owl_takes_less_where_there_are_outliers(model, batches):
    masks = rivals.owl_masks(owl_context(model, batches), Diagnostics())
    inputs = inputs_of(model, batches)
    shares = []
    for block in range(3):
        scores = [
            (module.weight.detach().abs() * inputs[name].norm(dim=0)).flatten().numpy()
            for name, module in linear_maps(model).items()
            if f"layers.{block}." in name
        ]
        whole = np.concatenate(scores)
        shares.append((whole > 5 * whole.mean()).mean())
    kept = (np.array(shares) - min(shares)) / (max(shares) - min(shares)) * 0.16
    kept = kept - kept.mean() + 0.5
    for block, expected in enumerate(kept):
        inside = [masks[name] for name in masks if f"layers.{block}." in name]
        pruned = sum(int(mask.sum()) for mask in inside) / sum(mask.numel() for mask in inside)
        assert pruned == pytest.approx(1 - expected, abs=2e-3)
    assert max(kept) - min(kept) == pytest.approx(0.16)
    assert sum(int(masks[name].sum()) for name in masks) * 2 == sum(masks[name].numel() for name in masks)


@pytest.mark.parametrize("update", ["sparsegpt in budgets", "sparsegpt+admm in budgets"])
def test_an_update_in_budgets_prunes_as_many_of_each_matrix_and_chooses_which(model, batches, update):
    given = cases.prune(model, batches, probes=1).masks
    found = cases.prune(cases.build("llama"), batches, probes=1, update=update).masks
    counts = {name: int(given[name].sum()) for name in given}
    assert {name: int(found[name].sum()) for name in found} == counts
    assert len({counts[name] / given[name].numel() for name in counts}) > 1, "the budgets differ"
    assert cases.differing(given, found)


def test_rows_share_what_does_not_divide():
    scores = torch.tensor([[3.0, 1.0, 2.0], [1.0, 2.0, 3.0]])
    assert rivals.spread_over_rows(scores, 3).tolist() == [[False, True, True], [True, False, False]]


def test_gradient_admm_is_a_loop_over_single_weights():
    model, steps, kept, penalty, rate = nn.Linear(3, 2, bias=False).double(), 7, 2, 0.3, 0.05
    curvature = torch.tensor([[1.0, 4.0, 0.5], [2.0, 0.1, 3.0]], dtype=torch.float64)
    begun = model.weight.detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), rate, BETAS)
    with attached(GradientAdmm({"weight": kept}, penalty, distance=2), model, optimizer):
        for _ in range(steps):
            (curvature * (model.weight - 1).square()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    w, c = begun.flatten().tolist(), curvature.flatten().tolist()
    z, u, m, v = list(w), [0.0] * 6, [0.0] * 6, [0.0] * 6
    for step in range(1, steps + 1):
        for i in range(6):
            gradient = 2 * c[i] * (w[i] - 1) + (penalty * (w[i] - z[i] + u[i]) if step > 2 else 0)
            m[i] = BETAS[0] * m[i] + (1 - BETAS[0]) * gradient
            v[i] = BETAS[1] * v[i] + (1 - BETAS[1]) * gradient**2
            w[i] -= rate * m[i] / (1 - BETAS[0] ** step) / (math.sqrt(v[i] / (1 - BETAS[1] ** step)) + 1e-8)
        if step % 2 == 0:
            moved = [a + b for a, b in zip(w, u, strict=True)]
            best = sorted(range(6), key=lambda i: -v[i] * moved[i] ** 2)[:kept]
            z = [moved[i] if i in best else 0.0 for i in range(6)]
            u = [a - b for a, b in zip(moved, z, strict=True)]
    assert model.weight.count_nonzero() == kept
    torch.testing.assert_close(model.weight.flatten(), torch.tensor(z, dtype=torch.float64))
