"""The sweep against elimination by the book."""

from __future__ import annotations

import pytest
import torch

from gradprobe_hf.updates.lowest import kth_smallest, lowest
from gradprobe_hf.updates.sweep import (
    COLUMNS,
    by_group_saliency,
    by_saliency,
    fixed,
    inverse_factor,
    sweep,
)
from tests.reference.least_squares import error, problem


def eliminated(weight, hessian, mask):
    """One weight after the other by the rule of Optimal Brain Surgeon, with the inverse of what is left of H."""
    result = weight.clone()
    for row in range(len(weight)):
        for column in range(weight.shape[1]):
            if mask[row, column]:
                inverse = torch.linalg.inv(hessian[column:, column:])
                result[row, column:] -= result[row, column] / inverse[0, 0] * inverse[0]
    return result.masked_fill(mask, 0)


@pytest.mark.parametrize("columns", [11, COLUMNS + 7])
def test_the_sweep_is_elimination_by_the_book(columns):
    weight, hessian, mask = problem(columns=columns)
    factor, damping = inverse_factor(hessian, damping=1e-12)
    assert damping == 1e-12
    swept, kept_mask = sweep(weight, factor, fixed(mask))
    assert torch.equal(kept_mask, mask)
    torch.testing.assert_close(swept, eliminated(weight, hessian, mask), rtol=1e-6, atol=1e-8)


def test_the_factor_is_that_of_the_damped_inverse():
    _, hessian, _ = problem()
    factor, _ = inverse_factor(hessian, damping=0.01)
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian))
    torch.testing.assert_close(factor.t() @ factor, torch.linalg.inv(damped))
    assert torch.equal(factor, factor.triu())


def test_an_input_that_is_always_zero_is_left_alone():
    weight, hessian, mask = problem()
    hessian[3], hessian[:, 3] = 0, 0
    mask[:, 3] = torch.tensor([True, False, True, False, False])
    swept, _ = sweep(weight, inverse_factor(hessian)[0], fixed(mask))
    assert torch.isfinite(swept).all()
    assert torch.equal(swept[:, 3], weight[:, 3].masked_fill(mask[:, 3], 0))


def test_what_an_input_that_is_always_zero_has_goes_first():
    """However little was seen of the others: a sum over few tokens may be small."""
    torch.manual_seed(0)
    weight, inputs = torch.rand(6, 16) + 0.5, torch.randn(500, 16)
    inputs[:, 5] = 0
    hessian = inputs.t() @ inputs
    for scale in (1e-6, 1.0, 1e6):
        factor, _ = inverse_factor(scale * hessian)
        _, mask = sweep(weight, factor, by_saliency(1 / 16))
        assert bool(mask[:, 5].all())
    nothing, _ = inverse_factor(torch.zeros(4, 4))
    assert torch.isfinite(nothing).all()


def test_damping_is_raised_where_the_hessian_is_singular():
    x = torch.ones(4, 6)
    hessian = x.t() @ x * 1e6 - 3 * torch.eye(6) * 1e5  # not even positive
    factor, damping = inverse_factor(hessian, damping=1e-9)
    assert damping > 1e-2
    assert torch.isfinite(factor).all()


@pytest.mark.parametrize("sparsity", [0.0, 0.31, 0.5, 0.97])
def test_sparsegpt_spends_its_budget_to_the_weight(sparsity):
    weight, hessian, _ = problem(rows=7, columns=2 * COLUMNS + 9)
    swept, mask = sweep(weight, inverse_factor(hessian)[0], by_saliency(sparsity))
    assert int(mask.sum()) == round(sparsity * weight.numel())
    assert bool((swept[mask] == 0).all())


def test_sparsegpt_chooses_better_than_magnitude():
    weight, hessian, _ = problem(rows=20, columns=40)
    factor, _ = inverse_factor(hessian)
    cut = weight.abs().flatten().kthvalue(400).values
    chosen, _ = sweep(weight, factor, by_saliency(0.5))
    given, _ = sweep(weight, factor, fixed(weight.abs() <= cut))
    assert error(weight, chosen, hessian) < error(weight, given, hessian)


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (4, 8), (1, 3)])
def test_a_pattern_holds_in_every_group(n, m):
    weight, hessian, _ = problem(rows=6, columns=12 * m * 4)
    swept, mask = sweep(weight, inverse_factor(hessian)[0], by_group_saliency(n, m), m)
    assert bool((mask.view(6, -1, m).sum(-1) == m - n).all())
    assert bool(((swept == 0) == mask).all())


@pytest.mark.parametrize("budget", [0, 1, 7, 30])
def test_the_lowest_are_those_of_a_stable_sort(budget):
    scores = torch.randint(0, 4, (5, 6), generator=torch.Generator().manual_seed(0)).float()
    wanted = torch.zeros(30, dtype=torch.bool)
    wanted[scores.flatten().argsort(stable=True)[:budget]] = True
    assert torch.equal(lowest(scores, budget), wanted.view(5, 6))


@pytest.mark.parametrize("kind", ["spread", "few values", "sorted", "one column decides"])
@pytest.mark.parametrize("share", [0.0, 0.03, 0.5, 0.97, 1.0])
def test_the_kth_smallest_of_many(share, kind):
    values = torch.randn(300, 610, generator=torch.Generator().manual_seed(0)).square()
    if kind == "few values":
        values = values.mul(2).round()
    if kind == "sorted":
        values = values.flatten().sort().values
    if kind == "one column decides":
        values[:, 0] = values[:, 0] * 1e-6  # the width is a multiple of the sample's step: it has this column or not
    flat = values.flatten()
    k = max(1, round(share * len(flat)))
    assert kth_smallest(flat, k) == flat.sort().values[k - 1]
