"""A budget of latency: the table against a clock that counts, the shapes that it allows, what the card says."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from accelerate import cpu_offload
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from gradprobe_hf import GradProbeConfig, prune_pretrained
from gradprobe_hf.cli.output import print_pruning
from gradprobe_hf.model.families import cache_name
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.run.shapes import latency, search
from gradprobe_hf.run.shapes.latency import Timed
from gradprobe_hf.structures.plan import Plan
from tests import cases
from tests.test_budgets import BLOCKS, deep

AROUND, BLOCK, CHANNEL, HEAD = 2.0, 1.0, 0.05, 0.3  # seconds


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(latency, "ROUNDS", 3)
    monkeypatch.setattr(latency, "WARMUP", 1)


def cost(config):
    """Of a whole model, by its configuration."""
    block = BLOCK + CHANNEL * config.intermediate_size + HEAD * config.num_key_value_heads
    return Timed(AROUND + config.num_hidden_layers * block, config.num_hidden_layers * block)


@pytest.fixture
def counted(monkeypatch):
    """A clock that counts, and all that it was asked about."""
    asked = []

    def time(subject):
        asked.append(subject._model.config)
        return cost(subject._model.config)

    monkeypatch.setattr(latency._Subject, "time", time)
    return asked


def test_the_table_is_what_whole_models_take(counted):
    model, made = deep(), []
    table = latency._timed_table(
        model, find_targets(model), {"kv_groups": [0, 1], "blocks": [0, 1, 2], "ffn": list(range(0, 24, 2))}
    )
    assert {config.num_hidden_layers for config in counted} == {1}
    for going in ({}, {"ffn": 5}, {"ffn": 22, "kv_groups": 1}, {"blocks": 2, "kv_groups": 1}, {"ffn": 3, "blocks": 1}):
        values = model.config.to_dict()
        values["intermediate_size"] -= going.get("ffn", 0)
        values["num_key_value_heads"] -= going.get("kv_groups", 0)
        values["num_hidden_layers"] -= going.get("blocks", 0)
        assert table(going) == pytest.approx(cost(type(model.config)(**values)).whole)
        made.append(table(going))
    assert made[0] == table.dense
    assert table.terms["prompt_length"] + table.terms["new_tokens"] == 64  # its positions


def test_a_budget_is_met_by_the_table_and_measured(counted, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(search, "TRIED", 2)
    model, batches = deep(), cases.batches("llama", rows=8)
    config = GradProbeConfig(structure="auto", latency=0.7)
    result = prune_pretrained(
        model, config, calibration=batches, evaluation=False, output_dir=tmp_path / "made", progress=False
    )
    found = result.report.structure
    dense = cost(model.config).whole
    smaller = type(model.config)(**{**model.config.to_dict(), **found["after"]})
    assert found["latency"]["ratio"] == pytest.approx(cost(smaller).whole / dense)
    assert found["latency"]["table"] == pytest.approx(found["latency"]["ratio"])
    assert (found["latency"]["dense"], found["latency"]["rounds"]) == (pytest.approx(dense), 3)
    assert all(one["latency"] <= 0.7 for one in found["candidates"])
    # Nothing can be given back: with a step less of any structure it takes longer than it may.
    for one in found["candidates"]:
        for name, step in (("ffn", 2), ("kv_groups", 1), ("blocks", 1)):
            if one["removed"].get(name):
                less = one["removed"] | {name: one["removed"][name] - step}
                block = BLOCK + CHANNEL * (24 - less.get("ffn", 0)) + HEAD * (2 - less.get("kv_groups", 0))
                assert AROUND + (BLOCKS - less.get("blocks", 0)) * block > 0.7 * dense
    card = (tmp_path / "made" / "README.md").read_text()
    assert "`latency=0.7`" in card
    assert f"took {found['latency']['ratio']:.2f} of the dense model's time" in " ".join(card.split())
    assert not [one for one in result.report.warnings if "latency" in one]
    print_pruning(result.report, tmp_path / "made")
    assert f"latency: {found['latency']['ratio']:.2f} of the dense model's measured" in " ".join(
        capsys.readouterr().out.split()
    )
    assert GradProbeConfig.from_pretrained(tmp_path / "made").latency == 0.7


@pytest.mark.parametrize("asked", [0.7, "0.7"])
def test_what_the_table_promised_and_the_model_does_not_keep_is_a_warning(asked, counted, monkeypatch):
    monkeypatch.setattr(search, "TRIED", 1)
    monkeypatch.setattr(search, "measured_latency", lambda *_: {"dense": 2.0, "smaller": 1.9, "ratio": 0.95})
    options = {"calibration": cases.batches("llama"), "evaluation": False, "apply": False, "progress": False}
    result = prune_pretrained(deep(), GradProbeConfig(structure="auto", latency=asked, update="none"), **options)
    (said,) = [one for one in result.report.warnings if "latency" in one]
    assert "latency=0.7 was asked for, and a model of the shape that was chosen took 0.95" in said


@pytest.mark.parametrize("name", ["llama", "mixtral", "vit"])
def test_seconds_are_of_the_model_and_of_its_block(name):
    model = cases.build(name)
    state, dense = torch.get_rng_state(), cases.bits(model)
    axes = {"llama": {"ffn": [0, 8]}, "mixtral": {"experts": [0, 1, 2]}, "vit": {"ffn": [0, 8]}}[name]
    table = latency._timed_table(model, find_targets(model), axes)
    assert 0 < table.block < table.dense
    assert table.terms["new_tokens"] == (0 if name == "vit" else 32)
    assert torch.equal(torch.get_rng_state(), state)
    assert cases.changed(model, dense) == []
    # A block that waits is one that takes longer.
    subject = latency._Subject(model, 8, next(one for one in model.modules() if isinstance(one, nn.ModuleList))[0])
    before = subject.time()
    assert 0 < before.inside < before.whole


REFUSED = [
    ({"latency": 1.2}, "latency must be a share of the model's in (0, 1), like 0.7, got 1.2"),
    ({"latency": -0.7}, "latency must be a share"),
    ({"latency": "100ms"}, "latency must be a share"),
    ({"latency": 0.7, "params": 0.7}, "got params=0.7 and latency=0.7"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=str)
def test_a_latency_that_is_none_is_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        GradProbeConfig(structure="auto", **options)
    with pytest.raises(ValueError, match=re.escape("belongs to structure='auto'")):
        GradProbeConfig(latency=0.7)


def test_one_that_no_shape_meets_names_the_nearest(counted):
    options = {"calibration": cases.batches("llama"), "evaluation": False, "progress": False}
    said = (
        r"latency=0.1 \(.* seconds\) is less than any shape .* nearest are structure=.* seconds \(latency=0\.\d+\) and "
    )
    with pytest.raises(ValueError, match=said):
        prune_pretrained(deep(), GradProbeConfig(structure="auto", latency=0.1), **options)
    with pytest.raises(ValueError, match=r"parts of this one are offloaded\. Give another budget"):
        cases.prune(cpu_offload(deep()), cases.batches("llama"), structure="auto", latency=0.7)


def test_of_an_encoder_and_a_decoder_no_latency_is_asked_for():
    config = GradProbeConfig(structure="auto", latency=0.8, num_samples=4)
    with pytest.raises(ValueError, match="latency is that of blocks of one stack, and T5ForConditionalGeneration"):
        prune_pretrained(cases.build("t5"), config, calibration=cases.batches("t5"), evaluation=False, progress=False)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "rwkv"])
def test_a_state_in_place_of_a_cache_is_handed_on(name):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 260}
    options = {
        "mamba": {"state_size": 4},
        "mamba2": {"num_heads": 4, "head_dim": 8, "state_size": 4, "n_groups": 1},
        "rwkv": {"attention_hidden_size": 16},
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes, **options[name])).eval()
    latency.check_timeable(model, Plan.of(model, find_targets(model), {}))
    given = []
    cache = cache_name(model)
    model.register_forward_pre_hook(lambda _, __, kwargs: given.append(kwargs.get(cache)), with_kwargs=True)
    assert latency._Subject(model, length=8).time().whole > 0
    assert given[0] is None
    assert len(given) == 1 + latency.STEPS
    assert all(one is not None for one in given[1:])


def test_what_keeps_nothing_of_a_text_is_refused_before_text_is_read():
    sizes = {"n_embd": 16, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 260}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("openai-gpt", **sizes)).eval()

    def text():
        pytest.fail("read")
        yield

    config = GradProbeConfig(structure="auto", latency=0.8)
    with pytest.raises(ValueError, match=r"OpenAIGPTLMHeadModel cannot be given .* params=0\.75"):
        prune_pretrained(model, config, calibration=text(), evaluation=False, progress=False)


def test_the_dense_model_is_timed_in_memory_of_its_own_where_there_is_room(monkeypatch):
    model = cases.build("llama")
    context = SimpleNamespace(model=model, targets=find_targets(model))
    other = latency._own_memory(context)
    assert other is not model
    assert shapes_of(other) == shapes_of(model)
    monkeypatch.setattr(latency, "available_bytes", lambda _: 0)
    assert latency._own_memory(context) is model


def shapes_of(model):
    return {name: one.shape for name, one in model.state_dict().items()}


def test_where_memory_has_no_room_for_models_of_one_block_latency_is_refused(monkeypatch):
    monkeypatch.setattr("gradprobe_hf.estimation.machine.available_bytes", lambda _: 100_000)
    with pytest.raises(ValueError, match=r"latency is told by \d+ models of one block each, with the embeddings"):
        cases.prune(deep(), cases.batches("llama"), structure="auto", latency=0.7)
