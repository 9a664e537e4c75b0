"""LoRA on a pruned model: what a plain merge destroys, and what the two ways out keep."""

from __future__ import annotations

import pytest
import torch

from gradprobe_hf.training import SparsityCallback, masked_adapters, merge_with_masks
from tests.trainers import Rows, half_pruned, hooks_of, trained, zeros

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


def test_adapters_that_cannot_be_masked_are_refused(tmp_path):
    model, masks = adapted(lora_dropout=0.1)
    with pytest.raises(ValueError, match=r"lora_dropout=0\.0"), masked_adapters(model, masks):
        pass
    plain, _ = half_pruned()
    with pytest.raises(ValueError, match="has no active LoRA adapter"):
        merge_with_masks(plain)
    with pytest.raises(ValueError, match="none of the masks"):
        merge_with_masks(model, {"nowhere.weight": torch.ones(1, 1)})
    with pytest.raises(ValueError, match="masks='zeros'"):
        merge_with_masks(model, "zeros")
    with pytest.raises(ValueError, match="merge_with_masks"):
        trained(model, tmp_path, [SparsityCallback("from-zeros")])
    assert not hooks_of(model)
