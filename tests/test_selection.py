"""Selection is exact: against a full stable sort, on random, tied, subnormal and infinite scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gradprobe_hf.model.targets import Site, Target
from gradprobe_hf.scores.budget import Budget
from gradprobe_hf.scores.groups import group_mask, row_mask
from gradprobe_hf.selection.cut import find_cut
from gradprobe_hf.selection.keys import key_range, score_keys
from gradprobe_hf.selection.masked_values import zero_masked_
from gradprobe_hf.selection.packed_masks import PackedMasks, multipliers_of
from gradprobe_hf.selection.select import select_masks

FLOATS = st.floats(min_value=0, width=32, allow_nan=False, allow_infinity=True, allow_subnormal=True)
FEW = st.sampled_from([0.0, 1e-45, 1e-40, 1.0, 1.0000001, 3e38, float("inf")])


def target(name, shape, block="b"):
    return Target(name, name, shape, False, (Site(name, "linear"),), block, name)


def fully_sorted(scores, zero, budget):
    """The mask that a stable sort of everything gives: zeros first, then by score, then by index."""
    order = np.lexsort((np.arange(scores.size), np.where(zero.ravel(), -1.0, scores.ravel().astype(np.float64))))
    mask = np.zeros(scores.size, dtype=bool)
    mask[order[:budget]] = True
    return mask.reshape(scores.shape)


def split_rows(scores, parts):
    """The same scores as several matrices, in order."""
    return {f"m{i}": part for i, part in enumerate(np.array_split(scores, parts)) if part.size}


def selected(matrices, zeros, sparsity, scope="global"):
    targets = [target(name, matrix.shape, block=name[:2]) for name, matrix in matrices.items()]

    def keys(t):
        weight = torch.from_numpy(np.where(zeros[t.name], 0.0, 1.0))
        return [score_keys(torch.from_numpy(matrices[t.name]), weight, t.name)]

    return select_masks(targets, keys, Budget(sparsity, scope))


@settings(max_examples=150, deadline=None)
@given(
    scores=hnp.arrays(np.float32, st.tuples(st.integers(1, 30), st.integers(1, 12)), elements=st.one_of(FLOATS, FEW)),
    sparsity=st.floats(0, 0.999),
    parts=st.integers(1, 4),
    zero_share=st.sampled_from([0.0, 0.2, 0.9]),
)
def test_global_selection_is_a_full_sort(scores, sparsity, parts, zero_share):
    zero = np.random.default_rng(0).random(scores.shape) < zero_share
    masks = selected(split_rows(scores, parts), split_rows(zero, parts), sparsity)
    found = np.concatenate([mask.numpy() for mask in masks.values()])
    assert np.array_equal(found, fully_sorted(scores, zero, round(sparsity * scores.size)))


@pytest.mark.parametrize("kind", ["random", "tied", "subnormal", "all equal"])
def test_a_million_scores(kind):
    rng = np.random.default_rng(1)
    scores = {
        "random": rng.lognormal(sigma=8, size=(1000, 1000)),
        "tied": rng.integers(0, 40, size=(1000, 1000)),
        "subnormal": rng.integers(0, 5000, size=(1000, 1000)) * 1.401298464324817e-45,
        "all equal": np.full((1000, 1000), 0.25),
    }[kind].astype(np.float32)
    masks = selected(split_rows(scores, 7), split_rows(np.zeros_like(scores, dtype=bool), 7), 0.37)
    found = np.concatenate([mask.numpy() for mask in masks.values()])
    assert found.sum() == 370_000
    assert np.array_equal(found, fully_sorted(scores, np.zeros_like(scores, dtype=bool), 370_000))


@pytest.mark.parametrize("scope", ["row", "tensor", "block"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_unit_of_a_scope_has_its_own_exact_budget(scope, data):
    shape = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    sparsity = data.draw(st.floats(0, 0.999))
    matrices = {
        name: data.draw(hnp.arrays(np.float32, shape, elements=FEW)) for name in ("b0.q", "b0.k", "b1.q", "b1.k")
    }
    nothing = {name: np.zeros(shape, dtype=bool) for name in matrices}
    masks = {name: mask.numpy() for name, mask in selected(matrices, nothing, sparsity, scope).items()}
    if scope == "block":
        units = [
            (np.concatenate([matrices[f"{b}.{r}"] for r in "qk"]), np.concatenate([masks[f"{b}.{r}"] for r in "qk"]))
            for b in ("b0", "b1")
        ]
    elif scope == "tensor":
        units = [(matrices[name], masks[name]) for name in matrices]
    else:
        units = [(matrices[name][i], masks[name][i]) for name in matrices for i in range(shape[0])]
    for scores, mask in units:
        wanted = fully_sorted(scores, np.zeros(scores.shape, dtype=bool), round(sparsity * scores.size))
        assert np.array_equal(mask, wanted)


@settings(max_examples=60, deadline=None)
@given(
    scores=hnp.arrays(np.float32, (6, 24), elements=st.one_of(FEW, FLOATS)),
    group=st.sampled_from([(2, 4), (1, 4), (4, 8), (1, 2), (5, 6)]),
)
def test_groups_keep_the_n_highest_of_every_m(scores, group):
    n, m = group
    keys = score_keys(torch.from_numpy(scores), torch.ones(6, 24), "w")
    mask = group_mask(keys, n, m).numpy()
    for row, row_mask_ in zip(scores.reshape(-1, m), mask.reshape(-1, m), strict=True):
        assert np.array_equal(row_mask_, fully_sorted(row, np.zeros(m, dtype=bool), m - n))


def test_more_budget_never_gives_a_weight_back():
    scores = {"m": np.random.default_rng(2).integers(0, 30, (20, 16)).astype(np.float32)}
    nothing = {"m": np.zeros((20, 16), dtype=bool)}
    for scope in ("global", "row", "tensor"):
        last = torch.zeros(20, 16, dtype=torch.bool)
        for sparsity in np.linspace(0, 0.99, 23):
            mask = selected(scores, nothing, float(sparsity), scope)["m"]
            assert not (last & ~mask).any()
            last = mask


def test_permuting_rows_permutes_the_mask():
    rng = np.random.default_rng(3)
    scores = rng.permutation(400).reshape(20, 20).astype(np.float32)  # no ties: those are cut by index
    nothing = {"m": np.zeros((20, 20), dtype=bool)}
    order = rng.permutation(20)
    for scope in ("global", "row", "tensor"):
        plain = selected({"m": scores}, nothing, 0.43, scope)["m"]
        permuted = selected({"m": scores[order]}, nothing, 0.43, scope)["m"]
        assert torch.equal(plain[order], permuted)


def test_zeros_that_are_there_count_towards_the_budget():
    weight = torch.tensor([[1.0, 0.0, 2.0, 0.0]])
    keys = score_keys(torch.tensor([[0.0, 5.0, 1.0, 9.0]]), weight, "w")
    assert row_mask(keys, 2).tolist() == [[False, True, False, True]]


def test_what_whole_weights_leave_of_a_bound_is_taken_by_score():
    """Every matrix of nine may lose half: the halves of weights are no reason to cut in index order."""
    scores = {f"m{number}": torch.arange(9, 0, -1).view(3, 3).float() + number for number in range(4)}
    targets = [target(name, (3, 3)) for name in scores]
    budget = Budget(0.5, bounds=(0.0, 0.5))
    masks = select_masks(targets, lambda t: [score_keys(scores[t.name], torch.ones(3, 3), t.name)], budget)
    assert sum(int(masks[name].sum()) for name in scores) == 18
    for name, score in scores.items():
        assert score[masks[name]].max() < score[~masks[name]].min()


@pytest.mark.parametrize("bounds", [(0.0, 0.9), (0.01, 1.0), (0.1, 0.9)])
def test_bounds_keep_zeros_that_are_there_before_scores_of_zero(bounds):
    """Dead inputs score 0 and come first by index; what is zero already counts towards the budget all the same."""
    scores = {f"m{number}": torch.rand(8, 10, generator=torch.Generator().manual_seed(number)) for number in range(3)}
    weights = {name: torch.ones(8, 10) for name in scores}
    for name, score in scores.items():
        score[:, :4] = 0.0
        weights[name][:, 8:] = 0.0
    targets = [target(name, (8, 10)) for name in scores]
    masks = select_masks(
        targets, lambda t: [score_keys(scores[t.name], weights[t.name], t.name)], Budget(0.3, bounds=bounds)
    )
    assert sum(int(masks[name].sum()) for name in scores) == 72
    assert sum(int((masks[name] | (weights[name] == 0)).sum()) for name in scores) == 72


def test_zeros_beyond_an_upper_bound_count_towards_the_budget():
    weights = {"full": torch.ones(10, 100), "empty": torch.ones(10, 100)}
    weights["empty"].view(-1)[:900] = 0
    scores = {name: torch.rand(10, 100, generator=torch.Generator().manual_seed(1)) for name in weights}
    targets = [target(name, (10, 100)) for name in weights]
    masks = select_masks(
        targets, lambda t: [score_keys(scores[t.name], weights[t.name], t.name)], Budget(0.5, bounds=(0.0, 0.7))
    )
    zeros = {name: int((masks[name] | (weight == 0)).sum()) for name, weight in weights.items()}
    assert zeros == {"full": 100, "empty": 900}


def test_an_infinite_score_goes_last():
    scores = np.array([[np.inf, 1.0, 3e38, np.inf]], dtype=np.float32)
    nothing = {"m": np.zeros((1, 4), dtype=bool)}
    assert selected({"m": scores}, nothing, 0.5)["m"].tolist() == [[False, True, True, False]]
    assert selected({"m": scores}, nothing, 0.75)["m"].tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("bad", [float("nan"), -1.0, float("-inf")])
def test_a_score_that_orders_nothing_is_refused_by_name(bad):
    with pytest.raises(ValueError, match=r"layers\.3\.q_proj"):
        score_keys(torch.tensor([[1.0, bad]]), torch.ones(1, 2), "layers.3.q_proj")


def test_the_cut_reads_its_stream_twice_and_never_joins_it():
    reads = []
    parts = [
        torch.randint(0, 1000, (50,), dtype=torch.int32, generator=torch.Generator().manual_seed(i)) for i in range(5)
    ]

    def stream():
        reads.append(1)
        return iter(parts)

    cut = find_cut(stream, 100)
    together = torch.cat(parts)
    assert len(reads) == 2
    assert (together < cut.key).sum() + cut.ties == 100
    assert 0 < cut.ties <= (together == cut.key).sum()


def test_a_key_remembers_its_score():
    keys = score_keys(torch.tensor([[0.5, 2.0, 7.0]]), torch.tensor([[1.0, 1.0, 1.0]]), "w")
    assert key_range(keys) == (0.5, 7.0)
    assert key_range(score_keys(torch.tensor([[3.0, 2.0]]), torch.tensor([[0.0, 1.0]]), "w")) == (0.0, 2.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
def test_zeroing_is_exact_whatever_is_there(dtype, transposed):
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(7, 13, generator=generator).to(dtype)
    matrix[0, 0], matrix[1, 1], matrix[2, 2], matrix[3, 3] = torch.nan, torch.inf, -torch.inf, -0.0
    mask = torch.rand(7, 13, generator=generator) < 0.5
    mask[[0, 1, 2], [0, 1, 2]] = True
    wanted = matrix.clone().masked_fill_(mask, 0)
    view, masked = (matrix.t(), mask.t()) if transposed else (matrix, mask)
    zero_masked_(view, masked)
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[matrix.element_size()]
    assert torch.equal(matrix.view(integers), wanted.view(integers))


def test_asking_for_a_name_unpacks_no_mask(monkeypatch):
    masks = PackedMasks({"one": torch.ones(2, 3, dtype=torch.bool)})
    monkeypatch.setattr("gradprobe_hf.selection.packed_masks.unpack", lambda *_: pytest.fail("unpacked"))
    assert "one" in masks
    assert "two" not in masks


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [16, 13, 3])
@pytest.mark.parametrize("factor", [0.1, 0.0])
def test_what_shrinks_is_the_factor_under_the_mask(factor, columns, dtype):
    mask = torch.rand(7, columns, generator=torch.Generator().manual_seed(0)) < 0.5
    wanted = torch.where(mask[2:5], torch.tensor(factor, dtype=dtype), torch.tensor(1.0, dtype=dtype))
    for masks in ({"one": mask}, PackedMasks({"one": mask})):
        found = multipliers_of(masks, "one", slice(2, 5), factor, dtype, torch.device("cpu"))
        assert found.dtype == dtype
        assert torch.equal(found, wanted)


def test_a_shard_without_rows_has_a_mask_without_rows():
    masks = PackedMasks({"a": torch.zeros(0, 13, dtype=torch.bool)})
    assert masks["a"].shape == (0, 13)
    assert multipliers_of(masks, "a", slice(0, 0), 0.1, torch.float32, torch.device("cpu")).shape == (0, 13)


@pytest.mark.parametrize(("bounds", "sparsity", "wanted"), [((0.07, 1.0), 0.3, [53, 7]), ((0.0, 0.29), 0.2, [29, 11])])
def test_a_bound_is_as_many_weights_as_it_says(bounds, sparsity, wanted):
    """In binary 0.07 of 100 is more than 7, and 0.29 of them less than 29."""
    scores = {"a": torch.arange(100.0).view(10, 10), "b": 1000 + torch.arange(100.0).view(10, 10)}
    targets = [target(name, (10, 10)) for name in scores]
    masks = select_masks(
        targets,
        lambda t: [score_keys(scores[t.name], torch.ones(10, 10), t.name)],
        Budget(sparsity, bounds=bounds),
    )
    assert [int(masks[name].sum()) for name in scores] == wanted


def test_a_bound_holds_among_infinite_scores():
    scores = {name: torch.tensor([[1.0, torch.inf, torch.inf, torch.inf]]) for name in ("a", "b")}
    targets = [target(name, (1, 4)) for name in scores]
    masks = select_masks(
        targets, lambda t: [score_keys(scores[t.name], torch.ones(1, 4), t.name)], Budget(0.5, bounds=(0.0, 0.5))
    )
    assert [int(masks[name].sum()) for name in scores] == [2, 2]
