"""A checkpoint in FP8 or MXFP4 is saved as it was measured, in plain numbers."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, Mxfp4Config
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

from gradprobe_hf import GradProbeConfig, prune_pretrained
from gradprobe_hf.checkpoint.write import save_weights
from gradprobe_hf.model.loading.load import load_model
from tests import cases

# What a model was dequantised from, and goes back to that when it is saved.
REMEMBERS = Version(transformers.__version__) < Version("5.24")
BLOCK = 8  # inputs and outputs that share a scale


def as_fp8(name, folder, dtype=torch.float32):
    """A saved model whose matrices of blocks are FP8 with their scales, as DeepSeek publishes them."""
    cases.build(name, dtype).save_pretrained(folder)
    stored = {}
    for key, value in load_file(folder / "model.safetensors").items():
        if value.ndim != 2 or "layers" not in key or "gate.weight" in key:
            stored[key] = value
            continue
        blocks = value.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
        scale = blocks.abs().amax((1, 3), keepdim=True) / 448
        stored[key] = (blocks / scale).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn)
        stored[f"{key}_scale_inv"] = scale[:, 0, :, 0].clone()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    quantised(folder, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"})
    return folder


def as_mxfp4(folder):
    """GPT-OSS, whose experts are packed four bits with an exponent for every 32."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    config = GptOssConfig(
        **sizes, vocab_size=64, num_attention_heads=4, num_key_value_heads=2, num_local_experts=2, pad_token_id=0
    )
    config.eos_token_id = config.bos_token_id = 1
    GptOssForCausalLM(config).save_pretrained(folder)
    stored = {}
    for key, value in load_file(folder / "model.safetensors").items():
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[key] = value
            continue
        shape = (value.shape[0], value.shape[2], value.shape[1] // 32)
        stored[f"{key}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8)
        stored[f"{key}_scales"] = torch.full(shape, 121, dtype=torch.uint8)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    quantised(folder, {"quant_method": "mxfp4"})
    return folder


def quantised(folder, values):
    plain = ["lm_head", "model.embed_tokens", "re:.*gate$", "model.layers.*.self_attn", "model.layers.*.mlp.router"]
    kept = plain if values["quant_method"] == "mxfp4" else ["lm_head", "gate"]
    path = folder / "config.json"
    values = {"quantization_config": {**values, "modules_to_not_convert": kept}}
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def prune(source, out, config=None, **options):
    config = config or GradProbeConfig(score="magnitude", update="none")
    batches = cases.batches("llama")
    return prune_pretrained(
        source, config, calibration=batches, evaluation=False, progress=False, output_dir=out, **options
    )


@pytest.mark.parametrize(
    ("name", "dtype", "config"),
    [
        ("llama", torch.float32, None),
        ("llama", torch.float32, GradProbeConfig()),
        ("llama", torch.float32, GradProbeConfig(structure={"ffn": 8}, update="none")),
        ("mixtral", torch.bfloat16, None),  # its experts are dequantised and fused in one
    ],
)
def test_what_was_fp8_is_saved_in_the_dtype_that_was_measured(name, dtype, config, tmp_path):
    found = prune(as_fp8(name, tmp_path / "fp8", dtype), tmp_path / "out", config)
    assert found.report.model["stored_as"] == "fp8"
    plain = cases.build(name, dtype)
    plain.save_pretrained(tmp_path / "plain")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored.keys() == load_file(tmp_path / "plain" / "model.safetensors").keys()
    assert {tensor.dtype for tensor in stored.values()} == {dtype}
    assert found.report.files["dense_zstd"] is None, (
        "the files that were read are smaller than what it was made of them"
    )
    if found.report.structure is None:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert cases.changed(loaded, cases.bits(found.model)) == []


@pytest.mark.parametrize(
    ("make", "quantizer"),
    [(lambda folder: as_fp8("llama", folder), FineGrainedFP8HfQuantizer), (as_mxfp4, Mxfp4HfQuantizer)],
    ids=["fp8", "mxfp4"],
)
def test_a_gpu_that_computes_in_it_changes_nothing(make, quantizer, tmp_path, monkeypatch):
    """There transformers leaves the weights as they are, unless it is asked not to."""
    source = make(tmp_path / "source")
    expected = cases.bits(load_model(source, dequantize=True))
    monkeypatch.setattr(quantizer, "validate_environment", lambda *_, **__: None)
    assert cases.changed(load_model(source, dequantize=True), expected) == []
    if quantizer is FineGrainedFP8HfQuantizer:
        assert prune(source, tmp_path / "out").report.model["stored_as"] == "fp8"


def test_it_is_the_same_from_disk_and_of_a_model_in_memory(tmp_path):
    source = as_fp8("llama", tmp_path / "fp8")
    prune(source, tmp_path / "named")
    prune(source, tmp_path / "offloaded", device_map="disk")
    handed_in = prune(AutoModelForCausalLM.from_pretrained(source), tmp_path / "memory")
    if REMEMBERS:
        assert handed_in.report.model["stored_as"] == "fp8", "which its configuration no longer says"
    wanted = load_file(tmp_path / "named" / "model.safetensors")
    for folder in ("offloaded", "memory"):
        found = load_file(tmp_path / folder / "model.safetensors")
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_what_was_mxfp4_has_experts_by_their_plain_names(tmp_path):
    source = as_mxfp4(tmp_path / "mxfp4")
    model = load_model(source, quantization_config=Mxfp4Config(dequantize=True))
    save_weights(tmp_path / "out", model)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert "model.layers.0.mlp.experts.down_proj" in stored
    assert cases.changed(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), cases.bits(model)) == []


@pytest.mark.skipif(not REMEMBERS, reason="transformers writes plain weights by itself since 5.24")
@pytest.mark.parametrize(
    ("make", "difference"),
    [
        (lambda folder: as_fp8("llama", folder), r"weight is torch.float8_e4m3fn in the files, and torch.float32"),
        (as_mxfp4, r"the files have no model\.layers\.0\.mlp\.experts\.down_proj"),
    ],
)
def test_files_of_another_model_are_an_error(make, difference, tmp_path):
    """As transformers writes them of a model that it has dequantised."""
    model = AutoModelForCausalLM.from_pretrained(make(tmp_path / "source"))
    with pytest.raises(RuntimeError, match=f"another model than this .*{difference}.*Nothing was kept"):
        save_weights(tmp_path / "out", model)
