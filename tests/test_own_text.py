"""The model's own text: sampled as it says, the same whoever writes it, kept with a run, and what is calibrated on."""

from __future__ import annotations

import logging
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from gradprobe_hf import GradProbeConfig
from gradprobe_hf.data.text import self_generated
from gradprobe_hf.data.text.self_generated import KeptText, own_text
from gradprobe_hf.model.passes import decoding
from gradprobe_hf.run.request.inputs import default_calibration
from gradprobe_hf.runtime.processes import Processes
from tests import cases


@torch.no_grad()
def sampled(model, first, chances):
    """Token by token from whole passes: the first token whose cumulative probability is above a chance."""
    ids = first
    for chance in chances[len(first) :]:
        probabilities = model(torch.tensor([ids])).logits[0, -1].double().softmax(-1)
        probabilities[257] = 0  # the end of a text is not written
        upto = (probabilities / probabilities.sum()).cumsum(0)
        ids = [*ids, int((upto > chance).nonzero()[0])]
    return ids


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_every_token_is_drawn_from_the_models_distribution(name, monkeypatch):
    monkeypatch.setattr(decoding, "SLOTS", 4)  # so that the cache grows
    model = cases.build(name)
    asked = {"suppress_tokens": [*range(20)], "return_dict_in_generate": True}
    model.generation_config.update(cache_implementation="static", use_cache=False, **asked)  # whatever it says
    before, attributes = torch.random.get_rng_state(), set(model.__dict__)
    found = own_text(model, 3, 12, seed=4, progress=False)
    chances = torch.rand(3, 12, generator=torch.Generator().manual_seed(4), dtype=torch.float32)
    assert found.tolist() == [sampled(model, [256], row.tolist()) for row in chances]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert set(model.__dict__) == attributes


def test_how_many_are_written_at_once_does_not_matter(monkeypatch):
    model = cases.build("llama")
    whole = own_text(model, 5, 10, seed=0, progress=False)
    monkeypatch.setattr(self_generated, "WRITTEN_AT_ONCE", 2)
    assert torch.equal(own_text(model, 5, 10, seed=0, progress=False), whole)
    monkeypatch.setattr(self_generated, "CACHE_BYTES", 1)
    assert self_generated.written_at_once(model, 10) == 1


def test_windows_begin_with_what_they_are_given_or_with_a_random_token():
    model = cases.build("llama")
    assert (own_text(model, 2, 6, 0, begins=(7, 8), progress=False)[:, :2] == torch.tensor([7, 8])).all()
    for none in (None, 50256):  # which a small model has of its family's vocabulary
        model.generation_config.bos_token_id = model.generation_config.eos_token_id = none
        assert len(set(own_text(model, 8, 3, 0, progress=False)[:, 0].tolist())) > 1


class Alone(Processes):
    """Of two processes, this one's part of every sum."""

    def sum_(self, tensor):
        return tensor


def test_each_process_writes_what_the_others_do_not():
    model = cases.build("llama")
    whole = own_text(model, 5, 8, seed=1, progress=False)
    parts = [own_text(model, 5, 8, 1, processes=Alone(rank=rank, count=2), progress=False) for rank in (0, 1)]
    assert torch.equal(parts[0] + parts[1], whole)
    assert not (parts[0].bool() & parts[1].bool()).any()


def test_a_text_is_kept_and_read_again_by_the_same_run_alone(tmp_path):
    kept = KeptText(tmp_path / "process-0" / "own_text.safetensors", "weights", Processes())
    first = kept.read_or_write({"seed": 0}, lambda: torch.tensor([[1, 2]]))
    assert torch.equal(kept.read_or_write({"seed": 0}, lambda: 1 / 0), first)
    other = KeptText(kept.path, "other weights", Processes())
    assert other.read_or_write({"seed": 0}, lambda: torch.tensor([[3]])).tolist() == [[3]]
    assert kept.read_or_write({"seed": 1}, lambda: torch.tensor([[4]])).tolist() == [[4]]
    assert [path.name for path in kept.path.parent.iterdir()] == ["own_text.safetensors"]


SMALL = {"sparsity": 0.5, "num_samples": 4, "sequence_length": 16, "evaluation_samples": 2, "probes": 1}


def test_a_run_that_fails_goes_on_with_the_text_it_had(tmp_path, monkeypatch):
    model, tokenizer = cases.build("llama"), cases.tokenizer()
    run = {"processing_class": tokenizer, "resume_dir": tmp_path / "state", "save_every": 1, "batch_size": 1, **SMALL}
    whole = cases.prune(model, "self", **{**run, "resume_dir": None, "save_every": 16})
    two = iter(range(2))
    with pytest.raises(RuntimeError, match="stopped"):
        cases.prune(model, "self", loss_fn=partial(_loss, passes=two), **run)
    assert (tmp_path / "state" / "process-0" / "own_text.safetensors").exists()
    monkeypatch.setattr("gradprobe_hf.data.windows.own_text", lambda *args, **options: 1 / 0)  # is not written again
    found = cases.prune(model, "self", loss_fn=_loss, **run)
    assert found.report.calibration["fingerprint"] == whole.report.calibration["fingerprint"]
    assert not (tmp_path / "state").exists()


def _loss(model, batch, passes=None):
    """Fails when there are no passes left."""
    if passes is not None and next(passes, None) is None:
        raise RuntimeError("stopped")
    return model(**batch, labels=batch["input_ids"]).loss * 15


def test_by_default_the_model_writes_and_the_manual_measures():
    found = cases.prune(
        cases.build("llama"),
        None,
        evaluation=None,
        processing_class=cases.tokenizer(),
        probes=1,
        num_samples=2,
        sequence_length=16,
        evaluation_samples=2,
    ).report
    assert found.calibration["source"] == "the model's own text"
    assert found.evaluation["source"].startswith("pydoc (evaluation part)")


def test_a_model_whose_weights_are_elsewhere_does_not_write_by_default(monkeypatch, caplog):
    assert default_calibration(cases.build("llama")) == "self"
    assert default_calibration(cases.build("bert")) == "pydoc"
    monkeypatch.setattr("gradprobe_hf.run.request.inputs.is_offloaded", lambda model: True)
    assert default_calibration(cases.build("llama")) == "pydoc"
    assert "calibrating on the Python manual" in caplog.text


def test_a_default_window_is_as_long_as_the_model_has_positions(caplog):
    caplog.set_level(logging.INFO)
    tokenizer = cases.tokenizer()
    found = cases.prune(cases.build("llama"), "self", processing_class=tokenizer, probes=1, num_samples=2)
    assert "2 windows of 64 tokens" in found.report.calibration["protocol"]
    assert "windows have 64 tokens, as many as the model reads of a text" in caplog.text
    assert GradProbeConfig().sequence_length is None
    with pytest.raises(ValueError, match="sequence_length=512 is more than the 64 positions"):
        cases.prune(cases.build("llama"), "self", processing_class=tokenizer, sequence_length=512)


def test_a_process_without_a_window_writes_none():
    """Of more processes than there are windows."""
    idle = SimpleNamespace(mine=lambda _: [], sum_=lambda values: values)
    assert own_text(cases.build("llama"), 2, 6, 0, progress=False, processes=idle).tolist() == [[0] * 6] * 2
