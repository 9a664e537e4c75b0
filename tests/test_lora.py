"""LoRA on a pruned model: what a plain merge destroys, and what the two ways out keep."""

from __future__ import annotations

import pytest
import torch

from gradprobe_hf import GradProbeConfig, prune_pretrained
from gradprobe_hf.training import SparsityCallback, masked_adapters, merge_with_masks
from tests import cases
from tests.trainers import Rows, half_pruned, hooks_of, trained, weights, zeros

peft = pytest.importorskip("peft")


def adapted(name="llama", **options):
    model, masks = half_pruned(name)
    modules = ["c_attn", "c_proj"] if name == "gpt2" else ["q_proj", "down_proj"]
    config = peft.LoraConfig(
        r=4, target_modules=modules, fan_in_fan_out=name == "gpt2", task_type="CAUSAL_LM", **options
    )
    return peft.get_peft_model(model, config), masks


def logits(model):
    model.eval()
    with torch.no_grad():
        return model(input_ids=Rows()[0]["input_ids"][None]).logits


def test_a_plain_merge_destroys_the_zeros(tmp_path):
    model, masks = adapted()
    trained(model, tmp_path, [])
    merged = model.merge_and_unload()
    under, _ = zeros(merged, {name: mask for name, mask in masks.items() if "q_proj" in name})
    assert under == sum(int(mask.sum()) for name, mask in masks.items() if "q_proj" in name)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("given", [True, False], ids=["masks", "from-zeros"])
def test_the_masked_merge_keeps_every_zero_and_says_what_it_cost(name, given, tmp_path):
    model, masks = adapted(name)
    trained(model, tmp_path, [])
    layer = next(module for module in model.modules() if isinstance(module, peft.tuners.lora.Linear))
    weight = layer.get_base_layer().weight.detach().clone()
    delta = (layer.lora_B["default"].weight @ layer.lora_A["default"].weight).detach() * layer.scaling["default"]
    delta = delta.t() if name == "gpt2" else delta
    merged, report = merge_with_masks(model, masks if given else "from-zeros")
    assert zeros(merged, masks) == (0, 0)
    first = next(iter(report.lost))
    now = merged.get_parameter(first).detach()
    torch.testing.assert_close(now, (weight + delta) * (weight != 0))
    assert report.lost[first] == pytest.approx(float((delta * (weight == 0)).norm() / delta.norm()), rel=1e-5)
    assert 0 < report.total_lost < 1
    assert report.sparsity[first] == pytest.approx(0.5)
    assert "every zero kept" in str(report)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_masked_adapters_lose_nothing_at_the_merge(name, tmp_path):
    model, masks = adapted(name)
    with masked_adapters(model, masks):
        trained(model, tmp_path, [])
        before = logits(model)
        merged, report = merge_with_masks(model, masks)
    assert report.total_lost == 0
    torch.testing.assert_close(logits(merged), before, rtol=1e-4, atol=1e-5)
    assert zeros(merged, masks) == (0, 0)
    assert not hooks_of(merged)


@pytest.mark.parametrize("wrapper", [torch.compile, torch.nn.DataParallel])
def test_a_model_that_is_wrapped_is_merged_as_the_one_inside(wrapper):
    model, masks = adapted(init_lora_weights=False)
    with masked_adapters(wrapper(model), masks):
        before = logits(model)
        merged, report = merge_with_masks(wrapper(model), masks)
    assert zeros(merged, masks) == (0, 0)
    assert report.total_lost == 0
    torch.testing.assert_close(logits(merged), before, rtol=1e-4, atol=1e-5)


def test_a_model_that_was_compiled_before_is_masked_too():
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False))
    with torch.no_grad():
        layer[0].weight[:, ::2] = 0
    model = peft.get_peft_model(layer, peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
    compiled, x = torch.compile(model, backend="eager"), torch.ones(1, 8)
    plain = compiled(x)
    with masked_adapters(compiled):
        assert torch.equal(compiled(x), model(x))
        assert not torch.allclose(compiled(x), plain)
    assert torch.equal(compiled(x), plain)


def test_masked_adapters_have_the_gradient_of_the_masked_product():
    model, _ = adapted()
    model = model.double()
    layer = next(module for module in model.modules() if isinstance(module, peft.tuners.lora.Linear))
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    torch.nn.init.normal_(b)
    keep = (layer.get_base_layer().weight != 0).double()
    x = torch.randn(5, a.shape[1], dtype=torch.float64)
    naive = (x @ (layer.get_base_layer().weight + layer.scaling["default"] * (b @ a) * keep).T).square().sum()
    expected = torch.autograd.grad(naive, [a, b])
    with masked_adapters(model):
        found = torch.autograd.grad(layer(x).square().sum(), [a, b])
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two)


def test_what_masked_adapters_cannot_mask_is_an_error_in_its_forward_pass():
    model, _ = adapted()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    ids = Rows()[0]["input_ids"][None].repeat(2, 1)
    model.eval()
    with masked_adapters(model):
        before = model(input_ids=ids).logits
        model.merge_adapter()
        with pytest.raises(ValueError, match=r"PEFT has merged the adapter of .*: unmerge_adapter\(\) takes it out"):
            model(input_ids=ids)
        model.unmerge_adapter()
        torch.testing.assert_close(model(input_ids=ids).logits, before)
        with pytest.raises(ValueError, match="adapter_names gives each row of a batch an adapter of its own"):
            model(input_ids=ids, adapter_names=["__base__", "default"])
        model.add_adapter("narrow", peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
        model.set_adapter("narrow")  # no adapter in down_proj: nothing to subtract
        assert model(input_ids=ids).logits.isfinite().all()


def test_adapters_of_quantised_layers_are_refused_for_that(monkeypatch):
    model, masks = adapted()
    monkeypatch.setattr("peft.tuners.lora.Linear", type("Another", (), {}))
    with pytest.raises(ValueError, match=r"no plain linear ones \(Linear\), quantised ones say"):
        merge_with_masks(model, masks)


def test_adapters_that_cannot_be_masked_are_refused(tmp_path):
    model, masks = adapted(lora_dropout=0.1)
    with pytest.raises(ValueError, match=r"lora_dropout=0\.0"), masked_adapters(model, masks):
        pass
    plain, _ = half_pruned()
    with pytest.raises(ValueError, match="has no active LoRA adapter"):
        merge_with_masks(plain)
    with pytest.raises(ValueError, match=r"masks for nowhere.weight: the model has matrices like .*q_proj.weight"):
        merge_with_masks(model, masks | {"nowhere.weight": torch.ones(1, 1).bool()})
    with pytest.raises(ValueError, match="none of the masks"):
        merge_with_masks(model, {name: mask for name, mask in masks.items() if "k_proj" in name})
    with pytest.raises(ValueError, match=r"the mask of \S+q_proj.weight is \(1, 1\)"):
        merge_with_masks(model, {next(iter(masks)): torch.ones(1, 1).bool()})
    with pytest.raises(ValueError, match="masks='zeros'"):
        merge_with_masks(model, "zeros")
    with pytest.raises(ValueError, match="merge_with_masks"):
        trained(model, tmp_path, [SparsityCallback("from-zeros")])
    assert not hooks_of(model)


def test_adapters_of_transformers_itself_are_merged_by_way_of_a_folder(tmp_path):
    model, masks = half_pruned()
    model.save_pretrained(tmp_path / "pruned")
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    before = weights(model)
    with pytest.raises(TypeError, match=r"by add_adapter, which PEFT cannot merge: save them \(model.save_pretrained"):
        merge_with_masks(model)
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    model.save_pretrained(tmp_path / "adapter")
    pruned = type(model).from_pretrained(tmp_path / "pruned")
    merged, report = merge_with_masks(peft.PeftModel.from_pretrained(pruned, tmp_path / "adapter"))
    assert zeros(merged, masks) == (0, 0)
    assert 0 < report.total_lost < 1


def wrapped(model, **options):
    return peft.get_peft_model(model, peft.LoraConfig(r=4, **options))


def stepped(model):
    """Four steps of AdamW."""
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(4):
        model(input_ids=Rows().rows[:4], labels=Rows().rows[:4]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_zeros_that_an_initialisation_has_rewritten_are_not_read(start):
    model, masks = half_pruned()
    model = wrapped(model, target_modules=["q_proj"], init_lora_weights=start)
    for given in ("from-zeros", {name: mask for name, mask in masks.items() if "layers.0" in name}):
        with pytest.raises(ValueError, match=rf"init_lora_weights='{start}' has changed .*pass the masks"):
            merge_with_masks(model, given)
    with pytest.raises(ValueError, match="is not zero under its mask"), masked_adapters(model, masks):
        pass
    assert not hooks_of(model)
    merged, _ = merge_with_masks(stepped(model), masks)
    assert zeros(merged, masks)[0] == 0


def test_an_adapter_that_is_merged_already_is_refused():
    model, masks = half_pruned()
    model = stepped(wrapped(model, target_modules=["q_proj"]))
    model.merge_adapter()
    for given in ("from-zeros", masks):
        with pytest.raises(ValueError, match=r"q_proj is merged already.*unmerge_adapter\(\)"):
            merge_with_masks(model, given)
    model.unmerge_adapter()
    assert zeros(merge_with_masks(model)[0], masks) == (0, 0)


def test_a_model_without_zeros_has_no_masks():
    with pytest.raises(ValueError, match="no weight under an adapter is zero"):
        merge_with_masks(wrapped(cases.build("llama"), target_modules=["q_proj"]))


@pytest.mark.parametrize("given", [True, False], ids=["masks", "from-zeros"])
def test_zeros_of_fused_experts_are_kept(given):
    model, masks = half_pruned("mixtral")
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = stepped(wrapped(model, target_modules=["q_proj"], target_parameters=experts))
    merged, report = merge_with_masks(model, masks if given else "from-zeros")
    assert zeros(merged, masks) == (0, 0)
    assert all(report.refilled[name] for name, _ in merged.named_parameters() if name.endswith(tuple(experts)))
    changed = [mask for name, mask in masks.items() if "experts" in name or "q_proj" in name]
    assert report.zeros == sum(int(mask.sum()) for mask in changed)


@pytest.mark.parametrize("given", [True, False], ids=["masks", "from-zeros"])
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": list(range(256))}},
    ],
    ids=["saved", "embedding", "tokens"],
)
def test_zeros_beside_linear_layers_are_kept(options, given, caplog):
    model = cases.build("llama")
    config = GradProbeConfig(sparsity=0.5, score="magnitude", scope="row", include=["*"])
    result = prune_pretrained(model, config, evaluation=False, progress=False)
    source = result if given else "from-zeros"
    model = wrapped(model, **options)
    with masked_adapters(model, source):
        merged, report = merge_with_masks(stepped(model), source)
    assert zeros(merged, result.masks)[0] == 0
    name = next(name for name in result.masks if "embed_tokens" in name)
    assert "embed_tokens" in caplog.text
    assert report.refilled[name] > 0
    assert f"weights of {name} set to zero again" in str(report)


def test_what_is_no_product_is_refused():
    model, masks = half_pruned()
    model = wrapped(model, target_modules=["q_proj"], use_dora=True)
    with pytest.raises(ValueError, match=r"something else than B A \(Dora\)"), masked_adapters(model, masks):
        pass
    with pytest.raises(ValueError, match="use_dora=False"):
        merge_with_masks(model, masks)


@pytest.mark.filterwarnings("ignore:.lora_bias")
def test_a_bias_that_cannot_be_merged_is_refused_before_a_zero_is_filled():
    model, masks = half_pruned()
    adapted = wrapped(model, target_modules=["q_proj"], lora_bias=True, init_lora_weights=False)
    with pytest.raises(ValueError, match=r"q_proj.weight has a bias.*lora_bias=False"):
        merge_with_masks(adapted, masks)
    assert zeros(adapted.unload(), masks) == (0, 0)


def test_masks_that_are_given_count_for_all_matrices_and_in_place_of_zeros():
    model = cases.build("llama")
    token, embedding = int(Rows().rows[0, 0]), "model.embed_tokens.weight"
    with torch.no_grad():
        model.get_parameter(embedding)[token] = 0  # zero and not pruned: it may train
    key, query = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "kq")
    masks = {name: torch.zeros_like(model.get_parameter(name)).bool() for name in (embedding, key, query)}
    masks[embedding][token + 1] = masks[key][0] = masks[query][0] = True
    model = stepped(wrapped(model, target_modules=["q_proj"], modules_to_save=["embed_tokens"]))
    merged, report = merge_with_masks(model, masks)
    assert zeros(merged, masks)[0] == 0
    assert merged.get_parameter(embedding)[token].any()
    assert report.refilled == {name: int(masks[name].sum()) for name in (key, embedding)}


def test_an_adapter_of_one_end_of_tied_weights_is_told(caplog):
    """Merged, it is in the embedding as well, and "every zero kept" says nothing of that."""
    model, _ = half_pruned()
    model.lm_head.weight = model.model.embed_tokens.weight
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(model, config)
    with masked_adapters(model):
        assert "lm_head is that of base_model.model.model.embed_tokens, too" in caplog.text
        caplog.clear()
        before = logits(model)
        merged, _ = merge_with_masks(model)
    assert "which the merge changes with it" in caplog.text
    assert not torch.allclose(logits(merged), before, atol=1e-3)
    caplog.clear()
    model, _ = adapted()
    merge_with_masks(model)
    assert "which the merge changes" not in caplog.text
