"""Gram matrices of few tokens: by their factor they compute what the whole of them does."""

from __future__ import annotations

import pytest
import torch

from gradprobe_hf.updates import gram
from gradprobe_hf.updates.admm import STEPS, in_matrix, revise
from gradprobe_hf.updates.gram import FactoredGram, WholeGram, gram_of, low_rank_factor
from gradprobe_hf.updates.least_squares import LeastSquares
from gradprobe_hf.updates.lowest import lowest
from tests import cases
from tests.reference.least_squares import error, normal_equations

WIDTH = 1024


def wide_problem(tokens=40, rows=6):
    """Inputs that have much in common, of unlike sizes; one is an outlier, and one is always zero."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64) + 1
    x *= torch.rand(WIDTH, generator=generator, dtype=torch.float64) + 0.1
    x[:, 5] *= 10
    x[:, 7] = 0
    other = x + 0.1 * torch.randn(x.shape, generator=generator, dtype=torch.float64)
    weight = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    return weight, x, (other - x).t() @ x


@pytest.mark.parametrize("rank", [40, 60])  # some tokens may be others again
def test_a_factor_is_the_matrix(rank):
    x = wide_problem()[1] / 100
    found = low_rank_factor(x.t() @ x, x.square().sum(0), rank)
    assert found.shape == (WIDTH, 40)
    torch.testing.assert_close(found @ found.t(), x.t() @ x)


def test_a_factor_of_float32_is_the_matrix_to_its_digits():
    x = wide_problem()[1] / 10
    whole = x.t() @ x
    unit = whole.diagonal().clamp_min(1e-12).sqrt()
    whole = whole / unit / unit[:, None]
    found = low_rank_factor(whole.float(), whole.diagonal().float(), 40).double()
    assert (found @ found.t() - whole).abs().max() < 1e-5


def test_products_inverses_and_parts_are_those_of_the_whole():
    weight, x, _ = wide_problem()
    damping = torch.linspace(0.01, 1, WIDTH, dtype=torch.float64)
    share = x / x.square().sum(0).clamp_min(1e-30).sqrt() * (1 - damping).sqrt()
    whole = share.t() @ share + damping.diag()
    whole[7, 7], damping[7] = 1, 1
    found = gram_of(whole, damping, tokens=len(x))
    assert isinstance(found, FactoredGram)
    torch.testing.assert_close(found.after(weight), weight @ whole)
    some = torch.tensor([3, 5, 7, 1000])
    torch.testing.assert_close(found.among(some), whole[some][:, some])
    shifted = torch.linalg.inv(whole + 0.7 * torch.eye(WIDTH, dtype=torch.float64))
    torch.testing.assert_close(found.inverse(0.7).after(weight), weight @ shifted)
    torch.testing.assert_close(found.inverse(0.7).rounded(0.7).after(weight), 0.7 * weight @ shifted)
    torch.testing.assert_close(found.inverse(0.7).among(some), shifted[some][:, some])


def test_a_matrix_is_updated_alike_by_either():
    weight, x, drift = wide_problem()
    mask = lowest(weight.abs(), weight.numel() // 2)
    results = []
    for tokens in (None, len(x)):
        system = LeastSquares(weight, x.t() @ x, drift, 0.5, tokens=tokens)
        revised, near = revise(system, mask, in_matrix(mask))
        results.append((revised, near, system.solved(revised, near, STEPS), system.gram))
    (whole, its_near, values, one), (factored, near, found, other) = results
    assert isinstance(one, WholeGram)
    assert isinstance(other, FactoredGram)
    assert torch.equal(whole, factored)
    torch.testing.assert_close(near, its_near)
    assert (found - values).norm() < 1e-2 * values.norm()  # conjugate gradients that are not done: rounding grows


def test_where_rows_keep_the_same_inputs_a_factor_solves_them_together(monkeypatch):
    monkeypatch.setattr(LeastSquares, "_solved", None)  # no conjugate gradients
    weight, x, _ = wide_problem()
    mask = (torch.arange(WIDTH) % 3 == 0).expand(weight.shape)
    hessian = x.t() @ x
    whole = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(WIDTH, dtype=torch.float64)
    found = LeastSquares(weight, hessian, tokens=len(x)).solved(mask)
    best = error(weight, normal_equations(weight, whole, mask), whole)
    assert error(weight, found, whole) == pytest.approx(best, rel=1e-8)


def test_without_a_token_weights_that_stay_are_as_they_were():
    """An expert that is sent nothing."""
    weight, _, _ = wide_problem()
    mask = lowest(weight.abs(), weight.numel() // 2)
    system = LeastSquares(weight, torch.zeros(WIDTH, WIDTH, dtype=torch.float64), tokens=0)
    revised, near = revise(system, mask, in_matrix(mask))
    assert int(revised.sum()) == int(mask.sum())
    torch.testing.assert_close(system.solved(revised, near), weight.masked_fill(revised, 0))


@pytest.mark.parametrize(
    ("width", "tokens"), [(WIDTH, None), (WIDTH, WIDTH // 4 + 1), (WIDTH - 1, 4)], ids=["unknown", "many", "narrow"]
)
def test_elsewhere_the_whole_is_kept(width, tokens):
    assert isinstance(gram_of(torch.eye(width), torch.ones(width), tokens), WholeGram)


@pytest.mark.parametrize("update", ["admm", "least_squares"])
def test_a_run_on_few_tokens_takes_factors_and_ends_alike(update, monkeypatch):
    results = []
    for wide in (10**9, 1):
        monkeypatch.setattr(gram, "WIDE", wide)
        made = []
        monkeypatch.setattr(gram, "FactoredGram", lambda *of, made=made: made.append(1) or FactoredGram(*of))
        model = cases.build("llama", torch.float64)
        text = [{"input_ids": torch.arange(4)[None]}]
        cases.prune(model, text, sparsity=0.5, update=update, rule="budget", apply=True)
        results.append((model, len(made)))
    (whole, none), (factored, some) = results
    assert none == 0 < some
    for name, values in whole.state_dict().items():
        assert (factored.state_dict()[name] - values).norm() <= 1e-2 * values.norm(), name
