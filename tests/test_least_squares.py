"""Least squares against solutions row by row, and the revised mask against all masks there are."""

from __future__ import annotations

from itertools import combinations, product

import pytest
import torch

from gradprobe_hf.runtime import half_products
from gradprobe_hf.updates.admm import STEPS, in_groups, in_matrix, in_rows, revise
from gradprobe_hf.updates.least_squares import LeastSquares
from gradprobe_hf.updates.lowest import lowest
from gradprobe_hf.updates.sweep import damped, fixed, inverse_factor, sweep
from tests.reference.least_squares import error, normal_equations, problem

DAMPING = 0.01


def test_the_kept_weights_are_those_of_the_normal_equations():
    weight, hessian, mask = problem()
    mask[1], mask[2] = False, True  # nothing goes, all go
    found = LeastSquares(weight, hessian, damping=DAMPING).solved(mask)
    wanted = normal_equations(weight, damped(hessian, DAMPING), mask)
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(found[1], weight[1])
    assert not found[mask].any()
    assert not found[mask].signbit().any(), "negative zeros are other bits in the file"


def test_where_rows_keep_the_same_inputs_they_are_solved_together(monkeypatch):
    monkeypatch.setattr(LeastSquares, "_solved", None)  # no conjugate gradients
    weight, hessian, mask = problem()
    mask[:] = mask[0]
    mask[3] = True  # an output that goes
    drift = 0.1 * problem(seed=1)[1]
    whole = damped(hessian, DAMPING)
    start = weight + 0.3 * torch.linalg.solve(whole, (weight @ drift).t()).t()
    found = LeastSquares(weight, hessian, drift, 0.3, DAMPING).solved(mask)
    torch.testing.assert_close(found, normal_equations(start, whole, mask), rtol=1e-8, atol=1e-10)
    assert not found[mask].signbit().any()


def test_fewer_tokens_than_inputs_are_solved_together_in_float32():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 96, generator=generator, dtype=torch.float64) + 2
    weight = torch.randn(24, 96, generator=generator, dtype=torch.float64)
    mask = (torch.arange(96) % 3 == 0).expand(24, 96)
    whole = damped(x.t() @ x, DAMPING)
    best = error(weight, normal_equations(weight, whole, mask), whole)
    system = LeastSquares(weight.float(), (x.t() @ x).float(), damping=DAMPING)
    found = error(weight, system.solved(mask).double(), whole)
    assert abs(found - best) < 1e-3 * best


def test_inputs_that_are_all_the_same_are_left_to_conjugate_gradients():
    weight, _, mask = problem()
    mask[:] = mask[0]
    found = LeastSquares(weight, torch.ones(12, 12, dtype=torch.float64), damping=0.0).solved(mask)
    torch.testing.assert_close(found.sum(1), weight.sum(1))  # what the outputs are


def test_few_steps_from_a_revised_mask_leave_as_little_error_as_the_normal_equations():
    """Fewer tokens than inputs, and inputs that have much in common: where conjugate gradients take longest."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 96, generator=generator, dtype=torch.float64) + 2
    weight = torch.randn(24, 96, generator=generator, dtype=torch.float64)
    whole = damped(x.t() @ x, DAMPING)
    system = LeastSquares(weight, x.t() @ x, damping=DAMPING)
    mask = lowest(weight.abs() * whole.diagonal().sqrt(), weight.numel() * 6 // 10)
    revised, near = revise(system, mask, in_matrix(mask))
    best = error(weight, normal_equations(weight, whole, revised), whole)
    found = error(weight, system.solved(revised, near, STEPS), whole)
    assert best <= found < 1.01 * best
    assert found < error(weight, system.solved(revised, steps=STEPS), whole)


def inputs_of(kind):
    """Inputs `[tokens, in]` of which H is nearly singular, or whose sizes lie far apart."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 256, generator=generator, dtype=torch.float64)
    few = torch.randn(512, 3, generator=generator, dtype=torch.float64)
    mixed = torch.randn(3, 256, generator=generator, dtype=torch.float64)
    made = {
        "plain": x,
        "a large mean": x + 100 * mixed[0],
        "one in all": few[:, :1] + 1e-3 * x,
        "three in all": few @ mixed,
        "few tokens": x[:8],
        "unlike sizes": x * torch.logspace(-3, 3, 256, dtype=torch.float64),
    }
    return made[kind]


@pytest.mark.parametrize("damping", [DAMPING, 1e-6])
@pytest.mark.parametrize("kind", ["plain", "a large mean", "one in all", "three in all", "few tokens", "unlike sizes"])
def test_float32_and_rounded_products_are_as_good_as_float64(kind, damping, monkeypatch):
    """A revised mask and the weights under it, measured in float64; rounded products where a device has units."""
    x, weight = inputs_of(kind), problem(rows=48, columns=256)[0]
    hessian = x.t() @ x
    whole = damped(hessian, damping)
    mask = lowest(weight.abs() * whole.diagonal().sqrt(), weight.numel() * 6 // 10)
    pruned = error(weight, weight.masked_fill(mask, 0), whole)

    def revised(dtype):
        system = LeastSquares(weight.to(dtype), x.to(dtype).t() @ x.to(dtype), damping=damping)
        found, near = revise(system, mask, in_matrix(mask))
        assert found.sum() == mask.sum()
        values = system.solved(found, near, STEPS).double()
        return found, error(weight, values, whole) / pruned

    _, exact = revised(torch.float64)
    for units in (True, False):
        monkeypatch.setattr(half_products, "has_units", lambda _, units=units: units)
        _, found = revised(torch.float32)
        assert found < 1.05 * exact + 1e-4, "of what is lost without an update"
    given = LeastSquares(weight.float(), x.float().t() @ x.float(), damping=damping).solved(mask).double()
    assert error(weight, given, whole) < pruned


def test_only_products_of_float32_are_rounded(monkeypatch):
    weight, hessian, mask = problem()
    masks = {}
    for dtype in (torch.float32, torch.float64):
        for units in (True, False):
            monkeypatch.setattr(half_products, "has_units", lambda _, units=units: units)
            system = LeastSquares(weight.to(dtype), hessian.to(dtype), damping=DAMPING)
            masks[dtype, units] = revise(system, mask, in_matrix(mask))[1]
    assert torch.equal(masks[torch.float64, True], masks[torch.float64, False])
    assert not torch.equal(masks[torch.float32, True], masks[torch.float32, False]), "something was rounded"


def test_towards_the_dense_outputs_they_are_those_of_another_start():
    weight, hessian, mask = problem()
    drift = 0.1 * problem(seed=1)[1] @ torch.diag(torch.linspace(-1, 1, len(hessian), dtype=hessian.dtype))
    whole = damped(hessian, DAMPING)
    start = weight + 0.3 * torch.linalg.solve(whole, (weight @ drift).t()).t()
    found = LeastSquares(weight, hessian, drift, 0.3, DAMPING).solved(mask)
    torch.testing.assert_close(found, normal_equations(start, whole, mask), rtol=1e-8, atol=1e-10)


def test_they_leave_a_smaller_error_than_the_sweep():
    weight, hessian, mask = problem(rows=20, columns=60)
    swept, _ = sweep(weight, inverse_factor(hessian, DAMPING)[0], fixed(mask))
    solved = LeastSquares(weight, hessian, damping=DAMPING).solved(mask)
    whole = damped(hessian, DAMPING)
    assert error(weight, solved, whole) < 0.9 * error(weight, swept, whole)


def test_an_input_that_is_always_zero_is_left_alone():
    weight, hessian, mask = problem()
    hessian[3], hessian[:, 3] = 0, 0
    found = LeastSquares(weight, hessian)
    torch.testing.assert_close(found.solved(mask)[:, 3], weight[:, 3].masked_fill(mask[:, 3], 0))
    revised, _ = revise(found, mask, in_matrix(mask))
    assert torch.isfinite(found.solved(revised)).all()


def test_nothing_was_seen_of_a_matrix():
    weight, hessian, mask = problem()
    found = LeastSquares(weight, torch.zeros_like(hessian))
    torch.testing.assert_close(found.solved(mask), weight.masked_fill(mask, 0))
    assert int(revise(found, mask, in_matrix(mask))[0].sum()) == int(mask.sum())


def best_of_all(weight, hessian, masks):
    return min(error(weight, normal_equations(weight, hessian, mask), hessian) for mask in masks)


def test_a_revised_mask_of_small_rows_is_on_the_way_to_the_best_there_is():
    begun, found, best = 0.0, 0.0, 0.0
    masks = [
        torch.tensor([[j in chosen for j in range(8)]]) for chosen in combinations(range(8), 4)
    ]  # 70 ways to prune half of a row of 8
    for seed in range(20):
        weight, hessian, _ = problem(rows=1, columns=8, seed=seed)
        whole = damped(hessian, DAMPING)
        mask = lowest(weight.abs() * whole.diagonal().sqrt(), 4)
        least = LeastSquares(weight, hessian, damping=DAMPING)
        revised, _ = revise(least, mask, in_rows(mask))
        assert int(revised.sum()) == 4
        begun += error(weight, normal_equations(weight, whole, mask), whole)
        found += error(weight, normal_equations(weight, whole, revised), whole)
        best += best_of_all(weight, whole, masks)
    assert best <= found < begun - 0.25 * (begun - best)


def test_groups_are_revised_within_themselves():
    pairs = list(combinations(range(4), 2))
    masks = [
        torch.tensor([[j in first for j in range(4)] + [j in second for j in range(4)]])
        for first, second in product(pairs, pairs)
    ]
    found, begun, best = 0.0, 0.0, 0.0
    for seed in range(20):
        weight, hessian, _ = problem(rows=1, columns=8, seed=seed)
        whole = damped(hessian, DAMPING)
        cut = in_groups(2, 4)
        mask = cut(weight * whole.diagonal().sqrt())
        revised, _ = revise(LeastSquares(weight, hessian, damping=DAMPING), mask, cut)
        assert revised.view(2, 4).sum(1).tolist() == [2, 2]
        begun += error(weight, normal_equations(weight, whole, mask), whole)
        found += error(weight, normal_equations(weight, whole, revised), whole)
        best += best_of_all(weight, whole, masks)
    assert best <= found < begun - 0.25 * (begun - best)


def test_a_cut_keeps_its_budget_among_equals():
    mask = problem()[2]
    level = torch.ones(5, 12, dtype=torch.float64)
    assert torch.equal(in_rows(mask)(level).sum(1), mask.sum(1))
    assert int(in_matrix(mask)(level).sum()) == int(mask.sum())
    assert (in_groups(1, 4)(level).view(5, 3, 4).sum(2) == 3).all()
    assert not in_matrix(torch.zeros_like(mask))(level).any()


def test_rows_compete_by_their_fisher_information():
    values = torch.tensor([[1.0, 1.1], [1.2, 1.3]])
    mask = torch.tensor([[True, True], [False, False]])
    assert in_matrix(mask)(values).tolist() == [[True, True], [False, False]]
    assert in_matrix(mask, torch.tensor([16.0, 1.0]))(values).tolist() == [[False, False], [True, True]]
    assert in_matrix(mask, torch.tensor([1.5, 1.0]))(values).tolist() == [[True, False], [True, False]]
