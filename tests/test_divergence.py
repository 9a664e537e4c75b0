"""How far a pruned model is from the dense one: against a naive double loop in float64, and against what must hold."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from gradprobe_hf.evaluation.divergence import measure_pair, ratio_interval
from gradprobe_hf.evaluation.perplexity import measure
from gradprobe_hf.model.passes.loss import LOGITS_AT_ONCE
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.probe.maps.attachment import serving
from tests import cases

NAME = "llama"


def padded():
    """Windows of unequal lengths, padded on the right and on the left."""
    batches = cases.batches(NAME, rows=6, batch_size=2)
    for number, batch in enumerate(batches):
        mask = torch.ones_like(batch["input_ids"])
        mask[0, (slice(9, None), slice(0, 3), slice(0, 0))[number]] = 0
        batch["attention_mask"] = mask
    return batches


def pair(model, batches, dtype=torch.float64):
    """The masks of a real run, served to one model; and a copy in which the weights are really zero."""
    masks = cases.prune(model, batches, sparsity=0.4).masks
    work = cases.workload(model, batches)
    found = measure_pair(work, work, lambda: serving(model, find_targets(model), masks))
    zeroed = cases.build(NAME, dtype)
    with torch.no_grad():
        for target in find_targets(zeroed):
            target.matrix(zeroed).masked_fill_(masks[target.name], 0)
    return found, zeroed


def naively(dense, pruned, batches):
    """Token by token, in Python."""
    kl, same, tokens, before, after = 0.0, 0, 0, 0.0, 0.0
    for batch in batches:
        mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
        with torch.no_grad():
            both = [model(**batch).logits.double() for model in (dense, pruned)]
        for row, ids in enumerate(batch["input_ids"]):
            for position in range(len(ids) - 1):
                if mask[row, position] and mask[row, position + 1]:
                    p, q = (logits[row, position].softmax(-1) for logits in both)
                    kl += sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
                    same += int(p.argmax() == q.argmax())
                    before -= math.log(p[ids[position + 1]])
                    after -= math.log(q[ids[position + 1]])
                    tokens += 1
    return kl / tokens, same / tokens, math.exp((after - before) / tokens)


@pytest.mark.parametrize("batches", [cases.batches(NAME), padded()], ids=["full", "padded"])
def test_it_equals_a_loop_over_tokens(batches, monkeypatch):
    model = cases.build(NAME, torch.float64)
    monkeypatch.setitem(LOGITS_AT_ONCE, "cpu", 5 * model.config.vocab_size)  # 5 rows: no batch has a multiple of it
    found, zeroed = pair(model, batches)
    kl, same, ratio = naively(model, zeroed, batches)
    assert found.divergence.kl == pytest.approx(kl, rel=1e-9)
    assert 0 < found.divergence.top1_agreement == pytest.approx(same)
    assert found.divergence.top1_agreement < 1
    assert found.divergence.perplexity_ratio == pytest.approx(ratio, rel=1e-9)
    low, high = found.divergence.perplexity_ratio_interval
    assert low < ratio < high


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_losses_have_the_bits_of_a_pass_alone(dtype):
    model, batches = cases.build(NAME, dtype), cases.batches(NAME)
    found, zeroed = pair(model, batches, dtype)
    assert found.dense == measure(cases.workload(model, batches))
    assert found.pruned == measure(cases.workload(zeroed, batches))


def test_two_models_beside_each_other_are_the_same_as_one_that_is_served():
    model, batches = cases.build(NAME), cases.batches(NAME)
    found, zeroed = pair(model, batches, torch.float32)
    beside = measure_pair(cases.workload(model, batches), cases.workload(zeroed, batches))
    assert beside.to_dict() == found.to_dict()
    for name in ("dense", "pruned", "tokens"):
        assert torch.equal(getattr(beside.windows, name), getattr(found.windows, name)), name


def test_a_model_agrees_with_itself():
    work = cases.workload(cases.build(NAME, torch.bfloat16), cases.batches(NAME))
    found = measure_pair(work, work).divergence
    assert (found.kl, found.top1_agreement, found.perplexity_ratio) == (0, 1, 1)
    assert found.perplexity_ratio_interval == (1, 1)


def test_a_mixture_of_which_nothing_goes_agrees_with_itself():
    """transformers multiplies with all experts at once, and this package with one after the other."""
    model = cases.build("mixtral")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # or rounding changes no choice of experts
    result = cases.prune(
        model.to(torch.bfloat16),
        cases.batches("mixtral"),
        score="magnitude",
        sparsity=0.0,
        evaluation=cases.batches("mixtral"),
    )
    found = result.report.evaluation
    assert found["dense"] == found["pruned"]
    assert (found["divergence"]["kl"], found["divergence"]["top1_agreement"]) == (0, 1)


def test_a_token_that_a_model_never_predicts_costs_nothing():
    class Masked(torch.nn.Module):
        def forward(self, hidden):
            return F.pad(hidden @ torch.eye(hidden.shape[-1], 259), (0, 1), value=-math.inf)

    model = cases.build(NAME)
    model.lm_head = Masked()
    work = cases.workload(model, cases.batches(NAME))
    assert measure_pair(work, work).divergence.kl == 0


@pytest.mark.parametrize("name", ["bert", "vit", "t5"])
def test_other_models_have_losses_alone(name):
    work = cases.workload(cases.build(name), cases.batches(name))
    found = measure_pair(work, work)
    assert found.divergence is None
    assert found.dense == found.pruned == measure(work)


def test_models_of_other_vocabularies_are_refused():
    model, other = cases.build(NAME), cases.build(NAME)
    other.resize_token_embeddings(270)
    with pytest.raises(ValueError, match="a vocabulary of 260 tokens and the other of 270"):
        measure_pair(*(cases.workload(one, cases.batches(NAME)) for one in (model, other)))


def test_the_interval_of_an_infinite_loss_has_no_end():
    dense, tokens = torch.full((20,), 10.0, dtype=torch.float64), torch.full((20,), 5.0, dtype=torch.float64)
    pruned = (dense + 1).index_fill(0, torch.tensor([0]), math.inf)
    assert ratio_interval(dense, pruned, tokens) == (pytest.approx(math.exp(0.2)), math.inf)


def test_windows_without_a_token_to_predict_have_no_part_in_the_interval():
    """Chats that are cut before their answers, say."""
    dense, tokens = torch.tensor([10.0, 20.0, 0.0, 0.0]), torch.tensor([5.0, 5.0, 0.0, 0.0])
    pruned = dense + torch.tensor([1.0, 3.0, 0.0, 0.0])
    assert ratio_interval(dense, pruned, tokens) == ratio_interval(dense[:2], pruned[:2], tokens[:2])
    assert ratio_interval(dense[1:], pruned[1:], tokens[1:]) is None


def test_the_interval_is_as_wide_as_the_differences_vary(monkeypatch):
    """Of many normal differences: 1.96 standard errors to each side, whatever the windows' own losses are."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.full((400,), 511.0, dtype=torch.float64)
    dense = 511 * (3 + torch.randn(400, generator=generator, dtype=torch.float64))
    difference = 0.2 + 0.05 * torch.randn(400, generator=generator, dtype=torch.float64)
    low, high = ratio_interval(dense, dense + 511 * difference, tokens)
    half = 1.96 * float(difference.std()) / 20
    assert math.log(low) == pytest.approx(float(difference.mean()) - half, abs=0.15 * half)
    assert math.log(high) == pytest.approx(float(difference.mean()) + half, abs=0.15 * half)
    assert ratio_interval(dense, dense + 511 * difference, tokens) == (low, high), "it is seeded"
    assert ratio_interval(dense[:1], dense[:1], tokens[:1]) is None
    monkeypatch.setattr("gradprobe_hf.evaluation.divergence.DRAWN_AT_ONCE", 7 * 400)
    assert ratio_interval(dense, dense + 511 * difference, tokens) == (low, high), "in small parts, too"
