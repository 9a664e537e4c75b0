"""Which class a checkpoint is loaded as: its own, or an error that says what to do; never one without its head."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, ViTConfig

from gradprobe_hf import GradProbeConfig, bench_pretrained, prune_pretrained
from gradprobe_hf.bench.subject import Subject
from gradprobe_hf.cli import main
from gradprobe_hf.model.loading.checkpoint_class import chosen_class
from tests import cases

CODE = """
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, LlamaPreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig


class OwnForSequenceClassification(LlamaPreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = LlamaModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, labels=None, **_):
        hidden = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        there = attention_mask[..., None]
        logits = self.score((hidden * there).sum(1) / there.sum(1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)
"""
AUTO_MAP = {
    "AutoConfig": "modeling_own.OwnConfig",
    "AutoModel": "modeling_own.OwnForSequenceClassification",
    "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    "AutoModelForSequenceClassification": "modeling_own.OwnForSequenceClassification",
}
QUICK = GradProbeConfig(score="magnitude", update="none")


def with_head(folder, **config):
    """A model with tied embeddings, and a head that classifies beside them; `config` is what its file says of it."""
    cases.build("tied").save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors") | {"score.weight": torch.randn(2, 16)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


@pytest.fixture
def own_code(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the user was asked, and had said yes already"))
    named = {"architectures": ["OwnForSequenceClassification"], "model_type": "own", "auto_map": AUTO_MAP}
    folder = with_head(tmp_path / "own", **named)
    (folder / "modeling_own.py").write_text(CODE)
    return folder


def classified():
    ids = torch.randint(256, (4, 12), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([0, 1, 1, 0])}]


def prune(source, config=QUICK, calibration=None, **options):
    calibration = calibration or classified()
    return prune_pretrained(source, config, calibration=calibration, evaluation=False, progress=False, **options)


@pytest.mark.parametrize("config", [QUICK, GradProbeConfig(structure={"ffn": 8}, update="none")])
def test_code_of_its_own_is_loaded_as_the_class_that_was_saved(config, own_code, tmp_path):
    found = prune(own_code, config, trust_remote_code=True, output_dir=tmp_path / "out")
    assert type(found.model).__name__ == "OwnForSequenceClassification"
    assert not any("score" in warning for warning in found.report.warnings)
    assert "score.weight" in load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize("verb", ["estimate", "inspect"])
def test_who_trusts_code_is_not_asked_again(verb, own_code, capsys):
    assert main([verb, str(own_code), "--trust-remote-code"]) == 0
    assert capsys.readouterr().out


def test_a_class_that_nobody_knows_is_no_language_model(tmp_path, capsys):
    folder = with_head(tmp_path / "reward", architectures=["LlamaForReward"])
    with pytest.raises(ValueError, match=r"names LlamaForReward .* does not know: say .* with task \(--task\), or"):
        prune(folder)
    for verb in ("prune", "estimate"):
        output = ["--output", str(tmp_path / "out"), "--quiet"] if verb == "prune" else []
        assert main([verb, str(folder), *output]) != 0
        assert "LlamaForReward" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    found = prune(folder, GradProbeConfig(score="magnitude", update="none", task="text-classification"))
    assert type(found.model).__name__ == "LlamaForSequenceClassification"
    assert Subject.load(folder, task="text-classification").facts.cls == "LlamaForSequenceClassification"
    with pytest.raises(ValueError, match="task must be"):
        bench_pretrained([folder], task="classification")


class OwnConfig(LlamaConfig):
    model_type = "own-of-test"


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (LlamaConfig(), "AutoModelForCausalLM"),
        (LlamaConfig(architectures=["OldForCausalLM"]), "AutoModelForCausalLM"),
        (LlamaConfig(architectures=["LlamaForSequenceClassification"]), "LlamaForSequenceClassification"),
        (ViTConfig(architectures=["ViTForImageClassification"]), "ViTForImageClassification"),
        (OwnConfig(architectures=["OwnForCausalLM"], auto_map=AUTO_MAP), "AutoModelForCausalLM"),
        (
            OwnConfig(architectures=["OwnForSequenceClassification"], auto_map=AUTO_MAP),
            "AutoModelForSequenceClassification",
        ),
        # ChatGLM's configuration names what none of its classes is called.
        (OwnConfig(architectures=["OwnModel"], auto_map=AUTO_MAP), "AutoModelForCausalLM"),
    ],
)
def test_the_class_is_the_one_that_was_saved(config, wanted):
    assert chosen_class(config, ()).__name__ == wanted


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (ViTConfig(), r"names no class \(architectures\), and a ViTConfig is no causal language model"),
        (OwnConfig(), "a OwnConfig is no causal language model"),
        (OwnConfig(architectures=["OwnForReward"], auto_map=AUTO_MAP), "names OwnForReward"),
        (LlamaConfig(architectures=["LlamaRewardModel"]), "names LlamaRewardModel"),
    ],
)
def test_a_class_is_not_guessed(config, said):
    with pytest.raises(ValueError, match=rf"{said}.*--task"):
        chosen_class(config, ())


def test_weights_that_are_none_of_the_models_are_in_report_and_card(tmp_path, caplog):
    source = with_head(tmp_path / "base", architectures=["LlamaForCausalLM"])
    found = prune(source, calibration=cases.batches("llama"), output_dir=tmp_path / "out")
    said = "1 weight of base is none of LlamaForCausalLM, and will not be in the result: score.weight"
    assert f"{said}." in found.report.warnings
    assert caplog.text.count(said) == 1
    assert said in (tmp_path / "out" / "README.md").read_text()
