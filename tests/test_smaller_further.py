"""A smaller checkpoint is pruned, recovered and measured like any other: zeros on top, towards the dense model."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from huggingface_hub import ModelCard
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, pipeline

from gradprobe_hf import GradProbeConfig, RecoveryConfig, compare_pretrained, prune_pretrained, recover_pretrained
from gradprobe_hf.checkpoint.inspect import inspect_checkpoint
from gradprobe_hf.cli.output import print_recovery
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.report.plots import sparsity_figure
from gradprobe_hf.report.report import Report
from gradprobe_hf.training import keep_sparsity
from tests import cases

TEXT = [f"Sentence number {number} is about {number * 7} other things." for number in range(40)]
STEPS = RecoveryConfig(steps=2, batch_size=2, sequence_length=16, learning_rate=1e-2, warmup_steps=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With the dense model and the smaller one."""
    folder = tmp_path_factory.mktemp("structures")
    cases.build("llama").save_pretrained(folder / "dense")
    cases.tokenizer().save_pretrained(folder / "dense")
    prune_pretrained(
        folder / "dense",
        GradProbeConfig(structure={"ffn": 8, "kv_groups": 1, "blocks": 1}),
        calibration=cases.batches("llama"),
        evaluation=False,
        output_dir=folder / "smaller",
        progress=False,
    )
    return folder


def loaded(path):
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info.values())
    return model


def shapes(model):
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def test_transformers_generates_from_it_and_a_pipeline_does(folder):
    pipe = pipeline("text-generation", model=str(folder / "smaller"), device="cpu")
    made = pipe("Some words", max_new_tokens=5, min_new_tokens=5, do_sample=False, return_full_text=False)
    ids = cases.tokenizer()("Some words", return_tensors="pt").input_ids
    asked = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    smaller = loaded(folder / "smaller")
    wanted = smaller.generate(ids, **asked)[0, ids.shape[1] :]
    assert made[0]["generated_text"] == pipe.tokenizer.decode(wanted, skip_special_tokens=True)
    # A cache of its shapes: step by step as without one.
    assert torch.equal(smaller.generate(ids, **asked, use_cache=False), smaller.generate(ids, **asked))


def test_a_card_speaks_of_writing_where_a_model_writes(folder, tmp_path):
    said = "where many tokens are read at once"
    assert (
        f"{said},\n  fewer blocks at every token that is written.\n" in (folder / "smaller" / "README.md").read_text()
    )
    reads = {"structure": {"ffn": 8}, "update": "none", "output_dir": tmp_path / "reads"}
    cases.prune(cases.build("bert"), cases.batches("bert"), **reads)
    assert f"{said}.\n" in (tmp_path / "reads" / "README.md").read_text()


def test_a_trainer_trains_it(folder, tmp_path):
    model = loaded(folder / "smaller")
    before = cases.bits(model)
    options = TrainingArguments(
        tmp_path, max_steps=2, learning_rate=1e-2, report_to="none", disable_tqdm=True, dataloader_pin_memory=False
    )
    rows = [{"input_ids": one, "labels": one} for batch in cases.batches("llama") for one in batch["input_ids"]]
    Trainer(model, options, train_dataset=rows).train()
    assert cases.changed(model, before) == list(before)
    model.save_pretrained(tmp_path / "trained")
    assert shapes(loaded(tmp_path / "trained")) == shapes(model)


def test_adapters_are_trained_on_it_and_merged(folder):
    peft = pytest.importorskip("peft")
    model, batch = loaded(folder / "smaller"), cases.batches("llama")[0]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj", "down_proj"]))
    torch.nn.init.normal_(adapted.get_parameter("base_model.model.model.layers.0.mlp.down_proj.lora_B.default.weight"))
    adapted(**batch, labels=batch["input_ids"]).loss.backward()
    assert all(one.grad is not None for name, one in adapted.named_parameters() if "lora" in name)
    logits = adapted.eval()(**batch).logits
    torch.testing.assert_close(adapted.merge_and_unload()(**batch).logits, logits)


def test_zeros_go_on_top(folder):
    config = GradProbeConfig(pattern="2:4", refinement="blocks")
    texts = {"calibration": cases.batches("llama"), "evaluation": False, "progress": False}
    result = prune_pretrained(folder / "smaller", config, **texts, output_dir=folder / "zeros")
    smaller, zeros = loaded(folder / "smaller"), loaded(folder / "zeros")
    assert shapes(zeros) == shapes(smaller)
    assert inspect_checkpoint(folder / "zeros").patterns == ["2:4", "4:8"]
    said = json.loads((folder / "zeros" / "config.json").read_text())["gradprobe"]
    assert said["structure"] == {"ffn": 8, "kv_groups": 1, "blocks": 1}
    assert said["pattern"] == "2:4"
    assert result.report.structure is None
    card = (folder / "zeros" / "README.md").read_text()
    gone = "1 block, 8 FFN channels of every block, 1 key-value head of every block"
    assert f"It had been made smaller before: without {gone}." in card
    assert {"sparse", "structured-pruning", "sparsity-2-4"} <= set(ModelCard(card).data.tags)


def test_a_card_says_how_much_went_and_not_what_was_asked(tmp_path):
    """A share of channels is rounded, of a narrow network by far."""
    model = cases.build("llama")
    model = type(model)(type(model.config)(**{**model.config.to_dict(), "intermediate_size": 100}))
    cases.prune(model, cases.batches("llama"), structure={"ffn": 0.1}, update="none", output_dir=tmp_path / "made")
    assert "removed: 36 FFN channels of every block." in (tmp_path / "made" / "README.md").read_text()


def test_a_smaller_model_is_made_smaller_again(folder):
    texts = {"calibration": cases.batches("llama"), "evaluation": False, "progress": False}
    made = folder / "again"
    prune_pretrained(folder / "smaller", GradProbeConfig(structure={"ffn": 4}), **texts, output_dir=made)
    assert loaded(made).config.intermediate_size == 12
    # Of the dense model, as what is made of it will say.
    said = json.loads((made / "config.json").read_text())["gradprobe"]
    assert said["structure"] == {"ffn": 12, "kv_groups": 1, "blocks": 1}


def test_zeros_that_are_filled_again_are_a_warning(folder):
    texts = {"calibration": cases.batches("llama"), "evaluation": False, "progress": False, "apply": False}
    zeros = cases.build("llama")
    for target in find_targets(zeros):
        target.matrix(zeros).data[:, ::2] = 0
    cut = prune_pretrained(zeros, GradProbeConfig(structure={"ffn": 8}, update="none"), **texts)
    assert cut.report.warnings == []
    # What stays and is zero has not gone.
    assert sparsity_figure(cut.report).axes[0].get_title(loc="left") == "Gone of every matrix, 20.0% of their weights"
    told = {**texts, "evaluation": cases.batches("llama", seed=9)}
    del told["apply"]
    (row,) = compare_pretrained(zeros, configs={"cut": cut.config}, **told).rows
    assert (row.sparsity, row.zeros) == (0.2, sum(one.pruned for one in cut.report.matrices))
    filled = prune_pretrained(zeros, GradProbeConfig(structure={"ffn": 8}), **texts)
    assert filled.report.zeros < cut.report.zeros
    assert re.search(r"had 50\.0% zeros, and has .*update='none'", " ".join(filled.report.warnings))


def test_a_pattern_that_is_lost_is_a_warning(tmp_path):
    """And what a model was pruned to before it was made smaller is still said of what is made of it."""
    texts = {"calibration": cases.batches("llama"), "evaluation": False, "progress": False}
    model = cases.build("llama")
    model = type(model)(type(model.config)(**{**model.config.to_dict(), "num_hidden_layers": 4}))
    model.save_pretrained(tmp_path / "dense")
    prune_pretrained(tmp_path / "dense", GradProbeConfig(pattern="2:4"), **texts, output_dir=tmp_path / "zeros")
    held = {}
    for name, amounts in {"channels": {"ffn": 7}, "heads": {"kv_groups": 1}, "blocks": {"blocks": 1}}.items():
        config = GradProbeConfig(structure=amounts, update="none")
        result = prune_pretrained(tmp_path / "zeros", config, **texts, output_dir=tmp_path / name)
        found = inspect_checkpoint(tmp_path / name)
        held[name] = "2:4" in found.patterns
        warned = [warning for warning in result.report.warnings if "2:4 pattern" in warning]
        assert len(warned) == (not held[name])
        assert not warned or "`mlp.down_proj` will hold it no more" in warned[0]
    assert held == {"channels": False, "heads": True, "blocks": True}
    prune_pretrained(tmp_path / "blocks", config, **texts, output_dir=tmp_path / "fewer")
    for name in ("blocks", "fewer"):
        assert "been pruned already, to a sparsity of 50.0%" in (tmp_path / name / "README.md").read_text()
        assert json.loads((tmp_path / name / "config.json").read_text())["gradprobe"]["pruned_to"] == 0.5


def test_zeros_that_single_weights_fill_again_are_a_warning():
    texts = {"calibration": cases.batches("llama"), "evaluation": False, "progress": False, "apply": False}
    zeros = cases.build("llama")
    for target in find_targets(zeros):
        target.matrix(zeros).data[:, ::2] = 0
    filled = prune_pretrained(zeros, GradProbeConfig(sparsity=0.5), **texts)
    said = re.search(r"The model had 50\.0% zeros, and ([\d,]+) of them", " ".join(filled.report.warnings))
    with filled.applied(keep=False):
        now = sum(int((target.matrix(zeros)[:, ::2] != 0).sum()) for target in filled.targets)
    assert said
    assert int(said[1].replace(",", "")) == now > 0
    kept = prune_pretrained(zeros, GradProbeConfig(sparsity=0.6, update="none", probes=1), **texts)
    assert kept.report.warnings == []
    dense = prune_pretrained(cases.build("llama"), GradProbeConfig(sparsity=0.5), **texts)
    assert not any("zeros" in warning for warning in dense.report.warnings)


@pytest.mark.slow
def test_zeros_of_a_smaller_model_stay_when_it_is_recovered(folder):
    options = {"output_dir": folder / "half", "calibration": cases.batches("llama"), "evaluation": False}
    config = GradProbeConfig(sparsity=0.5, update="sparsegpt")
    result = prune_pretrained(folder / "smaller", config, **options, progress=False)
    half = loaded(folder / "half")
    found = recover_pretrained(
        folder / "half",
        folder / "dense",
        STEPS,
        text=TEXT,
        evaluation=False,
        output_dir=folder / "both",
        progress=False,
    )
    both = loaded(folder / "both")
    assert shapes(both) == shapes(half)
    for target in result.targets:
        assert (target.matrix(both)[result.masks[target.name]] == 0).all()
    assert any(not torch.equal(one, half.get_parameter(name)) for name, one in both.named_parameters())
    assert found.report.zeros == result.report.zeros
    # All that was measured is beside the model that it was trained towards, and the card says so.
    dense = loaded(folder / "dense").num_parameters()
    assert Report.load(folder / "half").files["dense"] < Report.load(folder / "both").files["dense"] == 4 * dense
    assert (
        f"the predictions of `dense` ({dense:,} parameters), which all" in (folder / "both" / "README.md").read_text()
    )


def test_a_smaller_model_is_recovered_whole(folder):
    found = recover_pretrained(
        folder / "smaller",
        folder / "dense",
        STEPS,
        text=TEXT,
        evaluation=False,
        output_dir=folder / "trained",
        progress=False,
    )
    before, after = loaded(folder / "smaller"), loaded(folder / "trained")
    assert shapes(after) == shapes(before)
    moved = [name for name, one in after.named_parameters() if not torch.equal(one, before.get_parameter(name))]
    assert moved == list(shapes(after))
    # What was removed is still said, and of how large a model.
    saved = Report.load(folder / "trained")
    assert saved.structure == Report.load(folder / "smaller").structure
    assert saved.files["dense"] == 4 * loaded(folder / "dense").num_parameters()
    assert saved.zeros == found.report.zeros == Report.load(folder / "smaller").zeros
    card = (folder / "trained" / "README.md").read_text()
    assert "| `intermediate_size` | 24 | 16 |" in card
    assert "Every zero stayed" not in card
    assert "trained towards the dense model's predictions, in" in card


@pytest.mark.slow
def test_what_is_dense_in_a_card_is_what_was_measured_beside(folder, capsys):
    """Of a model that was made smaller twice: the sizes and speeds of the one between are none of the dense model's."""
    smaller, dense = loaded(folder / "smaller").num_parameters(), loaded(folder / "dense").num_parameters()
    again = GradProbeConfig(structure={"ffn": 8}, update="none", measure_speed=True)
    options = {"evaluation": False, "progress": False}
    prune_pretrained(
        folder / "smaller", again, calibration=cases.batches("llama"), output_dir=folder / "twice", **options
    )
    assert f"| parameters | {smaller:,} |" in (folder / "twice" / "README.md").read_text()
    assert "tokens per second" in (folder / "twice" / "README.md").read_text()
    found = recover_pretrained(
        folder / "twice", folder / "dense", STEPS, text=TEXT, output_dir=folder / "twice-trained", **options
    )
    card = (folder / "twice-trained" / "README.md").read_text()
    left = loaded(folder / "twice-trained").num_parameters()
    assert f"| parameters | {dense:,} | {left:,} |" in card
    assert "| `intermediate_size` | - | 8 |" in card
    assert "tokens per second" not in card
    assert "# smaller, " in card
    print_recovery(found.report, "made")
    assert f"{left:,} of {dense:,} parameters are left" in capsys.readouterr().out


@pytest.mark.slow
def test_adapters_train_a_smaller_model_in_memory(folder):
    pytest.importorskip("peft")
    model = loaded(folder / "smaller")
    before = cases.bits(model)
    config = RecoveryConfig(**{**STEPS.to_dict(), "lora_r": 2, "steps": 8, "learning_rate": 3e-3})
    found = recover_pretrained(
        model,
        loaded(folder / "dense"),
        config,
        text=TEXT,
        evaluation=False,
        processing_class=cases.tokenizer(),
        progress=False,
    )
    changed = cases.changed(found.model, before)
    assert "model.layers.0.mlp.down_proj.weight" in changed
    assert "model.embed_tokens.weight" not in changed
    found.save_pretrained(folder / "adapted")
    card = (folder / "adapted" / "README.md").read_text()
    assert "without some of its channels, heads or blocks" in card
    assert "zeros are stored" not in card


def test_what_does_not_go_together_says_so(folder):
    model = cases.build("llama")
    wider = type(model)(type(model.config)(**{**model.config.to_dict(), "intermediate_size": 32})).eval()
    with pytest.raises(ValueError, match=re.escape("is (32, 16) in the pruned model and (24, 16) in the teacher")):
        recover_pretrained(wider, model, STEPS, text=TEXT, processing_class=cases.tokenizer(), progress=False)
    result = cases.prune(model, cases.batches("llama"), structure={"ffn": 8}, update="none")
    with pytest.raises(ValueError, match=r"save it .* and recover the checkpoint"):
        recover_pretrained(result, model, STEPS, text=TEXT, progress=False)
    with result.applied():
        pass
    # The model itself keeps its shapes: what is pruned of it now would be its zeros once more.
    for options in ({"structure": {"ffn": 8}}, {"sparsity": 0.5}):
        with pytest.raises(ValueError, match=r"has lost whole structures.* go on from the checkpoint"):
            cases.prune(result.model, cases.batches("llama"), **options)
    with pytest.raises(ValueError, match=r"has lost whole structures.* go on from the checkpoint"):
        recover_pretrained(result.model, cases.build("llama"), STEPS, text=TEXT, processing_class=cases.tokenizer())
    optimizer = torch.optim.SGD(result.model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"has lost whole structures"), keep_sparsity(result.model, optimizer):
        pass
    for option in ({"sparsity": 0.5}, {"pattern": "2:4"}):
        with pytest.raises(ValueError, match="prune the smaller checkpoint once more: zeros go on top"):
            GradProbeConfig(structure={"ffn": 8}, **option)


def test_a_model_that_was_trained_after_it_was_pruned_is_not_cut(tmp_path):
    """What is in memory and what would be written are no longer the same: through a bias what is zero has gradients."""
    torch.manual_seed(0)
    values = {**cases.build("llama").config.to_dict(), "mlp_bias": True}
    model = LlamaForCausalLM(LlamaConfig(**values)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    result = cases.prune(model, cases.batches("llama"), structure={"ffn": 8}, update="none", apply=True)
    result.save_pretrained(tmp_path / "before")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = cases.batches("llama")[0]
    model(**batch, labels=batch["input_ids"]).loss.backward()
    optimizer.step()
    with pytest.raises(ValueError, match="was measured before: save the result first"):
        result.save_pretrained(tmp_path / "after")
    with pytest.raises(
        ValueError, match=r"down_proj\S* is zero no more where whole structures went.*Save the result first"
    ):
        replace(result, weights="").save_pretrained(tmp_path / "after")  # as of one that is offloaded
    assert not (tmp_path / "after").exists()


@pytest.mark.parametrize("apply", [True, False])
def test_a_result_is_not_saved_with_weights_that_were_trained_since(apply, tmp_path):
    """Its report and card have what was measured before."""
    model = cases.build("llama")
    result = cases.prune(model, cases.batches("llama"), sparsity=0.5, apply=apply)
    result.save_pretrained(tmp_path / "before")
    result.save_pretrained(tmp_path / "again")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.01)
    with pytest.raises(ValueError, match="the model was changed after this run, trained say"):
        result.save_pretrained(tmp_path / "after")
    assert not (tmp_path / "after").exists()
