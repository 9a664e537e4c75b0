"""What was loaded is what the checkpoint holds, or it is said."""

from __future__ import annotations

import json
import logging
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, BertForSequenceClassification, LlamaForCausalLM, PreTrainedModel

from gradprobe_hf import GradProbeConfig, prune_pretrained
from gradprobe_hf.cli import main
from gradprobe_hf.model.loading.load import _stored_as, load, load_model
from gradprobe_hf.model.loading.processing import is_empty, load_processing_class
from gradprobe_hf.model.loading.stored_files import stored_weights
from tests import architectures, cases, labelled


def changed_checkpoint(model, folder, change):
    """A saved model, with the tensors of its file changed."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def without(*names):
    return lambda tensors: [tensors.pop(name) for name in names]


def test_weights_that_are_missing_are_listed_and_nothing_is_pruned(tmp_path, capsys):
    gone = ["model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight"]
    folder = changed_checkpoint(cases.build("llama"), tmp_path / "base", without(*gone))
    with pytest.raises(ValueError, match=r"2 are missing: model\.layers\.0\.mlp\.up_proj\.weight, model\.layers\.1"):
        prune_pretrained(folder, calibration=cases.batches("llama"), evaluation=False, progress=False)
    assert main(["prune", str(folder), "--output", str(tmp_path / "out"), "--score", "magnitude", "--quiet"]) == 1
    said = capsys.readouterr().err
    assert "are missing: model.layers.0.mlp.up_proj.weight" in said
    assert "--allow-missing-weights" in said
    assert not (tmp_path / "out").exists()
    options = ["--score", "magnitude", "--evaluation", "none", "--quiet", "--allow-missing-weights"]
    assert main(["prune", str(folder), "--output", str(tmp_path / "out"), *options]) == 0


def test_a_head_that_was_never_trained_is_missing(tmp_path):
    base = cases.build("bert")
    base.config.architectures = None
    base.bert.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"architectures": ["BertForSequenceClassification"]}))
    with pytest.raises(ValueError, match=r"BertForSequenceClassification .* missing: .*classifier\.bias, classifier"):
        load_model(tmp_path)
    assert isinstance(load_model(tmp_path, allow_missing_weights=True), BertForSequenceClassification)


def test_a_checkpoint_of_another_architecture_names_what_it_holds(tmp_path):
    cases.build("gpt2").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(cases.build("llama").config.to_dict()))
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ValueError, match=r"are missing: .* others: transformer\.h\.0.*Of another architecture\?"):
        load_model(tmp_path)


def test_other_sizes_than_the_configuration_says_are_listed(tmp_path):
    def shorter(tensors):
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name] = tensors[name][:20].contiguous()

    folder = changed_checkpoint(cases.build("llama"), tmp_path, shorter)
    with pytest.raises(ValueError, match=r"other sizes .*up_proj\.weight \(20, 16\) for \(24, 16\)"):
        load_model(folder)
    assert load_model(folder, ignore_mismatched_sizes=True).get_parameter("model.layers.0.mlp.up_proj.weight").numel()


@pytest.mark.parametrize("name", [*cases.CASES])
def test_every_whole_checkpoint_is_whole(name, tmp_path):
    """Tied weights are stored once, and buffers not at all."""
    model = cases.build(name)
    model.save_pretrained(tmp_path)
    assert cases.changed(load_model(tmp_path), cases.bits(model)) == []


def test_weights_that_have_no_place_are_said(tmp_path, caplog):
    def more(tensors):
        tensors["value_head.weight"] = torch.ones(2)

    folder = changed_checkpoint(cases.build("llama"), tmp_path, more)
    with caplog.at_level(logging.WARNING):
        assert isinstance(load_model(folder), LlamaForCausalLM)
    assert any("will not be in the result: value_head.weight" in record.message for record in caplog.records)


@pytest.mark.parametrize("pieces", [{}, {"max_shard_size": "4KB"}], ids=["one file", "shards"])
def test_weights_that_are_loaded_in_another_type_than_stored_are_said(pieces, tmp_path, caplog):
    """config.json may ask for less than the files hold, and transformers takes that."""
    base, out = tmp_path / "base", tmp_path / "out"
    cases.build("llama").save_pretrained(base, **pieces)
    assert (base / "model.safetensors").exists() is not bool(pieces)
    values = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(values | {"dtype": "bfloat16"}))
    options = {"config": cases.config(score="magnitude"), "evaluation": False, "progress": False}
    found = prune_pretrained(base, output_dir=out, **options).report
    said = "he weights of base are stored in float32, and were loaded in bfloat16, as its config.json says; dtype="
    assert [one for one in found.warnings if said in one]
    assert caplog.text.count(said) == 1
    assert found.model["converted_from"] == "float32"
    card = (out / "README.md").read_text()
    assert f"T{said}" in card
    assert re.search(r"weights on the disk, MB \| [\d.]+, as bfloat16 \|", card)
    kept = load(base, dtype="float32")
    assert (kept.model.dtype, kept.converted_from, kept.warnings) == (torch.float32, None, ())


@pytest.mark.parametrize("pieces", [{}, {"max_shard_size": "4KB"}], ids=["one file", "shards"])
def test_a_variant_is_what_is_said_of_the_stored_weights(pieces, tmp_path):
    """Beside it lie the plain ones, which nobody has read."""
    cases.build("llama").save_pretrained(tmp_path, **pieces)
    half = cases.build("llama").to(torch.float16)
    half.save_pretrained(tmp_path, variant="fp16", **pieces)
    found = load(tmp_path, variant="fp16", dtype="float16")
    assert (found.converted_from, found.warnings) == (None, ())
    assert all(".fp16" in path.name for path in stored_weights(found.model))
    assert stored_weights(found.model)
    assert load(tmp_path, variant="fp16", dtype="float32").converted_from == "float16"
    assert load(tmp_path, dtype="float32").converted_from is None


@pytest.mark.parametrize("given", [None, "auto", "bfloat16"])
def test_files_without_a_header_have_the_type_that_the_configuration_names(given, tmp_path):
    model = cases.build("llama")
    model.config.dtype = model.dtype
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    found = load(tmp_path, **({"dtype": given} if given else {}))
    assert found.converted_from == ("float32" if given == "bfloat16" else None)
    assert found.warnings == ()


@pytest.mark.parametrize(
    ("model", "left", "told"),
    [
        # Layers that predict further tokens: DeepSeek-V3's class is told to ignore this one, and says nothing of it.
        ("DeepSeek-V3", "model.layers.61.eh_proj.weight", True),
        ("DeepSeek-V3", "model.layers.61.mlp.experts.gate_up_proj", True),
        # What older versions of transformers kept beside the weights.
        ("gpt2", "transformer.h.0.attn.bias", False),
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq", False),
        ("t5", "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight", False),
    ],
)
def test_of_what_a_class_ignores_whole_parts_are_said(model, left, told, tmp_path, caplog):
    def more(tensors):
        tensors[left] = torch.ones(2, 2)

    by_name = {one.name: one for one in architectures.ARCHITECTURES}
    whole = cases.build(model) if model in cases.CASES else by_name[model].build()
    adjust = PreTrainedModel._adjust_missing_and_unexpected_keys
    with caplog.at_level(logging.WARNING):
        loaded = load(changed_checkpoint(whole, tmp_path, more))
    assert [left in warning for warning in loaded.warnings] == [True] * told
    assert (left in caplog.text) is told
    assert PreTrainedModel._adjust_missing_and_unexpected_keys is adjust


def test_options_of_loading_mean_nothing_for_a_loaded_model():
    with pytest.raises(ValueError, match="allow_missing_weights only make sense when a model is loaded by name"):
        load_model(cases.build("llama"), allow_missing_weights=True)


def test_what_was_dequantised_once_is_called_so_ever_after(tmp_path):
    model = cases.build("llama")
    model.config.gradprobe = {"stored_as": "Q4_1"}
    model.save_pretrained(tmp_path / "base")
    batches = cases.batches("llama")
    for folder, base in (("once", tmp_path / "base"), ("twice", tmp_path / "once"), ("in memory", model)):
        found = prune_pretrained(
            base,
            GradProbeConfig(score="magnitude"),
            calibration=batches,
            evaluation=False,
            output_dir=tmp_path / folder,
            progress=False,
        )
        assert found.report.model["stored_as"] == "Q4_1"
        assert "Its weights were dequantised from Q4_1" in (tmp_path / folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("file", "wanted"),
    [
        ("smollm2-135m-instruct-q4_1.gguf", "Q4_1"),
        ("Llama-3.2-1B.Q4_K_M.gguf", "Q4_K_M"),
        ("model-IQ2_XS-00001-of-2.gguf", "IQ2_XS"),
        ("tiny-F16.gguf", "F16"),
        ("model.gguf", "GGUF"),
    ],
)
def test_a_gguf_files_name_says_what_it_was_quantised_to(file, wanted):
    assert _stored_as(cases.build("llama").config, file) == wanted


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "gpt_neox", "opt"])
def test_a_tokenizer_that_transformers_makes_of_no_files_is_none(name, tmp_path, caplog):
    """Every word is unknown to it, or no token at all."""
    model = cases.build(name)
    model.save_pretrained(tmp_path)
    assert is_empty(AutoTokenizer.from_pretrained(tmp_path)), "transformers makes one"
    assert load_processing_class(model, str(tmp_path)) is None
    assert "no file has its vocabulary" in caplog.text
    cases.tokenizer().save_pretrained(tmp_path)
    assert not is_empty(load_processing_class(model, str(tmp_path)))


def test_text_is_not_read_with_a_tokenizer_that_knows_no_words(tmp_path, text_file):
    cases.build("bert").save_pretrained(tmp_path / "bert")
    config = GradProbeConfig(num_samples=2, sequence_length=16)
    given = {"calibration": str(text_file), "evaluation": False, "progress": False}
    with pytest.raises(ValueError, match="tokenizer"):
        prune_pretrained(tmp_path / "bert", config, **given)
    made_up = AutoTokenizer.from_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match=r"BertTokenizer given as processing_class knows no words.*where they are"):
        prune_pretrained(cases.build("bert"), config, processing_class=made_up, **given)


def test_of_a_processor_without_a_vocabulary_what_reads_sound_is_kept(tmp_path, caplog):
    folder = tmp_path / "whisper"
    labelled._whisper().save_pretrained(folder)
    labelled._whisper_processor().feature_extractor.save_pretrained(folder)
    torch.manual_seed(0)
    batches = [
        {"input_features": torch.randn(2, 8, 100), "labels": torch.randint(3, 250, (2, 6))},
        {"input_features": torch.randn(2, 8, 100), "labels": torch.randint(3, 250, (2, 6))},
    ]
    result = prune_pretrained(
        folder, calibration=batches, evaluation=batches, progress=False, output_dir=tmp_path / "out"
    )
    assert "Its WhisperFeatureExtractor is taken" in caplog.text
    assert result.report.evaluation["metric"] is None
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert not [name for name in written if "token" in name or "vocab" in name]
    assert {"preprocessor_config.json", "processor_config.json"} & written
    with pytest.raises(ValueError, match="metric='wer' cannot be measured: its texts need a tokenizer"):
        prune_pretrained(folder, GradProbeConfig(metric="wer"), calibration=batches, evaluation=batches, progress=False)
