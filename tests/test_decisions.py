"""The decisions against independent re-statements."""

from __future__ import annotations

import pytest
import torch

from gradprobe_hf.decisions.threshold import threshold_mask
from gradprobe_hf.model.targets import find_targets
from tests import cases
from tests.reference import naive


def lowest(scores, budget):
    """Names and indices of the `budget` lowest of a dict of matrices, by a plain Python sort."""
    every = [(float(value), name, i) for name, m in scores.items() for i, value in enumerate(m.flatten())]
    return {(name, i) for _, name, i in sorted(every, key=lambda entry: entry[0])[:budget]}


def as_set(masks):
    return {(name, int(i)) for name, mask in masks.items() for i in mask.flatten().nonzero()}


@pytest.mark.parametrize(
    ("name", "fisher"), [("llama", "blend"), ("gpt2", "sequence"), ("vit", "token"), ("llama", "factored")]
)
def test_two_probes_within_a_budget_restated(name, fisher):
    model = cases.build(name)
    rows, targets = cases.batches(name, batch_size=1), find_targets(model)
    names = [target.name for target in targets]
    weights = {target.name: target.matrix(model).double() for target in targets}
    budget = round(0.4 * sum(target.numel for target in targets))

    def estimate(*probes):
        def total(name, term):
            return sum(probe[name][term] for probe in probes)

        if fisher == "blend":
            return {n: (total(n, "sequence") * total(n, "factored")) ** 0.5 for n in names}
        return {n: total(n, fisher) for n in names}

    first, _ = naive.statistics(model, rows, names)
    proposed = lowest({n: weights[n] ** 2 * f for n, f in estimate(first).items()}, budget)
    masks = {n: torch.zeros(weights[n].shape, dtype=torch.bool) for n in names}
    for n, i in proposed:
        masks[n].view(-1)[i] = True
    second, _ = naive.statistics(model, rows, names, masks, 0.1)
    wanted = lowest({n: weights[n] ** 2 * f for n, f in estimate(first, second).items()}, budget)

    found = as_set(cases.prune(model, cases.batches(name), sparsity=0.4, fisher=fisher).masks)
    assert len(found) == budget
    # float32 may swap scores that agree to seven digits, at the cut only
    assert len(found ^ wanted) <= 4
    # both probes count: the answer is not the candidates'
    assert len(wanted ^ proposed) > 20


@pytest.mark.parametrize(("name", "threshold"), [("llama", 0.0), ("gpt2", 0.3), ("opt", 0.3)])
def test_the_threshold_rule_restated(name, threshold):
    model = cases.build(name, torch.float64)
    rows, targets = cases.batches(name, batch_size=1), find_targets(model)
    names = [target.name for target in targets]
    options = {"sparsity": 0.6, "score": "magnitude", "scope": "tensor"}
    candidates = cases.prune(model, cases.batches(name), **options).masks
    before, _ = naive.statistics(model, rows, names)
    after, _ = naive.statistics(model, rows, names, candidates, 0.1)
    found = cases.prune(model, cases.batches(name), rule="threshold", gradient_threshold=threshold, **options)
    pruned = given_back = 0
    for name_ in names:
        for index in candidates[name_].nonzero().tolist():
            g_0, g_1 = before[name_]["peak"][tuple(index)], after[name_]["peak"][tuple(index)]
            goes = g_1 <= g_0 * (1 + threshold) and not (g_0 == 0 and g_1 == 0)
            assert bool(found.masks[name_][tuple(index)]) == bool(goes)
            pruned, given_back = pruned + bool(goes), given_back + (not goes)
        assert not (found.masks[name_] & ~candidates[name_]).any()
    assert pruned
    assert given_back
    assert found.report.sparsity < 0.6


def test_no_evidence_keeps_the_weight_unless_it_is_zero():
    candidates = torch.tensor([True, True, True, False])
    before, after = torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.tensor([0.0, 1.0, 0.0, 0.0])
    weight = torch.tensor([1.0, 1.0, 0.0, 0.0])
    assert threshold_mask(candidates, before, after, 0.0, weight).tolist() == [False, True, True, False]


def test_tokens_that_never_occur_are_no_evidence():
    """Rows of an embedding whose token is not in the calibration text come back, and are counted."""
    model, batches = cases.build("llama"), cases.batches("llama")
    options = {"score": "magnitude", "include": ["embed_tokens"]}
    found = cases.prune(model, batches, rule="threshold", gradient_threshold=1e6, **options)
    seen = torch.zeros(cases.VOCABULARY, dtype=torch.bool)
    for batch in batches:
        seen[batch["input_ids"][:, :-1].flatten()] = True  # the last token predicts nothing
    mask = found.masks["model.embed_tokens.weight"]
    assert not mask[~seen].any()
    assert mask[seen].any()
    candidates = cases.prune(model, batches, **options).masks
    assert found.report.matrices[0].no_evidence == int(candidates["model.embed_tokens.weight"][~seen].sum())
