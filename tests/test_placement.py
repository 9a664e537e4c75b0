"""A model that is loaded by name goes to the accelerator, unless something says where it belongs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gradprobe_hf import GradProbeConfig, compare_pretrained, prune_pretrained
from gradprobe_hf.cli.main import main
from gradprobe_hf.model.loading import placement
from gradprobe_hf.model.loading.placement import accelerator, to_accelerator
from tests import cases


class MovedError(OSError):
    pass


@pytest.fixture
def accelerated(monkeypatch):
    """A machine whose accelerator is torch's device for everything that holds nothing."""
    monkeypatch.setattr(placement, "PartialState", lambda: SimpleNamespace(device=torch.device("meta")))


@pytest.mark.parametrize("given", [{}, {"device_map": None, "dtype": "float32"}], ids=str)
def test_it_is_moved_whole(given, accelerated):
    model = cases.build("llama")
    to_accelerator(model, given)
    assert {value.device.type for value in [*model.parameters(), *model.buffers()]} == {"meta"}


@pytest.mark.parametrize(
    "given", [{"device_map": "cpu"}, {"tp_plan": "auto"}, {"distributed_config": "sharded"}], ids=str
)
def test_it_stays_where_it_was_asked_for(given, accelerated):
    model = cases.build("llama")
    to_accelerator(model, given)
    assert {value.device.type for value in model.parameters()} == {"cpu"}


@pytest.mark.parametrize(("device", "used"), [("cuda:1", "cuda:1"), ("xpu:0", "xpu:0"), ("cpu", "cpu"), ("mps", "cpu")])
def test_the_device_is_accelerates(device, used, monkeypatch):
    monkeypatch.setattr(placement, "PartialState", lambda: SimpleNamespace(device=torch.device(device)))
    assert accelerator() == torch.device(used)


def test_one_that_does_not_fit_says_what_to_do(accelerated, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = cases.build("llama")
    monkeypatch.setattr(model, "to", full)
    with pytest.raises(
        MemoryError, match=r"LlamaForCausalLM does not fit on meta, 0\.0 GB of weights: pass device_map="
    ):
        to_accelerator(model, {})


def test_names_are_moved_and_models_in_memory_stay(checkpoint, monkeypatch, capsys):
    def moved(model, given):
        raise MovedError(f"moved, {given.get('device_map')}")

    monkeypatch.setattr(placement, "to_accelerator", moved)
    monkeypatch.setattr("gradprobe_hf.run.request.inputs.to_accelerator", moved)
    config = GradProbeConfig(sparsity=0.5, score="magnitude")
    for call in (prune_pretrained, compare_pretrained):
        with pytest.raises(MovedError, match="moved, cpu"):
            call(str(checkpoint), config, progress=False, device_map="cpu")
    assert prune_pretrained(cases.build("llama"), config, evaluation=False, progress=False).report.zeros
    assert main(["evaluate", str(checkpoint), "--data", "pydoc"]) == 1
    assert "moved, None" in capsys.readouterr().err
