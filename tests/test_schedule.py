"""Schedules and orders against the same done naively: whole passes on models whose weights really are zero."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from gradprobe_hf.estimation.expected_passes import expected_passes
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.run.probing.sequential import steps
from gradprobe_hf.selection.published_rule import thresholds
from tests import cases
from tests.reference import naive


def lowest(scores, count):
    """One mask for each matrix: the `count` lowest scores of all of them, ties in index order."""
    flat = torch.cat([score.flatten().float() for score in scores.values()])
    mask = torch.zeros(len(flat), dtype=torch.bool)
    mask[flat.argsort(stable=True)[:count]] = True
    parts = mask.split([score.numel() for score in scores.values()])
    return {name: part.view(scores[name].shape) for name, part in zip(scores, parts, strict=True)}


def fisher(found, name):
    return found[name]["sequence"] * found[name]["factored"]


def masks_of_two_probes(model, original, rows, names, candidates, sparsity, served=None):
    """Two probes of `names` on a model that is pruned in part, one with the candidates at a tenth."""
    before, _ = naive.statistics(model, rows, names, served, 0.0)
    shrinking = {name: candidates[name] for name in names}
    after, _ = naive.statistics(model, rows, names, shrinking, 0.1, before)
    scores = {
        name: weight_of(original, name).square()
        * (
            (before[name]["sequence"] + after[name]["sequence"]) * (before[name]["factored"] + after[name]["factored"])
        ).sqrt()
        for name in names
    }
    return lowest(scores, round(sparsity * sum(score.numel() for score in scores.values())))


def weight_of(model, name):
    target = next(target for target in find_targets(model) if target.name == name)
    return target.matrix(model).detach().double()


def first_candidates(model, rows, names, sparsity, served=None):
    found, _ = naive.statistics(model, rows, names, served, 0.0)
    scores = {
        name: weight_of(model, name).square() * (found[name]["sequence"] * found[name]["factored"]).sqrt()
        for name in names
    }
    return lowest(scores, round(sparsity * sum(score.numel() for score in scores.values())))


def pruned(model, name, **options):
    return cases.prune(model, cases.batches(name, rows=4, batch_size=2), **options)


def rows_of(name):
    return [
        {key: value[row : row + 1] for key, value in batch.items()}
        for batch in cases.batches(name, rows=4, batch_size=2)
        for row in range(2)
    ]


@pytest.mark.parametrize(
    ("name", "block_order"), [("llama", "forward"), ("gpt2", "reverse"), ("opt", "size"), ("opt", "forward")]
)
def test_a_sequential_order_equals_whole_passes(name, block_order):
    model = cases.build(name).double().eval()
    rows = rows_of(name)
    names = [target.name for target in find_targets(model)]
    blocks = list(dict.fromkeys(target.block for target in find_targets(model)))
    candidates = first_candidates(model, rows, names, 0.5)
    decided = {}
    for block in blocks[::-1] if block_order == "reverse" else blocks:  # all are of one size here
        inside = [target.name for target in find_targets(model) if target.block == block]
        so_far = naive.shrunk_copy(model, decided, 0.0)
        decided |= masks_of_two_probes(so_far, model, rows, inside, candidates, 0.5)
    result = pruned(model, name, sparsity=0.5, order="sequential", block_order=block_order)
    assert list(result.masks) == names
    for key in names:
        assert torch.equal(result.masks[key], decided[key]), key


def test_two_blocks_in_a_step_are_decided_together():
    model = cases.build("llama").double().eval()
    rows, names = rows_of("llama"), [target.name for target in find_targets(model)]
    candidates = first_candidates(model, rows, names, 0.5)
    first = [name for name in names if "layers.2." not in name]
    decided = masks_of_two_probes(model, model, rows, first, candidates, 0.5)
    last = [name for name in names if name not in first]
    decided |= masks_of_two_probes(naive.shrunk_copy(model, decided, 0.0), model, rows, last, candidates, 0.5)
    result = pruned(model, "llama", sparsity=0.5, order="sequential", blocks_per_step=2)
    assert all(torch.equal(result.masks[key], decided[key]) for key in names)


BUDGET, THRESHOLD = {"score": "wanda", "probes": 2}, {"rule": "threshold", "gradient_threshold": 0.5}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("t5", BUDGET),
        ("mixtral", BUDGET),
        ("bert", THRESHOLD),
        ("vit", BUDGET),
        ("llama", THRESHOLD),
        ("t5", THRESHOLD),
    ],
    ids=str,
)
def test_every_family_can_be_decided_in_order(name, options):
    model = cases.build(name)
    before = cases.bits(model)
    result = pruned(model, name, sparsity=0.5, order="sequential", **options)
    assert cases.changed(model, before) == []
    assert not any("forward" in module.__dict__ for module in model.modules())
    if "rule" not in options:
        for block in {row.block for row in result.report.matrices}:
            inside = [row for row in result.report.matrices if row.block == block]
            assert sum(row.pruned for row in inside) == round(0.5 * sum(row.weights for row in inside))


def test_a_sweep_in_forward_order_costs_half_of_whole_passes():
    """Counted: how often a block runs forward, and how often gradients come back through it."""
    model = cases.build("llama")
    ran = {"forward": 0, "backward": 0}

    def count(kind, *args):
        ran[kind] += 1

    for module in model.modules():
        if type(module).__name__ == "LlamaMLP":
            module.register_forward_hook(partial(count, "forward"))
            module.register_full_backward_hook(partial(count, "backward"))
    blocks, batches = 3, 2
    result = pruned(model, "llama", sparsity=0.5, order="sequential", score="magnitude", probes=2)
    probes = 2 * (3 + 2 + 1)  # two for each step, from its block to the last
    assert ran["backward"] == batches * probes + blocks  # one batch to see what it reaches
    # and a block is run once more to hand on what it makes of the text, and once to see the order of the blocks
    assert ran["forward"] == batches * (probes + blocks) + 2 * blocks
    passes = result.report.passes
    assert passes["backward"] == pytest.approx(probes / blocks)
    assert passes["forward"] == pytest.approx(probes / blocks + 1)
    assert probes / blocks < 0.7 * 2 * blocks


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"probes": 1},
        {"score": "magnitude"},
        {"score": "wanda", "update": "obs"},
        {"score": "wanda", "probes": 2},
        {"update": "sparsegpt"},
        {"rounds": (0.2, 0.5)},
        {"order": "sequential"},
        {"order": "sequential", "blocks_per_step": 2, "update": "obs"},
        {"order": "sequential", "block_order": "reverse", "score": "wanda", "probes": 2},
        {"order": "sequential", "block_order": "reverse", "blocks_per_step": 2, "score": "magnitude", "probes": 2},
        {"order": "sequential", "score": "magnitude", "probes": 2, "update": "obs"},
    ],
    ids=str,
)
def test_the_passes_that_are_expected_are_made(options):
    report = pruned(cases.build("llama"), "llama", **options).report
    forward, backward, _ = expected_passes(cases.config(**options), blocks=3)
    assert report.passes == pytest.approx({"forward": forward, "backward": backward})


def test_steps():
    targets = find_targets(cases.build("llama"))
    order = ["model.layers.0", "model.layers.1", "model.layers.2"]
    assert steps(order, targets, "forward", 2) == [order[:2], order[2:]]
    assert steps(order, targets, "reverse", 2) == [order[1:], order[:1]]
    fewer = [target for target in targets if not (target.block == order[0] and "mlp" in target.name)]
    assert steps(order, fewer, "size", 1) == [[order[1]], [order[2]], [order[0]]]


def test_rounds_equal_probe_pairs_on_a_model_that_is_really_pruned():
    model = cases.build("llama").double().eval()
    rows, names = rows_of("llama"), [target.name for target in find_targets(model)]
    masks = None
    for sparsity in (0.3, 0.47, 0.5):
        candidates = first_candidates(model, rows, names, sparsity, masks)
        masks = masks_of_two_probes(model, model, rows, names, candidates, sparsity, masks)
    result = pruned(model, "llama", rounds=(0.3, 0.47, 0.5))
    assert result.config.sparsity == 0.5
    for key in names:
        assert torch.equal(result.masks[key], masks[key]), key
    early = pruned(model, "llama", rounds=(0.3, 0.47))
    revived = sum(int((mask & ~result.masks[key]).sum()) for key, mask in early.masks.items())
    assert revived > 0, "a later round may give a weight back"


def test_thresholds_by_pattern_in_a_sequential_order():
    """A pattern that decides about one step only, and sizes that are those of the whole model."""
    model, by_name = cases.build("llama"), {"model.layers.0.*": 0.5, "*": 0.1}
    for gradient_threshold in (by_name, "adaptive"):
        options = {"rule": "threshold", "order": "sequential", "gradient_threshold": gradient_threshold}
        result = pruned(model, "llama", **options)
        limits = dict(
            zip((t.name for t in result.targets), thresholds(result.targets, gradient_threshold), strict=True)
        )
        steps_alone = pruned(model, "llama", **options | {"gradient_threshold": limits})
        assert not cases.differing(result.masks, steps_alone.masks)


def test_a_matrix_of_several_blocks_is_in_no_step():
    model = cases.build("llama")
    model.model.layers[2].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    for options in ({"order": "sequential"}, {"update": "obs"}):
        with pytest.raises(ValueError, match=r"shared by 2 blocks \(model.layers.0, model.layers.2\)"):
            pruned(model, "llama", **options)
    assert pruned(model, "llama").report.sparsity == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("scope", ["global", "block"])
def test_bounds_hold_in_every_matrix_and_the_budget_is_exact(scope):
    model = cases.build("llama")
    free = pruned(model, "llama", sparsity=0.6, scope=scope)
    shares = [row.pruned / row.weights for row in free.report.matrices]
    low, high = 0.52, 0.66
    assert min(shares) < low
    assert max(shares) > high, "there is something to hold back"
    result = pruned(model, "llama", sparsity=0.6, scope=scope, min_matrix_sparsity=low, max_matrix_sparsity=high)
    for row in result.report.matrices:
        assert low <= row.pruned / row.weights <= high
    assert sum(row.pruned for row in result.report.matrices) == sum(row.pruned for row in free.report.matrices)
    loose = pruned(model, "llama", sparsity=0.6, scope=scope, min_matrix_sparsity=0, max_matrix_sparsity=1)
    assert not cases.differing(loose.masks, free.masks)


def test_bounds_hold_beside_zeros_that_are_there_already():
    """The first matrices are nearly empty: the others still lose their least, and no row loses what another has to."""
    model = cases.build("llama")
    for target in find_targets(model)[:7]:
        matrix = target.matrix(model)
        matrix[:, : round(0.9 * matrix.shape[1])] = 0
    result = pruned(model, "llama", sparsity=0.5, min_matrix_sparsity=0.4)
    assert all(row.pruned >= 0.4 * row.weights for row in result.report.matrices)
    assert sum(row.pruned for row in result.report.matrices) == round(0.5 * result.report.weights)


def test_inside_its_bounds_a_matrix_loses_its_lowest_scores():
    model = cases.build("llama")
    free = pruned(model, "llama", sparsity=0.6, probes=1)
    result = pruned(model, "llama", sparsity=0.6, probes=1, max_matrix_sparsity=0.62)
    for name, mask in result.masks.items():
        one, other = (mask, free.masks[name]) if mask.sum() <= free.masks[name].sum() else (free.masks[name], mask)
        assert bool((other | ~one).all()), "the smaller set of a matrix's lowest is inside the larger"


def test_a_threshold_for_each_pattern():
    targets = find_targets(cases.build("llama"))
    found = dict(zip((t.name for t in targets), thresholds(targets, {"*mlp*": 2, "*": 0.5}), strict=True))
    assert {found[name] for name in found if "mlp" in name} == {2.0}
    assert {found[name] for name in found if "mlp" not in name} == {0.5}


def test_an_adaptive_threshold_grows_with_the_matrix():
    targets = find_targets(cases.build("llama"))
    found = thresholds(targets, "adaptive")
    mean = sum(target.numel for target in targets) / len(targets)
    assert found == pytest.approx([(target.numel / mean) ** 0.5 for target in targets])
    zeros = {
        str(value): pruned(cases.build("llama"), "llama", rule="threshold", gradient_threshold=value).report.zeros
        for value in (0.3, {"*": 0.3}, "adaptive")
    }
    assert zeros["0.3"] == zeros["{'*': 0.3}"] != zeros["adaptive"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"mlp": 0.1}, r"no pattern for model.layers.0.self_attn.q_proj.weight"),
        ({"*": 0.1, "mlp": 0.2}, "'mlp' decides about no matrix"),
    ],
)
def test_thresholds_that_do_not_fit_the_model_are_refused_before_any_work(value, message):
    with pytest.raises(ValueError, match=message):
        pruned(
            cases.build("llama"),
            "llama",
            rule="threshold",
            gradient_threshold=value,
            loss_fn=lambda *batch: pytest.fail(f"no pass should be made of {batch}"),
        )
