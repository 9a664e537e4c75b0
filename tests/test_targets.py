"""Which matrices are pruned."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, MusicgenDecoderConfig, MusicgenForCausalLM

from gradprobe_hf import GradProbeConfig
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.run.request.compatibility import check_editable, check_group, check_shapes
from tests import cases
from tests.structure_page import SIZES


@pytest.mark.parametrize("name", cases.CASES)
def test_the_linear_maps_of_the_blocks_and_nothing_else(name):
    model = cases.build(name)
    targets = find_targets(model)
    assert sum(target.numel for target in targets) == cases.CASES[name].targets
    for target in targets:
        assert target.block
        assert not any(
            part in target.name for part in ("embed", "wte", "wpe", "lm_head", "shared", "relative", "classifier")
        )
        assert target.matrix(model).shape == target.shape
        stored = model.get_parameter(target.parameter)
        slice_ = stored if target.expert is None else stored[target.expert]
        assert target.matrix(model).data_ptr() == slice_.data_ptr()


def test_a_conv1d_is_transposed():
    target = find_targets(cases.build("gpt2"), include=["h.0.attn.c_attn"])[0]
    assert target.transposed
    assert target.shape == (48, 16)  # stored [16, 48]


def test_every_expert_of_a_fused_tensor_is_a_target():
    model = cases.build("mixtral")
    experts = find_targets(model, include=["experts.down_proj"])
    assert [target.name for target in experts[:2]] == [f"model.layers.0.mlp.experts.down_proj[{e}]" for e in (0, 1)]
    assert len(experts) == 2 * 4
    assert {target.shape for target in experts} == {(16, 24)}
    assert {target.role for target in experts} == {"mlp.experts.down_proj"}
    model.get_submodule("model.layers.0.mlp.experts").is_transposed = True  # as gpt-oss stores them
    assert find_targets(model, include=["layers.0.mlp.experts.down_proj"])[0].shape == (24, 16)


def test_tied_weights_are_one_target():
    model = cases.build("tied")
    both = find_targets(model, include=["lm_head", "embed_tokens"])
    assert [target.name for target in both] == ["model.embed_tokens.weight"]
    assert {site.module for site in both[0].sites} == {"lm_head", "model.embed_tokens"}
    assert len(find_targets(cases.build("llama"), include=["lm_head", "embed_tokens"])) == 2


def test_a_module_that_stands_twice_is_found_under_both_names():
    model = cases.build("llama")
    model.model.layers[2].mlp = model.model.layers[0].mlp
    everything = {target.name for target in find_targets(model)}
    dense = everything - {target.name for target in find_targets(model, exclude=["model.layers.2.*"])}
    assert len(everything) == 18
    assert {name.rsplit(".", 2)[0] for name in dense} == {"model.layers.2.self_attn", "model.layers.0.mlp"}
    only = find_targets(model, include=["model.layers.2.mlp.up_proj.weight"])
    assert [target.name for target in only] == ["model.layers.0.mlp.up_proj.weight"]


@pytest.mark.parametrize(
    ("patterns", "count"),
    [
        (["model.layers.1.mlp.up_proj"], 1),
        (["model.layers.1.mlp.up_proj.weight"], 1),
        (["q_proj"], 3),
        (["*.mlp.*"], 9),
        ([r"re:layers\.[01]\.self_attn"], 8),
        (["q_proj", "re:layers.0.*q_proj"], 3),
        (["lm_head"], 1),
    ],
)
def test_patterns(patterns, count):
    assert len(find_targets(cases.build("llama"), include=patterns)) == count
    if patterns != ["lm_head"]:
        assert len(find_targets(cases.build("llama"), exclude=patterns)) == 21 - count


def test_a_pattern_that_matches_nothing_is_an_error():
    model = cases.build("llama")
    for options in ({"include": ["q_projj"]}, {"exclude": ["model.layers.9.*"]}):
        with pytest.raises(ValueError, match=r"matches no prunable module.*named like"):
            find_targets(model, **options)
    find_targets(model, exclude=["lm_head"])  # not a target anyway, but it exists: people write it to be sure
    with pytest.raises(ValueError, match="leave no matrix"):
        find_targets(model, include=["q_proj"], exclude=["*self_attn*"])


def test_what_cannot_be_edited_is_refused():
    with torch.device("meta"):
        model = cases.llama()
    with pytest.raises(ValueError, match="meta device"):
        check_editable(model, find_targets(model))
    model = cases.build("llama")
    target = find_targets(model)[0]
    model.get_parameter(target.name).requires_grad_(False)
    model.get_parameter(target.name).data = torch.zeros(16, 16, dtype=torch.int8)
    with pytest.raises(ValueError, match="quantized"):
        check_editable(model, (target,))


def test_what_a_quantized_model_has_left_as_it_was_is_not_taken_for_all_of_it():
    class Packed(nn.Linear):
        def forward(self, input):
            return super().forward(input)

    model = cases.build("llama")
    for name, module in model.named_modules():
        if "self_attn." in name and isinstance(module, nn.Linear):
            module.__class__ = Packed
    model.hf_quantizer = SimpleNamespace(quantization_config=SimpleNamespace(quant_method="awq"))
    with pytest.raises(ValueError, match=r"quantized \(awq\).*made from.*dequantize"):
        cases.prune(model, cases.batches("llama"))
    cases.prune(model, cases.batches("llama"), include=["*.mlp.*"])


def test_a_weight_that_is_also_used_in_another_way_is_refused():
    class Scaled(torch.nn.Embedding):
        def forward(self, ids):
            return super().forward(ids) * 4

    model = cases.build("tied")
    scaled = Scaled(cases.VOCABULARY, 16)
    scaled.weight = model.model.embed_tokens.weight
    model.model.embed_tokens = scaled
    with pytest.raises(ValueError, match=r"also used by model\.embed_tokens \(Scaled\)"):
        check_editable(model, find_targets(model, include=["lm_head"]))
    check_editable(model, find_targets(model))


def test_columns_that_do_not_divide_are_refused_by_name():
    targets = find_targets(cases.build("llama"))
    check_group(targets, 2, 4)
    with pytest.raises(ValueError, match=r"model\.layers\.0\..*24 inputs.*exclude"):
        check_group(targets, 3, 16)


def test_blocks_of_linear_maps_that_compute_something_else_are_said_to_be_that():
    class Doubled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    model = cases.build("llama")
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.__class__ = Doubled
    with pytest.raises(ValueError, match=r"its blocks have no nn\.Linear.* that compute as these do"):
        find_targets(model)


@pytest.mark.parametrize(
    ("kind", "sizes", "dense"),
    [
        ("qwen2_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}, "shared_expert_gate"),
        ("afmoe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}, "router.gate"),
        ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": 2, "head_dim": 4}, "mlp.gate.wg"),
        ("gemma3n_text", {"num_kv_shared_layers": 0}, "altup."),
    ],
)
def test_what_chooses_experts_or_streams_is_a_target_only_by_name(kind, sizes, dense):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | sizes))
    assert any(dense in name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    found = find_targets(model)
    assert found
    assert not [target.name for target in found if dense in target.name]
    assert find_targets(model, include=[f"*{dense}*"])


def test_heads_that_stand_in_a_list_are_no_blocks():
    sizes = {"hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_codebooks": 2}
    with torch.device("meta"):
        model = MusicgenForCausalLM(MusicgenDecoderConfig(vocab_size=32, **sizes))
    assert {target.block.rpartition(".")[0] for target in find_targets(model)} == {"model.decoder.layers"}
    assert len(find_targets(model, include=["lm_heads.*"])) == 2


@pytest.mark.parametrize(
    ("kind", "cls", "sizes", "blocks", "heads"),
    [
        ("yolos", "YolosForObjectDetection", {}, {"vit.encoder.layer"}, {"class_labels_classifier", "bbox_predictor"}),
        (
            *("sam", "SamModel", {}, {"vision_encoder.layers", "mask_decoder.transformer.layers"}),
            {"mask_decoder.output_hypernetworks_mlps", "mask_decoder.iou_prediction_head"},
        ),
        ("segformer", "SegformerForSemanticSegmentation", {}, {"segformer.stages"}, {"decode_head"}),
        (
            *("rt_detr", "RTDetrForObjectDetection", {"backbone_config": {"model_type": "rt_detr_resnet"}}),
            {"model.encoder.aifi", "model.decoder.layers"},
            {"model.enc_bbox_head", "model.decoder.query_pos_head", "model.decoder.bbox_embed"},
        ),
    ],
)
def test_heads_that_are_lists_of_layers_are_no_blocks(kind, cls, sizes, blocks, heads):
    """Boxes, classes and pixels are made of what blocks do: half of a head of three layers is half of the answer."""
    with torch.device("meta"):
        model = getattr(transformers, cls)(AutoConfig.for_model(kind, **sizes))
    assert {target.block.rpartition(".")[0] for target in find_targets(model)} == blocks
    for head in heads:
        assert find_targets(model, include=[f"{head}.*"])


def test_blocks_of_a_list_of_lists_are_those_of_the_inner_ones():
    """A list is never called, and no inputs of it are known: Funnel's stages, and PVT's."""
    sizes = {"block_sizes": [2, 1], "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32, "num_labels": 2}
    torch.manual_seed(0)
    model = transformers.FunnelForSequenceClassification(transformers.FunnelConfig(vocab_size=64, **sizes)).eval()
    batches = [{"input_ids": torch.randint(3, 60, (2, 12)), "labels": torch.tensor([0, 1])} for _ in range(4)]
    found = cases.prune(model, batches, sparsity=0.5, update="obs")
    blocks = {f"funnel.encoder.blocks.{name}" for name in ("0.0", "0.1", "1.0")}
    assert {target.block for target in found.targets} == blocks
    assert found.report.sparsity == 0.5


def test_half_of_blocks_of_which_most_can_never_go_has_to_be_asked_for_by_name():
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("jetmoe", **SIZES | sizes))
    targets, config = find_targets(model), GradProbeConfig(update="none")
    with pytest.raises(
        ValueError, match=r"9\d% of the.*mlp\.input_linear.*include=\['model\.layers\.\*\.self_attention\.kv_proj'\]"
    ):
        check_shapes(model, targets, config)
    check_shapes(model, targets, GradProbeConfig(update="none", include=["kv_proj"]))


def test_a_report_says_which_weights_of_the_blocks_stay():
    sizes = {"d_model": 16, "n_head": 4, "n_layer": 2, "d_inner": 96}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("xlnet", **cases.CAUSAL, **sizes))
    batches = [{"input_ids": torch.arange(16)[None], "labels": torch.arange(16)[None]}]
    said = cases.prune(model, batches, score="magnitude", update="none", probes=0).report.warnings
    assert any(one.startswith("31% of the weights in the blocks (`transformer.layer.0.rel_attn.q`") for one in said)
