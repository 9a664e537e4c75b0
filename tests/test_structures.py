"""Whole structures: the smaller model computes what the masked one does; what goes is what the others can spare."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForSequenceClassification,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from gradprobe_hf import GradProbeConfig, prune_pretrained
from gradprobe_hf.checkpoint.smaller import save_smaller
from gradprobe_hf.cli.main import main
from gradprobe_hf.model.families import random_batch
from gradprobe_hf.model.passes.loss import summed_loss
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.reconstruction.silenced_blocks import silenced
from gradprobe_hf.run.apply import applied
from gradprobe_hf.run.request.compatibility import check_targets
from gradprobe_hf.run.shapes.structured import check_hands_on, hands_on, packed
from gradprobe_hf.structures.importance import least_missed, outputs_squared, unit_errors
from gradprobe_hf.structures.plan import Plan
from gradprobe_hf.structures.removal import Removal
from gradprobe_hf.structures.shapes import random_smaller, smaller_config
from tests import cases
from tests.grids import some
from tests.smaller_models import SIZES, build, perturbed
from tests.structure_page import GEMMA4

ALL = {"ffn": 7, "kv_groups": 1, "blocks": 1}
LOADABLE = {  # together; alone, and of more families, in tests/structure_page.py
    "llama": ALL,
    "tied": ALL,
    "qwen3": ALL,
    "gemma3": ALL,
    "phi3": {"ffn": 7, "blocks": 1},
    "vit": {"ffn": 7, "kv_groups": 1},
    "mixtral": {"kv_groups": 1, "experts": 2},
    "mixture": {"kv_groups": 1, "experts": 3, "blocks": 1},
    "leading": {"experts": 2, "blocks": 2},
    "numbered": {"experts": 3, "blocks": 1},
    "windows": {"blocks": 1},
}


def outputs(model, batch):
    with torch.no_grad():
        return model(**batch)[0]


@pytest.mark.parametrize(("name", "amounts"), LOADABLE.items(), ids=LOADABLE)
def test_the_smaller_model_computes_what_the_masked_one_does(name, amounts, tmp_path):
    model = build(name)
    targets = find_targets(model)
    check_targets(model, targets, GradProbeConfig(structure=amounts))
    plan = Plan.of(model, targets, amounts)
    removal = Removal.example(plan)
    biases, masks = silenced(model, removal.blocks), packed(removal, targets)
    batch, dense = random_batch(model, 2, 12), cases.bits(model)
    with applied(model, targets, masks, keep=False, new_weights=biases, routes=removal.routes):
        save_smaller(tmp_path, model, removal)
        wanted = outputs(model, batch)
    assert cases.changed(model, dense) == []
    # By transformers alone, as a user would: nothing missing, nothing left over, no shape that does not fit.
    auto = AutoModelForCausalLM if name not in ("bert", "vit") else type(model)
    loaded, info = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    torch.testing.assert_close(outputs(loaded, batch), wanted, rtol=0, atol=1e-4)
    assert sum(one.numel() for one in loaded.parameters()) == removal.parameters(model) < model.num_parameters()
    # What its masks say is what it is: so a run that goes on from them cuts the same.
    again = Removal.of_masks(plan, masks, targets)
    assert again.blocks == removal.blocks
    kept = [one.reader for every in plan.units.values() for one in every if one.reader.block not in removal.blocks]
    assert all(torch.equal(again.units[reader.name], removal.units[reader.name]) for reader in kept)


def test_a_count_of_leading_blocks_is_of_those_that_stay():
    """As what does not read `layer_types` reads it."""
    model = build("windows")
    removal = Removal.example(Plan.of(model, find_targets(model), {"blocks": 1}))
    assert model.config.layer_types == ["full_attention"] * 2 + ["sliding_attention"] * 2
    made = smaller_config(model.config, removal)
    assert (made.layer_types, made.max_window_layers) == (["full_attention"] + ["sliding_attention"] * 2, 1)


def test_the_smaller_model_computes_as_the_dense_one_does():
    """It is timed against it."""
    model = build("mixtral")
    removal = Removal.example(Plan.of(model, find_targets(model), {"experts": 1}))
    for implementation in ("eager", "batched_mm"):
        model.set_experts_implementation(implementation)
        model.set_attn_implementation("eager")
        made = random_smaller(model, removal, torch.float32).config
        assert (made._experts_implementation, made._attn_implementation) == (implementation, "eager")


def test_a_classifier_without_a_padding_token_is_looked_at(tmp_path):
    torch.manual_seed(0)
    model = perturbed(LlamaForSequenceClassification(LlamaConfig(**{**SIZES, "pad_token_id": None})))
    rows = [{"input_ids": batch["input_ids"][:1], "labels": torch.tensor([0])} for batch in cases.batches("llama")]
    cases.prune(model, rows, structure={"ffn": 8}, update="none", output_dir=tmp_path / "made")
    assert AutoConfig.from_pretrained(tmp_path / "made").intermediate_size == 16


def test_a_whole_run_from_the_configuration_to_the_checkpoint(tmp_path):
    model, batches = build("llama"), cases.batches("llama")
    before = model.num_parameters()
    config = GradProbeConfig(structure=ALL)
    result = prune_pretrained(
        model, config, calibration=batches, evaluation=batches, output_dir=tmp_path / "made", progress=False
    )
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "made", output_loading_info=True)
    assert not any(info.values())
    shape = loaded.config
    assert (shape.intermediate_size, shape.num_hidden_layers, shape.head_dim) == (17, 2, 4)
    assert (shape.num_attention_heads, shape.num_key_value_heads) == (2, 1)
    own = 2 * 16 * 8 + 2 * 4 * 16 + 3 * 16 * 17 + 2 * 16  # q and o, k and v, the FFN, two norms
    assert loaded.num_parameters() == 2 * own + 2 * 260 * 16 + 16
    found = result.report.structure
    assert found["parameters"] == {"before": before, "after": loaded.num_parameters()}
    assert found["removed"] == ALL
    assert found["after"]["intermediate_size"] == 17
    modes = {file.stat().st_mode for file in (tmp_path / "made").glob("*.*")}
    assert len(modes) == 1  # whoever may read the configuration may read the weights
    stored = (tmp_path / "made" / "model.safetensors").stat().st_size
    assert result.report.files["bytes"] == stored
    assert result.report.files["dense"] == 4 * before
    assert json.loads((tmp_path / "made" / "gradprobe_report.json").read_text())["files"] == result.report.files
    assert found["before"]["intermediate_size"] == 24
    batch = {"input_ids": batches[0]["input_ids"]}
    torch.testing.assert_close(outputs(loaded, batch), outputs(result.model, batch), rtol=0, atol=1e-4)
    measured = sum(float(summed_loss(loaded, one)[0].detach()) for one in batches)
    terms = sum(int(summed_loss(loaded, one)[1]) for one in batches)
    assert measured / terms == pytest.approx(result.report.evaluation["pruned"]["loss"], rel=1e-4)
    assert loaded.generate(**batch, max_new_tokens=3, min_new_tokens=3, do_sample=False).shape == (2, 15)
    saved = json.loads((tmp_path / "made" / "config.json").read_text())
    assert saved["gradprobe"]["structure"] == ALL
    card = (tmp_path / "made" / "README.md").read_text()
    assert "| `intermediate_size` | 24 | 17 |" in card
    assert f"{loaded.num_parameters():,}" in card
    assert f"| {4 * before / 1e6:,.1f} | {stored / 1e6:,.1f}" in card
    assert "no smaller" not in card
    assert "The speed was **not measured** in this run" in card
    assert GradProbeConfig.from_pretrained(tmp_path / "made") == config


def test_a_weight_that_stays_and_is_zero_is_not_said_to_be_removed(tmp_path):
    model, batches = build("llama"), cases.batches("llama")
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[0, 0] = 0
    config = GradProbeConfig(structure={"ffn": 8}, update="none")
    prune_pretrained(model, config, calibration=batches, evaluation=False, output_dir=tmp_path / "made", progress=False)
    first, last = "model.layers.0", f"model.layers.{len(model.model.layers) - 1}"
    weights = sum(target.numel for target in find_targets(model) if target.block == first)
    gone = 3 * 8 * model.config.hidden_size
    row = f"| `{first}` to `{last}` | {weights:,} | {gone:,} | {gone / weights:.2%} |"
    assert row in (tmp_path / "made" / "README.md").read_text()


@pytest.mark.parametrize("options", [{}, {"refinement": "blocks"}], ids=str)
def test_a_dry_run_leaves_the_model_and_is_saved_later(options, tmp_path):
    model, batches = build("qwen2"), cases.batches("llama")
    dense = cases.bits(model)
    config = GradProbeConfig(structure={"ffn": 8, "blocks": 1}, **options)
    result = prune_pretrained(model, config, calibration=batches, evaluation=False, apply=False, progress=False)
    assert cases.changed(model, dense) == []
    result.save_pretrained(tmp_path / "made")
    assert cases.changed(model, dense) == []
    assert AutoConfig.from_pretrained(tmp_path / "made").num_hidden_layers == 2
    # The other blocks were changed to make up for what went: more than to cut it out.
    (gone,) = result.report.structure["blocks"]
    target = next(one for one in result.targets if one.role == "mlp.down_proj" and one.block != gone)
    kept = ~result.masks[target.name]
    assert not torch.equal(result.new_weights[target.name][kept], target.matrix(model)[kept])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"structure": {"ffn": 8, "kv_groups": 1}}),
        ("llama", {"structure": {"ffn": 8, "blocks": 1}}),
        ("llama", {"structure": "auto", "params": 0.8}),
        ("mixtral", {"structure": {"experts": 2}}),
    ],
)
def test_what_is_left_can_be_recovered(name, options, tmp_path):
    """The checkpoint is compared with the masked model when it is written: whatever was trained, it is the same."""
    config = GradProbeConfig(**options, recovery_steps=6, recovery_learning_rate=2e-3, num_samples=6)
    given = {"calibration": cases.batches(name), "evaluation": cases.batches(name, seed=7), "progress": False}
    plain = prune_pretrained(build(name), replace(config, recovery_steps=0, recovery_learning_rate=2e-4), **given)
    result = prune_pretrained(build(name), config, **given, output_dir=tmp_path / "made")
    assert result.report.recovery["steps"] == 6
    assert result.report.recovery["best_step"] > 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "made").eval()
    assert loaded.num_parameters() == result.report.structure["parameters"]["after"] < build(name).num_parameters()
    found = prune_pretrained(loaded, GradProbeConfig(sparsity=0.0), **given).report.evaluation["pruned"]["loss"]
    assert found == pytest.approx(result.report.evaluation["pruned"]["loss"], rel=1e-4)
    assert found != pytest.approx(plain.report.evaluation["pruned"]["loss"], rel=1e-4)


@some("name", ["t5", "vit", "bert"], fast=("t5",))
def test_a_whole_run_of_an_encoder(name, tmp_path):
    model, batches = perturbed(cases.build(name)), cases.batches(name)
    cut = cases.prune(model, batches, structure={"ffn": 8}, update="none", evaluation=batches)
    result = cases.prune(model, batches, structure={"ffn": 8}, evaluation=batches, output_dir=tmp_path / "made")
    loss = result.report.evaluation["pruned"]["loss"]
    assert loss != cut.report.evaluation["pruned"]["loss"]  # the others made up for what went
    loaded = type(model).from_pretrained(tmp_path / "made")
    assert (loaded.config.d_ff if name == "t5" else loaded.config.intermediate_size) == 16
    with torch.no_grad():
        losses = [summed_loss(loaded, batch) for batch in batches]
    assert sum(float(one) for one, _ in losses) / sum(int(terms) for _, terms in losses) == pytest.approx(
        loss, rel=1e-4
    )


@pytest.mark.slow
def test_a_model_on_disk_ends_as_one_in_memory(tmp_path):
    build("llama").save_pretrained(tmp_path / "dense")
    found = []
    for name, placed in (("memory", {}), ("disk", {"device_map": "disk", "offload_folder": tmp_path / "offload"})):
        prune_pretrained(
            tmp_path / "dense",
            GradProbeConfig(structure=ALL),
            calibration=cases.batches("llama"),
            evaluation=False,
            output_dir=tmp_path / name,
            progress=False,
            **placed,
        )
        found.append(AutoModelForCausalLM.from_pretrained(tmp_path / name))
    assert cases.changed(found[0], cases.bits(found[1])) == []


def test_the_block_that_goes_is_the_one_without_which_the_loss_is_lowest():
    torch.manual_seed(3)
    model, batches = cases.build("gpt_neox"), cases.batches("gpt_neox")
    config = type(model.config)(**{**model.config.to_dict(), "num_hidden_layers": 5})
    model = type(model)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    config = GradProbeConfig(structure={"blocks": 2}, update="none")
    result = prune_pretrained(model, config, calibration=batches, evaluation=False, apply=False, progress=False)
    blocks, left, gone = model.gpt_neox.layers, list(range(5)), []
    for _ in range(2):
        losses = {}
        for number in [one for one in left if one not in (0, 4)]:
            model.gpt_neox.layers = torch.nn.ModuleList(blocks[one] for one in left if one != number)
            losses[number] = sum(float(summed_loss(model, batch)[0].detach()) for batch in batches)
        gone.append(min(losses, key=losses.get))
        left.remove(gone[-1])
    model.gpt_neox.layers = blocks
    assert [one["block"] for one in result.report.structure["without"]] == [f"gpt_neox.layers.{one}" for one in gone]


@pytest.mark.parametrize("width", [1, 3])
def test_the_error_of_a_unit_is_that_of_the_best_weights_without_it(width):
    torch.manual_seed(0)
    x, weight = torch.randn(50, 12, dtype=torch.float64), torch.randn(5, 12, dtype=torch.float64)
    x[:, 3] = x[:, 0] + 0.1 * x[:, 3]  # two that can make up for each other
    units = 12 // width

    def error(gone):
        kept = [column for column in range(12) if column // width not in gone]
        best = torch.linalg.lstsq(x[:, kept], x @ weight.T).solution
        return float((x @ weight.T - x[:, kept] @ best).square().sum())

    inverse = torch.linalg.inv(x.T @ x)
    found = unit_errors(weight, inverse, units)
    torch.testing.assert_close(found, torch.tensor([error({unit}) for unit in range(units)], dtype=torch.float64))
    # One after the other, each time the one whose removal costs least beside those that are gone.
    gone = set()
    for _ in range(3):
        gone.add(min(set(range(units)) - gone, key=lambda unit: error(gone | {unit})))
    assert set(least_missed(weight, inverse, units, 3).nonzero()[:, 0].tolist()) == gone


@pytest.mark.parametrize("width", [1, 3])
def test_what_damping_adds_to_an_error_is_taken_off(width):
    """What is left is a ridge regression on the other columns; two large inputs make the mean that damping is of."""
    torch.manual_seed(0)
    x, weight = torch.randn(50, 12, dtype=torch.float64), torch.randn(5, 12, dtype=torch.float64)
    x[:, :2] *= 1000
    hessian, units = x.T @ x, 12 // width
    added = 0.01 * hessian.diagonal().mean()
    inverse = torch.linalg.inv(hessian + added * torch.eye(12, dtype=torch.float64))

    def error(unit):
        own = slice(unit * width, (unit + 1) * width)
        others = [column for column in range(12) if column // width != unit]
        outputs, rest = x[:, own] @ weight[:, own].T, x[:, others]
        ridge = rest.T @ rest + added * torch.eye(len(others), dtype=torch.float64)
        z = torch.linalg.solve(ridge, rest.T @ outputs)
        return float((outputs - rest @ z).square().sum() + added * z.square().sum())

    wanted = torch.tensor([error(unit) for unit in range(units)], dtype=torch.float64)
    torch.testing.assert_close(unit_errors(weight, inverse, units, added), wanted, rtol=1e-6, atol=0)
    outputs = outputs_squared(weight, hessian, units)
    assert (unit_errors(weight, inverse, units, added) <= outputs).all()
    assert (unit_errors(weight, inverse, units)[2:] > outputs[2:]).all(), "several times the whole of it"


GROUPED = {**SIZES, "num_key_value_heads": 4, "first_k_dense_replace": 1, "moe_intermediate_size": 8}
GROUPED |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
GROUPED |= {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
REFUSED = [
    (
        "llama",
        {"kv_groups": 2},
        "2 of 2 key-value heads cannot go: 1 can.",
    ),
    ("llama", {"ffn": 24}, "24 of 24 FFN channels cannot go"),
    ("llama", {"ffn": 0.3}, "a multiple of 64 is kept, is all of them. Give how many go, 7 say"),
    ("wide", {"ffn": 0.999}, "is all of them. Give how many go, 99 say"),
    ("wide", {"ffn": 0.01}, "a share of 0.01 of 100 FFN channels, of which a multiple of 64 is kept, is none of them"),
    ("llama", {"blocks": 2}, "the first and the last stay: 1 can"),
    ("single", {"kv_groups": 1}, "1 of 1 key-value head cannot go: none can"),
    ("gpt2", {"kv_groups": 1}, "Leave 'kv_groups' out. It can do without some of 'ffn'."),
    ("gpt2", {"blocks": 1}, "none can"),
    ("scaled", {"blocks": 1}, "(with its scale_attn_by_inverse_layer_idx what a block does depends on its number)"),
    ("periods", {"blocks": 2}, "leave 'blocks' out of structure. (with its attn_layer_period what a block does"),
    ("turns", {"blocks": 1}, "leave 'blocks' out of structure. (with its block_types what a block does depends"),
    ("told of each", {"blocks": 1}, "(with its width_of_each what a block does depends on its number)"),
    ("every other", {"blocks": 2}, "leave 'blocks' out of structure. (with its decoder_sparse_step"),
    ("opt", {"kv_groups": 1}, "OPTForCausalLM cannot do without 1 of its 4 key-value heads; leave 'kv_groups' out"),
    ("opt", {"kv_groups": 2}, "makes model.decoder.layers.0.self_attn.k_proj.bias 16 then, and 8 are left of it"),
    ("olmo2", {"kv_groups": 1}, "cannot do without 1 of its 2 key-value heads"),
    ("bert5", {"blocks": 1}, "does not hand on what it is given"),
    ("mixtral", {"ffn": 7}, "no FFN channels that could go in model.layers.0"),
    ("mixtral", {"experts": 3}, "3 of 4 experts cannot go, since every token is sent to 2 of them: 1 to 2 can"),
    ("mixtral", {"experts": 0.05}, "a share of 0.05 of 4 experts is none of them. Give how many go, 1 say"),
    ("llama", {"experts": 1}, "LlamaForCausalLM has no experts, or none beside a router of their own"),
    ("grouped", {"experts": 1}, "cannot do without 1 of its 8 experts; the nearest that it can is 2: set that"),
    ("elsewhere", {"experts": 1}, "mlp.gate is not what sends them tokens"),
    ("unequal", {"experts": 1}, "those of MixtralForCausalLM have 3, 4 in 2 modules: leave it out"),
    ("t5", {"blocks": 1}, "models of one stack of blocks"),
    ("hidden", {"kv_groups": 1}, "the nearest that it can is 2: set that"),
    ("reuses", {"experts": 1}, "Leave 'experts' out. There is nothing else that it can do without"),
    ("shared", {"ffn": 8}, "worked on one after the other here: set structure={'blocks': ...} with update='none'"),
]


@pytest.mark.parametrize(("name", "amounts", "message"), REFUSED, ids=str)
def test_what_a_family_cannot_do_is_refused_before_any_work(name, amounts, message, monkeypatch):
    if name == "bert5":
        model = cases.build("bert")
        model = perturbed(type(model)(type(model.config)(**{**model.config.to_dict(), "num_hidden_layers": 5})))
    elif name == "hidden":  # Llama wants a hidden size that its heads divide
        model = type(cases.build("llama"))(cases.build("llama").config.__class__(**{**SIZES, "num_key_value_heads": 4}))
    elif name == "grouped":  # a router that compares two groups of experts, which have to be as large
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**GROUPED)).eval()
    elif name == "unequal":  # one block has an expert fewer, which no configuration says
        model = build("mixtral")
        fewer = type(model)(type(model.config)(**{**model.config.to_dict(), "num_local_experts": 3}))
        model.model.layers[1].mlp = fewer.model.layers[1].mlp
    elif name == "shared":
        model = build("llama")
        model.model.layers[2].mlp.down_proj.weight = model.model.layers[1].mlp.down_proj.weight
    elif name == "reuses":  # the last two blocks take the keys and values of those before
        sizes = {**SIZES, **GEMMA4, "head_dim": 8, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
        sizes["hidden_size_per_layer_input"] = 8
        model = Gemma4ForCausalLM(Gemma4TextConfig(**sizes)).eval()
    elif name == "elsewhere":  # an experts module that does not do what its router says
        model = build("mixtral")
        experts = model.model.layers[0].mlp.experts
        experts.register_forward_pre_hook(lambda _, args: (args[0], torch.zeros_like(args[1]), args[2]))
    else:
        model = build(name)
    monkeypatch.setattr("gradprobe_hf.run.request.reading.load_batches", lambda *_, **__: pytest.fail("text was read"))
    with pytest.raises(ValueError, match=re.escape(message)):
        prune_pretrained(model, GradProbeConfig(structure=amounts), calibration=cases.batches("llama"), progress=False)


class ByKeyword(LlamaDecoderLayer):
    def __call__(self, hidden_states, **options):
        return super().__call__(attention_mask=options.pop("attention_mask"), hidden_states=hidden_states, **options)


class Twice(LlamaDecoderLayer):
    def __call__(self, hidden_states, **options):
        return super().__call__(super().__call__(hidden_states, **options), **options)


@pytest.mark.parametrize(("block", "can_go"), [(ByKeyword, True), (Twice, False)])
def test_however_a_model_calls_its_blocks_it_is_seen_whether_they_hand_on(block, can_go):
    model = build("llama")
    for layer in model.model.layers:
        layer.__class__ = block
    assert hands_on(model, find_targets(model)) is can_go
    if not can_go:
        with pytest.raises(ValueError, match=r"does not run once in a pass\), so that none can be left out"):
            check_hands_on(model, find_targets(model))


def test_a_budget_of_a_model_that_can_do_without_nothing_says_why():
    """Of each structure: an encoder and a decoder of unlike widths, as BART may have."""
    values = {"encoder_ffn_dim": 16, "decoder_ffn_dim": 24, "d_model": 16, "vocab_size": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    model = BartForConditionalGeneration(BartConfig(**values, **heads, max_position_embeddings=64)).eval()
    config = GradProbeConfig(structure="auto", params=0.9)
    message = (
        "there is nothing that BartForConditionalGeneration can do without. structure 'ffn' wants as many FFN channels "
        "in every block, and those of BartForConditionalGeneration have 16, 24: leave it out. structure "
    )
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        prune_pretrained(model, config, calibration=cases.batches("llama"), progress=False)
    assert str(caught.value).count("structure is for models of one stack of blocks") == 1  # heads, experts and blocks


def test_experts_go_of_a_mixture_that_returns_the_loss_of_its_routers(tmp_path):
    model = build("mixtral")
    model.config.output_router_logits = True
    batches = cases.batches("mixtral")
    result = cases.prune(
        model, batches, evaluation=batches, structure={"experts": 1}, update="none", output_dir=tmp_path / "made"
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    assert loaded.config.num_local_experts == 3
    losses = [summed_loss(loaded, batch) for batch in batches]
    measured = sum(float(one.detach()) for one, _ in losses) / sum(int(terms) for _, terms in losses)
    assert measured == pytest.approx(result.report.evaluation["pruned"]["loss"], rel=1e-4)


def test_an_interrupt_at_any_pass_leaves_everything_as_it_was(tmp_path):
    model, passes, stops = build("llama"), [0], [None]

    def count(*_):
        passes[0] += 1
        if passes[0] == stops[0]:
            raise KeyboardInterrupt

    model.register_forward_pre_hook(count)
    dense, hooks = cases.bits(model), hooks_of(model)
    config = GradProbeConfig(structure=ALL)
    text = {"calibration": cases.batches("llama"), "evaluation": False, "progress": False}
    prune_pretrained(model, config, **text, apply=False, output_dir=tmp_path / "whole")
    made = passes[0]
    for stops[0] in (1, made // 2, made):  # the last is of the check of what was written
        passes[0] = 0
        with pytest.raises(KeyboardInterrupt):
            prune_pretrained(model, config, **text, output_dir=tmp_path / "made")
        assert cases.changed(model, dense) == []
        assert hooks_of(model) == hooks
        assert [one.name for one in tmp_path.iterdir()] == ["whole"]


def hooks_of(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_the_command_line_prunes_whole_structures(tmp_path, capsys):
    model = build("llama")
    model.save_pretrained(tmp_path / "dense")
    cases.tokenizer().save_pretrained(tmp_path / "dense")
    structure = "ffn=8,kv_groups=1,blocks=1"
    line = ["prune", str(tmp_path / "dense"), "--output", str(tmp_path / "made"), "--structure", structure]
    options = ["--calibration", "pydoc", "--num-samples", "4", "--sequence-length", "16", "--evaluation-samples", "2"]
    assert main(["estimate", str(tmp_path / "dense"), "--json", *line[4:]]) == 0
    priced = json.loads(capsys.readouterr().out)
    assert "weigh" in priced["placements"][0]["stages"]
    assert main([*line, *options]) == 0
    said = capsys.readouterr().out
    assert "intermediate_size" in said
    assert "file, MB" in said
    assert AutoModel.from_pretrained(tmp_path / "made").config.intermediate_size == 16
