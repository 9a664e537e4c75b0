"""Labels that count nowhere are no evidence, and that is said before any work."""

from __future__ import annotations

import pytest
import torch

from gradprobe_hf.model.passes.loss import counted_labels, summed_loss
from tests import cases

UNLABELLED = torch.full((2, 12), -100)


def masked(name, *numbers, rows=6):
    """Batches of which those with these numbers have no label that counts."""
    found = cases.batches(name, rows=rows)
    for number in numbers or range(len(found)):
        batch = found[number]
        labels = batch.get("labels", batch.get("input_ids"))
        found[number] = batch | {"labels": torch.full_like(labels, -100)}
    return found


def never(*_):
    pytest.fail("work began")


@pytest.mark.parametrize("name", ["llama", "bert", "t5", "vit"])
@pytest.mark.parametrize("part", ["calibration", "evaluation"])
def test_labels_that_are_all_masked_are_refused(name, part, monkeypatch):
    monkeypatch.setattr("gradprobe_hf.probe.engine.summed_loss", never)
    given = {"calibration": cases.batches(name), "evaluation": cases.batches(name, seed=4)} | {part: masked(name)}
    with pytest.raises(ValueError, match=rf"{part} \(list\): no batch has a label that counts"):
        cases.prune(cases.build(name), given["calibration"], evaluation=given["evaluation"], probes=1)


def test_the_first_token_is_predicted_by_none_and_padding_predicts_none():
    model = cases.build("llama")
    first = {"input_ids": cases.batches("llama")[0]["input_ids"], "labels": UNLABELLED.clone()}
    first["labels"][:, 0] = 5
    padded = first | {"labels": first["input_ids"], "attention_mask": torch.arange(12).expand(2, 12).eq(0).long()}
    masked_out = {name: padded[name] for name in ("input_ids", "attention_mask")}
    for batch in (first, padded, masked_out):
        with pytest.raises(ValueError, match="no batch has a label that counts"):
            cases.prune(model, [batch], probes=1)


def test_a_batch_without_labels_harms_a_mean_and_not_a_sum():
    cases.prune(cases.build("llama"), masked("llama", 1), probes=1)
    with pytest.raises(ValueError, match="batch 2 of 3 does not have a label that counts"):
        cases.prune(cases.build("bert"), masked("bert", 1), probes=1)


def test_labels_that_nothing_looks_at_may_be_anything():
    model = cases.build("llama")
    cases.prune(model, masked("llama"), score="wanda")
    cases.prune(model, masked("llama"), probes=1, loss_fn=lambda model, batch: model(batch["input_ids"]).logits.sum())


@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
def test_what_is_counted_is_what_the_loss_counts(name):
    batch = cases.batches(name)[0]
    labels = batch.get("labels", batch.get("input_ids")).clone()
    labels[0, 3:6], labels[1, 1:] = -100, -100
    model, batch = cases.build(name), batch | {"labels": labels}
    assert counted_labels(model, batch) == int(summed_loss(model, batch)[1])
