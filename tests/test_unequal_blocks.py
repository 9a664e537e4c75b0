"""Blocks that differ, in size and in what is in them: of hybrids few have attention, of mixtures some no experts."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Wav2Vec2Config, Wav2Vec2ForCTC

from gradprobe_hf import GradProbeConfig, RecoveryConfig, prune_pretrained, recover_pretrained
from gradprobe_hf.checkpoint.inspect import inspect_checkpoint
from gradprobe_hf.data.text.self_generated import own_text, window_bytes
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.run.shapes.budget import budget_shapes
from gradprobe_hf.run.shapes.latency import check_timeable
from gradprobe_hf.run.shapes.structured import check_hands_on
from gradprobe_hf.structures.plan import Plan
from tests import cases
from tests.grids import some

SIZES = {
    "vocab_size": 260,
    "hidden_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
LAYERS = ["conv", "conv", "full_attention", "conv", "full_attention", "conv"]
LFM2 = {"intermediate_size": 66, "block_multiple_of": 4, "layer_types": LAYERS}
MIXTURE = {"intermediate_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
# Two dense blocks first, as in released ones: the blocks with experts are much larger.
LFM2_MOE = {
    **MIXTURE,
    "num_hidden_layers": 8,
    "layer_types": [*LAYERS, "full_attention", "conv"],
    "num_dense_layers": 2,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
}
QWEN3_5 = {**LINEAR, "intermediate_size": 192, "num_hidden_layers": 8, "tie_word_embeddings": True}
QWEN3_NEXT = {**LINEAR, **MIXTURE, "shared_expert_intermediate_size": 8}
# Where attention is full, heads are wider, and there are fewer of them.
GEMMA4 = {
    "intermediate_size": 64,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 260,
}
GEMMA3 = {
    "intermediate_size": 64,
    "layer_types": [*["sliding_attention"] * 3, "full_attention", *["sliding_attention"] * 2],
    "sliding_window": 16,
    "head_dim": 8,
}
GLM4_MOE = {
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 3,
    "n_group": 1,
    "topk_group": 1,
    "head_dim": 8,
}
PARTS = cases.batches("llama", rows=8)


def built(kind, **options):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **options})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def pruned(model, **options):
    config = GradProbeConfig(update="none", **options)
    return prune_pretrained(model, config, calibration=PARTS, evaluation=False, progress=False)


OF_KINDS = {"lfm2": LFM2, "lfm2_moe": LFM2_MOE, "qwen3_5_text": QWEN3_5}


@some("kind", OF_KINDS, fast=("lfm2_moe",))
@pytest.mark.parametrize("share", [0.85, 0.6])
def test_a_budget_of_parameters_is_met_whichever_blocks_go(kind, share, tmp_path):
    options = OF_KINDS[kind]
    model = built(kind, **options)
    dense = model.num_parameters()
    result = pruned(model, structure="auto", params=share)
    made = result.report.structure
    assert made["parameters"]["after"] <= share * dense
    assert all(one["parameters"] <= share * dense for one in made["candidates"])
    result.save_pretrained(tmp_path / "smaller")
    smaller = AutoModelForCausalLM.from_pretrained(tmp_path / "smaller")
    assert smaller.num_parameters() == made["parameters"]["after"]
    assert smaller.generate(PARTS[0]["input_ids"][:1], max_new_tokens=2).shape[1] > 12, "it can write"
    # Nothing that went could have stayed: with a block fewer gone, or with as many and all else, it is too large.
    gone = made["removed"].get("blocks", 0)
    if gone and len(made["removed"]) == 1:
        sizes = {
            block: sum(p.numel() for p in built(kind, **options).get_submodule(block).parameters())
            for block in made["blocks"]
        }
        first = [one["block"] for one in made["blocks_without"]] if "blocks_without" in made else made["blocks"]
        assert dense - sum(sizes[block] for block in first[:-1]) > share * dense


def test_what_a_configuration_says_of_some_blocks_follows_them(tmp_path):
    model = built("gemma4_text", **GEMMA4)
    result = pruned(model, structure={"blocks": 2})
    result.save_pretrained(tmp_path / "smaller")
    smaller = AutoModelForCausalLM.from_pretrained(tmp_path / "smaller")
    kept = [number for number in range(6) if f"model.layers.{number}" not in result.report.structure["blocks"]]
    widths = [layer.self_attn.head_dim for layer in smaller.model.layers]
    assert widths == [model.model.layers[number].self_attn.head_dim for number in kept]
    with torch.no_grad():
        assert torch.allclose(smaller(**PARTS[0]).logits, result.model(**PARTS[0]).logits, atol=1e-4)


def test_heads_of_blocks_that_have_fewer_than_others_stay():
    with pytest.raises(ValueError, match=r"'kv_groups' wants as many .* have 1, 2 of them .* 'blocks' and of 'ffn'"):
        pruned(built("gemma4_text", **GEMMA4), structure={"kv_groups": 1})


def test_own_text_takes_the_room_of_keys_and_values_of_unlike_blocks():
    model = built("gemma4_text", **GEMMA4)
    numbers = sum(layer.self_attn.k_proj.out_features for layer in model.model.layers)
    assert window_bytes(model, 10) == 2 * numbers * 10 * 4
    assert own_text(model, 2, 10, 0, progress=False).shape == (2, 10)


@some("kind", OF_KINDS, fast=("lfm2",))
def test_without_a_block_it_is_recovered(kind, tmp_path):
    """Blocks that stay have other numbers, and other parts, than those of the dense model in their places."""
    dense = built(kind, **OF_KINDS[kind])
    dense.save_pretrained(tmp_path / "dense")
    pruned(dense, structure={"blocks": 1}).save_pretrained(tmp_path / "smaller")
    config = RecoveryConfig(steps=2, batch_size=2)
    given = {"text": PARTS, "evaluation": False, "progress": False}
    found = recover_pretrained(tmp_path / "smaller", tmp_path / "dense", config, **given)
    assert found.report.recovery["steps"] == 2
    assert found.model.config.num_hidden_layers < dense.config.num_hidden_layers
    dense.resize_token_embeddings(300)
    with pytest.raises(ValueError, match="Give the dense model that it was pruned from"):
        recover_pretrained(tmp_path / "smaller", dense, config, **given)


@pytest.mark.slow
def test_a_budget_of_bytes_is_met_by_the_file(tmp_path):
    result = pruned(built("lfm2", **LFM2), structure="auto", memory="96KB")
    result.save_pretrained(tmp_path / "smaller")
    assert (tmp_path / "smaller" / "model.safetensors").stat().st_size <= 96_000


def test_a_budget_is_within_reach_where_large_blocks_have_to_go():
    """The second block is one of the small ones: so many of its size would never be enough."""
    model = built("lfm2_moe", **LFM2_MOE)
    targets = find_targets(model)
    assert budget_shapes(model, targets, GradProbeConfig(structure="auto", params=0.6))
    smallest = model.num_parameters() - sum(
        sum(p.numel() for p in layer.parameters()) for layer in list(model.model.layers)[1:-1]
    )
    with pytest.raises(ValueError, match="is less than any shape of Lfm2MoeForCausalLM has"):
        budget_shapes(model, targets, GradProbeConfig(structure="auto", params=smallest // 4))


@pytest.mark.slow
def test_of_a_hybrid_some_attention_stays(tmp_path):
    """It tells how far the text has come: without any the model can read one text, and not write."""
    model = built("qwen3_next", **QWEN3_NEXT)  # of six blocks the fourth has attention
    assert [hasattr(layer, "self_attn") for layer in model.model.layers].count(True) == 1
    with torch.no_grad():
        for parameter in model.model.layers[3].parameters():
            parameter.zero_()  # nothing loses less
    result = pruned(model, structure={"blocks": 3})
    assert "model.layers.3" not in result.report.structure["blocks"]
    result.save_pretrained(tmp_path / "smaller")
    smaller = AutoModelForCausalLM.from_pretrained(tmp_path / "smaller")
    assert smaller.generate(PARTS[0]["input_ids"][:1], max_new_tokens=2).shape[1] > 12
    assert inspect_checkpoint(tmp_path / "smaller")
    with pytest.raises(
        ValueError, match=r"4 of 6 blocks cannot go, since the first and the last stay, and one of each"
    ):
        pruned(built("qwen3_next", **QWEN3_NEXT), structure={"blocks": 4})


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [("lfm2", LFM2, "conv or self_attn"), ("qwen3_5_text", QWEN3_5, "linear_attn or self_attn")],
)
def test_latency_is_not_told_by_one_block_where_they_differ(kind, options, named):
    with pytest.raises(ValueError, match=rf"latency takes one block for all, and those of \w+ have {named} in them"):
        pruned(built(kind, **options), structure="auto", latency=0.8)


@pytest.mark.parametrize("asked", [5, 9])
def test_how_many_blocks_can_go_is_said_with_those_that_stay(asked):
    with pytest.raises(
        ValueError, match=rf"{asked} of 6 blocks cannot go, since the first and the last stay: 1 to 4 can"
    ):
        pruned(built("llama", intermediate_size=64), structure={"blocks": asked})


@pytest.mark.parametrize("structure", [{"ffn": 8}, {"blocks": 1}], ids=["ffn", "blocks"])
def test_a_model_of_sound_is_made_smaller(structure, tmp_path):
    config = Wav2Vec2Config(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        vocab_size=32,
        conv_dim=(8, 8),
        conv_stride=(5, 4),
        conv_kernel=(10, 4),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        pad_token_id=0,
        do_stable_layer_norm="blocks" in structure,  # with a norm behind its sums a block does not hand on what it gets
    )
    torch.manual_seed(0)
    model = Wav2Vec2ForCTC(config).eval()
    parts = [{"input_values": torch.randn(2, 800), "labels": torch.randint(5, 30, (2, 5))} for _ in range(4)]
    options = GradProbeConfig(structure=structure, update="none")
    result = prune_pretrained(model, options, calibration=parts, evaluation=False, progress=False)
    result.save_pretrained(tmp_path / "smaller")
    smaller = Wav2Vec2ForCTC.from_pretrained(tmp_path / "smaller").eval()
    assert (smaller.config.intermediate_size, smaller.config.num_hidden_layers) == (
        (16, 3) if "ffn" in structure else (24, 2)
    )
    given = parts[0]["input_values"]
    torch.testing.assert_close(smaller(given).logits, model.eval()(given).logits, rtol=1e-4, atol=1e-5)


def test_one_block_stays_that_sees_more_than_a_window():
    """No text that is shorter than the window shows what it is for."""
    model = built("gemma3_text", **GEMMA3)
    with torch.no_grad():
        for parameter in model.model.layers[3].parameters():
            parameter.zero_()  # nothing loses less
    result = pruned(model, structure={"blocks": 3})
    assert "model.layers.3" not in result.report.structure["blocks"]
    with pytest.raises(
        ValueError, match=r"4 of 6 blocks cannot go, since the first and the last stay, and one of each"
    ):
        pruned(built("gemma3_text", **GEMMA3), structure={"blocks": 4})
    check_timeable(model, Plan.of(model, find_targets(model), {}))  # blocks take as long, whatever they see


def test_latency_is_not_told_by_one_block_where_some_have_experts():
    model = built("glm4_moe", **GLM4_MOE)
    with pytest.raises(ValueError, match=r"those of Glm4MoeForCausalLM have none of these or experts in them"):
        pruned(model, structure="auto", latency=0.8)


def test_every_block_that_may_go_has_to_hand_on_what_it_is_given(monkeypatch):
    """Gemma 4 multiplies what a block makes by a number of its own, which is 1 in models that are not trained."""
    model = built("gemma4_text", **GEMMA4)
    check_hands_on(model, find_targets(model))
    model.model.layers[4].layer_scalar.fill_(0.9)
    monkeypatch.setattr("gradprobe_hf.run.request.reading.load_batches", lambda *_, **__: pytest.fail("text was read"))
    with pytest.raises(ValueError, match="a norm or a factor behind the sum, say"):
        pruned(model, structure={"blocks": 1})
