"""RWKV divides weights of later blocks when it runs in evaluation mode: what is written has them as they are stored."""

from __future__ import annotations

import pytest
import torch
from transformers import RwkvConfig, RwkvForCausalLM

from gradprobe_hf.model.fingerprint import weights_fingerprint
from gradprobe_hf.model.passes.patches import eval_mode
from gradprobe_hf.model.passes.rescaling import restore_scale
from tests import cases

OUTPUT = "rwkv.blocks.3.attention.output.weight"  # divided by two where every second block is
IDS = torch.randint(1, 64, (4, 16), generator=torch.Generator().manual_seed(0))
BATCHES = [{"input_ids": IDS[:2]}, {"input_ids": IDS[2:]}]


def rwkv(every=2):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "attention_hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
    model = RwkvForCausalLM(RwkvConfig(vocab_size=64, context_length=32, rescale_every=every, **sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.2)
    return model


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("used_before", [False, True])
def test_the_checkpoint_is_the_model_that_was_measured(used_before, tmp_path):
    model = rwkv()
    stored = model.get_parameter(OUTPUT).clone()
    if used_before:
        logits(model)
        assert torch.equal(model.get_parameter(OUTPUT), stored / 2)
    options = {"sparsity": 0.5, "update": "none", "evaluation": BATCHES, "apply": True}
    result = cases.prune(model, BATCHES, output_dir=tmp_path / "out", **options)
    saved = RwkvForCausalLM.from_pretrained(tmp_path / "out")
    kept = ~result.masks[OUTPUT]
    assert torch.equal(saved.get_parameter(OUTPUT)[kept], stored[kept])
    assert saved.config.rescale_every == model.config.rescale_every == 2
    assert torch.equal(logits(saved), logits(result.model))
    # Without any division its function is the same, and so are masks.
    plain = rwkv(every=0)
    masks = cases.prune(plain, BATCHES, **options).masks
    assert all(torch.equal(masks[name], mask) for name, mask in result.masks.items())
    torch.testing.assert_close(logits(plain), logits(saved), rtol=0, atol=1e-3)  # a norm's epsilon is not divided
    # It was run in the meantime, which divides: that is no change of the result.
    result.save_pretrained(tmp_path / "again")
    assert torch.equal(RwkvForCausalLM.from_pretrained(tmp_path / "again").get_parameter(OUTPUT)[kept], stored[kept])


def test_whole_blocks_go_of_it(tmp_path):
    options = {"structure": {"blocks": 1}, "update": "none", "apply": True}
    result = cases.prune(rwkv(), BATCHES, output_dir=tmp_path / "out", **options)
    saved = RwkvForCausalLM.from_pretrained(tmp_path / "out")
    assert saved.config.num_hidden_layers == 3
    with eval_mode(saved), eval_mode(result.model):  # by its own scale a later block of three is one of four
        torch.testing.assert_close(logits(saved), logits(result.model))


def test_of_two_models_with_one_configuration_each_has_its_own_scale():
    model = rwkv()
    other = RwkvForCausalLM(model.config).eval()
    before = cases.bits(other)
    logits(other)
    with eval_mode(model), eval_mode(other):
        assert not cases.changed(other, before)


def test_its_mode_and_its_scale_are_the_user_s_afterwards():
    model = rwkv().train()
    before, fingerprint = cases.bits(model), weights_fingerprint(model)
    with eval_mode(model):
        logits(model)
        assert not cases.changed(model, before)
        assert model.rwkv.config.rescale_every == 0
    assert model.training
    assert model.rwkv.config is model.config
    assert model.config.rescale_every == 2
    wanted = logits(model)  # divided by the model itself, now that it is asked to
    assert cases.changed(model, before)
    assert weights_fingerprint(model) == fingerprint
    restore_scale(model)
    assert not cases.changed(model, before)
    assert torch.equal(logits(model), wanted)
