"""Adapters are never pruned: they are folded into the weights when that is asked for, and refused when it is not."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from gradprobe_hf import GradProbeConfig, RecoveryConfig, prune_pretrained, recover_pretrained
from gradprobe_hf.cli import main
from gradprobe_hf.model.loading import adapters
from gradprobe_hf.report.card.build import build_card
from tests import cases

peft = pytest.importorskip("peft")

MODULES = {"llama": ["q_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"]}


def lora(name="llama", **options):
    return peft.LoraConfig(r=4, target_modules=MODULES[name], fan_in_fan_out=name == "gpt2", **options)


def trained(model):
    """With adapters that do something: LoRA begins with B at zero."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                parameter.normal_(std=0.3)
    return model.eval()


def wrapped(name="llama", **options):
    return trained(peft.get_peft_model(cases.build(name), lora(name, **options)))


def injected():
    model = cases.build("llama")
    model.add_adapter(lora())
    return trained(model)


def mixed():
    return trained(peft.get_peft_model(cases.build("llama"), lora(), mixed=True))


def logits(model, batch):
    with torch.no_grad():
        return model(**batch).logits


def run(model, **options):
    batches = cases.batches("llama", rows=2)
    settings = {"calibration": batches, "evaluation": False, "progress": False} | options
    return prune_pretrained(model, GradProbeConfig(probes=1), **settings)


@pytest.mark.parametrize("make", [wrapped, injected, mixed])
def test_adapters_in_memory_are_refused_before_any_work(make, monkeypatch):
    monkeypatch.setattr("gradprobe_hf.run.request.reading.load_batches", lambda *_, **__: pytest.fail("work began"))
    model = make()
    before = cases.bits(model)
    with pytest.raises(ValueError, match=r"has adapters \(default\), which are not pruned.*merge_adapters=True"):
        run(model)
    assert cases.changed(model, before) == []


@pytest.mark.parametrize("make", [wrapped, injected, mixed, lambda: wrapped("gpt2")])
def test_folded_adapters_are_pruned_as_the_model_they_make(make, tmp_path):
    model = make()
    before, batch = cases.bits(model), cases.batches("llama", rows=2)[0]
    wanted = logits(model, batch)
    dense = run(model, merge_adapters=True, apply=False)
    torch.testing.assert_close(logits(dense.model, batch), wanted, atol=1e-5, rtol=1e-4)
    assert not any("lora" in name for name in dense.masks)
    found = run(model, merge_adapters=True, output_dir=tmp_path / "out")
    assert cases.changed(model, before) == [], "what is pruned is a copy"
    assert torch.equal(logits(model, batch), wanted)
    assert found.report.sparsity == pytest.approx(0.5, abs=1e-3)
    for target in found.targets:
        assert not target.matrix(found.model)[found.masks[target.name]].any()
    assert all(parameter.requires_grad for parameter in found.model.parameters()), "it can be trained further"
    saved = type(found.model).from_pretrained(tmp_path / "out")
    assert torch.equal(logits(saved, batch), logits(found.model, batch))
    assert not (tmp_path / "out" / "adapter_config.json").exists()


def test_a_run_that_fails_leaves_the_adapted_model_as_it_was():
    model = wrapped()
    before = cases.bits(model)

    def failing(model, batch):
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        run(model, merge_adapters=True, loss_fn=failing)
    assert cases.changed(model, before) == []


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A base and an adapter in folders of their own, and the logits of both together."""
    folder = tmp_path_factory.mktemp("adapted")
    base = cases.build("llama")
    base.save_pretrained(folder / "base")
    cases.tokenizer().save_pretrained(folder / "base")
    model = trained(peft.get_peft_model(LlamaForCausalLM.from_pretrained(folder / "base"), lora()))
    model.save_pretrained(folder / "adapter")
    return folder / "base", folder / "adapter", logits(model, cases.batches("llama", rows=2)[0])


def test_an_adapters_folder_is_its_base_with_the_adapter_folded_in(stored, tmp_path):
    _, folder, wanted = stored
    dense = run(folder, merge_adapters=True, apply=False, output_dir=tmp_path / "out")
    torch.testing.assert_close(logits(dense.model, cases.batches("llama", rows=2)[0]), wanted, atol=1e-5, rtol=1e-4)
    assert dense.processing_class is not None, "the base's tokenizer"
    assert dense.report.model["adapter"] == "adapter"
    assert dense.report.model["name"] == "base"
    assert "the adapter `adapter` was folded into" in str(build_card(dense.report, dense.config, {}, "here"))


@pytest.mark.parametrize("device_map", ["disk", {"model": "cpu", "lm_head": "disk"}])
def test_an_adapter_s_base_on_the_disk_is_refused_before_it_is_loaded(device_map, stored, monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(ValueError, match=r"with the adapter '.*adapter': adapters are folded into .* in one piece"):
        run(stored[1], merge_adapters=True, device_map=device_map)


def test_the_subfolder_of_an_adapter_is_not_its_bases(stored, half, tmp_path):
    """Its base's tokenizer was looked for there: a checkpoint without one came of it."""
    shutil.copytree(stored[1], tmp_path / "adapters" / "first")
    found = run(tmp_path / "adapters", subfolder="first", merge_adapters=True, apply=False, output_dir=tmp_path / "out")
    assert found.processing_class is not None
    assert (tmp_path / "out" / "tokenizer.json").is_file()


@pytest.mark.parametrize("labels", [2, 3])
def test_a_classifiers_adapter_brings_the_head_that_its_base_lacks(labels, stored):
    base, folder, _ = stored
    classifier = LlamaForSequenceClassification.from_pretrained(base, num_labels=labels)
    classifier.config.pad_token_id = 258
    model = trained(peft.get_peft_model(classifier, lora(task_type="SEQ_CLS")))
    beside = folder.parent / f"classifier-{labels}"
    model.save_pretrained(beside)
    labelled = [{**batch, "labels": torch.tensor([0, 1])} for batch in cases.batches("llama", rows=2)]
    found = run(beside, calibration=labelled, merge_adapters=True, apply=False)
    assert isinstance(found.model, LlamaForSequenceClassification)
    torch.testing.assert_close(found.model.score.weight, model.base_model.model.score.weight)
    torch.testing.assert_close(logits(found.model, labelled[0]), logits(model, labelled[0]), atol=1e-5, rtol=1e-4)


def with_licence(folder, licence, file):
    (folder / "README.md").write_text(f"---\nlicense: {licence}\n---\n" if licence else "A model.\n")
    (folder / file).write_text(f"{licence} in words")


@pytest.mark.parametrize(
    ("of_base", "of_adapter", "license_", "name"),
    [
        ("apache-2.0", "cc-by-nc-4.0", "other", "apache-2.0-and-cc-by-nc-4.0"),
        ("mit", "mit", "mit", None),
        ("mit", "", "mit", None),
        ("", "mit", None, None),
    ],
)
def test_a_licence_goes_where_the_weights_of_an_adapter_go(
    of_base, of_adapter, license_, name, stored, tmp_path, caplog
):
    base, adapter = (Path(shutil.copytree(one, tmp_path / one.name)) for one in stored[:2])
    config = json.loads((adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": str(base)}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with_licence(base, of_base, "LICENSE")
    with_licence(adapter, of_adapter, "LICENSE")
    run(adapter, merge_adapters=True, apply=False, output_dir=tmp_path / "out")
    card = ModelCard.load(tmp_path / "out" / "README.md").data
    assert (card.license, card.license_name) == (license_, name)
    assert (tmp_path / "out" / "LICENSE").read_text() == f"{of_base} in words"
    assert (tmp_path / "out" / "LICENSE-adapter").read_text() == f"{of_adapter} in words"
    run(tmp_path / "out", apply=False, output_dir=tmp_path / "again")
    assert (tmp_path / "again" / "LICENSE-adapter").is_file(), "and on"
    run(adapter, merge_adapters=True, apply=False, output_dir=tmp_path / "out", overwrite=True)
    assert ("the weights are of both" in caplog.text) == (of_adapter not in (of_base, ""))


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (
            "/nowhere/llama",
            r"no such folder: '/nowhere/llama'.* is the base that the adapter '.*' names \(base_model_name",
        ),
        (
            "quantised",
            r"is stored quantized \(bitsandbytes\).* name another there, unquantised, or load both with PEFT",
        ),
    ],
)
def test_a_base_that_cannot_be_loaded_is_the_one_that_the_adapter_names(base, message, stored, tmp_path):
    adapter = Path(shutil.copytree(stored[1], tmp_path / "adapter"))
    if base == "quantised":
        base = Path(shutil.copytree(stored[0], tmp_path / base))
        values = json.loads((base / "config.json").read_text())
        values |= {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
        (base / "config.json").write_text(json.dumps(values))
    config = json.loads((adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": str(base)}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises((OSError, ValueError), match=message):
        run(adapter, merge_adapters=True)


def test_from_the_command_line(stored, text_file, tmp_path, capsys):
    _, folder, _ = stored
    options = ["prune", str(folder), "--output", str(tmp_path / "out"), "--calibration", str(text_file), "--quiet"]
    options += ["--probes", "1", "--num-samples", "2", "--sequence-length", "16"]
    assert main(options) == 1
    said = capsys.readouterr().err
    assert "is an adapter for" in said
    assert "--merge-adapters" in said
    assert not (tmp_path / "out").exists()
    assert main([*options, "--merge-adapters"]) == 0
    assert json.loads((tmp_path / "out" / "gradprobe_report.json").read_text())["model"]["adapter"] == "adapter"


def test_a_checkpoint_is_no_adapter_to_fold_and_a_mistyped_name_is_neither(stored):
    base, _, _ = stored
    with pytest.raises(ValueError, match=r"merge_adapters=True has no effect here: .* is no adapter"):
        run(base, merge_adapters=True)
    with pytest.raises(OSError, match="cannot load 'me/mistyped'"):
        run("me/mistyped", merge_adapters=True, local_files_only=True)


def test_an_adapters_tokenizer_goes_before_its_bases(stored, tmp_path):
    base, folder, _ = stored
    model = peft.PeftModel.from_pretrained(cases.build("llama"), folder)
    model.base_model.model.resize_token_embeddings(cases.VOCABULARY + 1)
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    tokenizer = cases.tokenizer()
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(tmp_path / "adapter")
    found = run(tmp_path / "adapter", merge_adapters=True, apply=False)
    assert "<tool>" in found.processing_class.get_vocab()
    rows = found.model.get_input_embeddings().weight
    assert torch.equal(rows, model.get_input_embeddings().weight)


def test_weights_that_the_adapters_file_lacks_are_an_error(stored, tmp_path):
    _, folder, _ = stored
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())
    tensors = load_file(folder / "adapter_model.safetensors")
    del tensors[next(name for name in tensors if "lora_B" in name)]
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"does not fit .*Found missing adapter keys"):
        run(tmp_path / "adapter", merge_adapters=True)


def test_a_prompt_that_was_learned_cannot_be_folded():
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = peft.get_peft_model(cases.build("llama"), config)
    with pytest.raises(ValueError, match="learns a prompt or a prefix"):
        run(model, merge_adapters=True)


@pytest.mark.parametrize("end", ["embed_tokens", "lm_head"])
def test_an_adapter_of_one_end_of_tied_weights_is_refused(end):
    """PEFT folds it into the one tensor of both, which makes another model."""
    tied, untied = cases.build("llama"), cases.build("llama")
    tied.config.tie_word_embeddings = True
    tied.lm_head.weight = tied.model.embed_tokens.weight
    adapter = peft.LoraConfig(r=4, target_modules=[end])
    with pytest.raises(ValueError, match=f"an adapter of .*{end} cannot be folded in: its weight is tied"):
        run(trained(peft.get_peft_model(tied, adapter)), merge_adapters=True)
    assert run(trained(peft.get_peft_model(untied, adapter)), merge_adapters=True).model is not None


def test_a_model_without_adapters_has_none_to_fold(checkpoint):
    for model in (cases.build("llama"), checkpoint):
        with pytest.raises(ValueError, match="merge_adapters=True has no effect here"):
            run(model, merge_adapters=True)


def test_an_adapters_folder_is_not_estimated(stored, capsys):
    assert main(["estimate", str(stored[1])]) == 1
    assert "is an adapter for" in capsys.readouterr().err


def test_without_peft_an_adapters_folder_says_what_to_install(stored, monkeypatch):
    def missing():
        raise ImportError("adapters need PEFT: pip install peft")

    monkeypatch.setattr(adapters, "imported_peft", missing)
    with pytest.raises(ImportError, match="pip install"):
        run(stored[1], merge_adapters=True)


@pytest.fixture(scope="module")
def half(stored, tmp_path_factory):
    """The model that the adapter makes of its base, half of it zero."""
    path = tmp_path_factory.mktemp("half") / "half"
    run(stored[1], merge_adapters=True, output_dir=path)
    return path


def recovered(pruned, teacher, **options):
    config = RecoveryConfig(steps=2, batch_size=2, sequence_length=16, learning_rate=1e-3, warmup_steps=0)
    settings = {"text": cases.batches("llama", rows=8), "evaluation": cases.batches("llama", rows=2, seed=5)} | options
    return recover_pretrained(pruned, teacher, config, progress=False, **settings)


def test_the_teacher_of_what_an_adapter_made_is_the_adapter(stored, half):
    base, folder, _ = stored
    named = recovered(half, folder).report.evaluation
    wanted = peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), folder)
    before = cases.bits(wanted)
    assert recovered(half, wanted).report.evaluation["dense"] == named["dense"]
    assert cases.changed(wanted, before) == []
    batch = cases.batches("llama", rows=2, seed=5)[0]
    with torch.no_grad():
        loss = wanted(**batch, labels=batch["input_ids"]).loss
    assert named["dense"]["loss"] == pytest.approx(loss.item(), abs=1e-5)


def test_its_base_is_not_replaced_and_that_is_said_before_the_work(stored, half, monkeypatch):
    base, folder, _ = stored
    for work in ("gradprobe_hf.pruning.decide_pruning", "gradprobe_hf.recovery.recover.measure_both"):
        monkeypatch.setattr(work, lambda *_: pytest.fail("work was done"))
    with pytest.raises(ValueError, match="base is a model that is read"):
        run(folder, merge_adapters=True, output_dir=base, overwrite=True)
    with pytest.raises(ValueError, match="base is a model that is read"):
        recovered(half, folder, output_dir=base, overwrite=True)


def test_its_base_alone_is_no_teacher(stored, half, capsys, text_file):
    base, folder, _ = stored
    said = "'base' with the adapter 'adapter' folded in.*without it: give the adapter"
    with pytest.raises(ValueError, match=said):
        recovered(half, base)
    command = ["evaluate", str(half), "--data", str(text_file), "--num-samples", "2", "--sequence-length", "16"]
    assert main([*command, "--against", str(base)]) != 0
    assert re.search(said, " ".join(capsys.readouterr().err.split()))
    assert main([*command, "--against", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["divergence"]["kl"] > 0


def test_what_may_be_another_model_than_was_pruned_is_told(stored, half, tmp_path, capsys, text_file):
    base, folder, _ = stored
    other = shutil.copytree(folder, tmp_path / "other")
    in_memory = LlamaForCausalLM.from_pretrained(base)
    for teacher, said in (
        (other, "the dense model has 'other': .*not what was pruned"),
        (in_memory, "the teacher is called 'base'"),
    ):
        (told,) = recovered(half, teacher).report.warnings
        assert re.search(rf"What was pruned is 'base' with the adapter 'adapter' folded in, and .*{said}", told)
    again = shutil.copytree(folder, tmp_path / "elsewhere" / "adapter")
    assert recovered(half, again).report.warnings == recovered(half, folder).report.warnings == []
    assert recovered(half, wrapped()).report.warnings == [], "in memory it has no such name"
    command = ["evaluate", str(half), "--data", str(text_file), "--num-samples", "2", "--sequence-length", "16"]
    assert main([*command, "--against", str(other)]) == 0
    assert "the dense model has 'other'" in capsys.readouterr().err


def switched_off_by_transformers():
    model = injected()
    model.disable_adapters()
    return model


def switched_off_by_peft():
    model = wrapped()
    model.base_model.disable_adapter_layers()
    return model


@pytest.mark.parametrize("make", [switched_off_by_transformers, switched_off_by_peft])
def test_adapters_that_are_switched_off_are_not_folded_in(make):
    with pytest.raises(ValueError, match=r"switched off .*q_proj say.*give the base alone"):
        run(make(), merge_adapters=True)


def test_adapters_that_cannot_be_folded_in_are_told_in_words():
    with pytest.raises(ValueError, match=r"an adapter of this PeftModel cannot be folded in: .*lora_bias"):
        run(wrapped(lora_bias=True), merge_adapters=True)


def test_its_base_is_no_teacher_of_what_was_pruned_twice(stored, half, tmp_path):
    """What an adapter made stays what it made, however often it is pruned."""
    run(half, output_dir=tmp_path / "again")
    assert "the adapter `adapter` was folded" in (tmp_path / "again" / "README.md").read_text()
    with pytest.raises(ValueError, match=r"'base' with the adapter 'adapter' folded in.*without it: give the adapter"):
        recovered(tmp_path / "again", stored[0])
    assert recovered(tmp_path / "again", stored[1]).report.model["adapter_of"] == "base"


def test_adapters_on_what_is_recovered_are_refused(stored, half):
    base, folder, _ = stored
    for pruned, named in ((wrapped(), "default"), (folder, "adapter")):
        with pytest.raises(ValueError, match=rf"pruned has adapters \(.*{named}\).*lora_r"):
            recovered(pruned, base)
    with pytest.raises(ValueError, match="merge_adapters has no part in a recovery"):
        recovered(half, folder, merge_adapters=True)


def test_a_compiled_model_is_unwrapped():
    model = cases.build("llama")
    found = run(torch.compile(model))
    assert found.model is model
    assert found.report.sparsity == pytest.approx(0.5, abs=1e-3)
