"""Recovery as it is called: what is loaded, checked, trained, measured and saved; refusals come before any work."""

from __future__ import annotations

import copy
import gc
import json
import re
import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, DatasetDict
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Trainer,
)

from gradprobe_hf import GradProbeConfig, RecoveryConfig, prune_pretrained, recover_pretrained
from gradprobe_hf.cli.main import main
from gradprobe_hf.cli.output import print_pruning, print_recovery
from gradprobe_hf.data.text.mixture import shares
from gradprobe_hf.data.windows import load_batches
from gradprobe_hf.model.loading.load import Loaded
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.recovery.distil import distil
from gradprobe_hf.recovery.of_pruning import text_read_before
from gradprobe_hf.recovery.result import RecoverResult, made_worse
from gradprobe_hf.recovery.text import Reading, read_text
from gradprobe_hf.recovery.trainer import training_arguments
from gradprobe_hf.report.report import Report
from gradprobe_hf.runtime.processes import Processes
from tests import cases
from tests.distillation import DENSE, KilledError
from tests.launch import together
from tests.trainers import half_pruned


@pytest.fixture(scope="module")
def pruned(checkpoint, text_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pruned") / "half"
    config = GradProbeConfig(sparsity=0.5, score="magnitude", num_samples=4, sequence_length=16)
    prune_pretrained(
        str(checkpoint), config, calibration=str(text_file), evaluation=False, output_dir=folder, progress=False
    )
    return folder


OPTIONS = ["--steps", "6", "--batch-size", "2", "--sequence-length", "16", "--evaluation-samples", "2"]


def test_the_command_writes_a_checkpoint_that_says_how_it_was_made(pruned, checkpoint, text_file, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["recover", str(pruned), "--teacher", str(checkpoint), "--output", str(out), "--text", str(text_file)]
    assert main([*arguments, *OPTIONS, "--learning-rate", "5e-3", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    report = Report.load(out)
    assert printed["recovery"] == report.recovery
    assert report.recovery["options"]["steps"] == report.recovery["steps"] == 6
    before, after = report.recovery["before"], report.evaluation
    assert after["divergence"]["kl"] < before["divergence"]["kl"]
    assert before["dense"] == after["dense"]
    card = (out / "README.md").read_text()
    assert "**Recovery.** After pruning, all weights that were not pruned were trained" in card
    assert f"perplexity {before['pruned']['perplexity']:,.2f}" in card
    assert "No parameter outside of these" not in card
    assert json.loads((out / "config.json").read_text())["gradprobe"]["recovery_steps"] == 6
    assert GradProbeConfig.from_pretrained(out) == GradProbeConfig.from_pretrained(pruned)
    left, was = (AutoModelForCausalLM.from_pretrained(folder) for folder in (out, pruned))
    for target in find_targets(left):
        assert torch.equal(target.matrix(left) == 0, target.matrix(was) == 0)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (out, pruned)]
    assert configs[0] | {"gradprobe": None} == configs[1] | {"gradprobe": None}
    stored = (out / "model.safetensors").stat().st_size
    assert printed["files"]["bytes"] == report.files["bytes"] == stored
    print_recovery(report, str(out))
    assert re.search(rf"file, MB +{report.files['dense'] / 1e6:,.1f} +{stored / 1e6:,.1f}", capsys.readouterr().out)
    # A second recovery goes on from there; a table is printed without --json
    assert main([*arguments[:1], str(out), *arguments[2:], "--overwrite", *OPTIONS]) == 1  # its own folder
    assert "is a model that is read" in capsys.readouterr().err
    other = tmp_path / "other"
    assert main([arguments[0], str(out), *arguments[2:5], str(other), *arguments[6:], *OPTIONS, "--quiet"]) == 0
    assert "It had been trained so before, in 6 steps." in (other / "README.md").read_text()
    assert json.loads((other / "config.json").read_text())["gradprobe"]["recovery_steps"] == 12


def test_one_that_helped_nowhere_is_called_none(pruned, checkpoint, text_file, tmp_path, capsys):
    """Its weights are those of before, and what the two types make of them is no step of it."""
    out = tmp_path / "out"
    arguments = ["recover", str(pruned), "--teacher", str(checkpoint), "--output", str(out), "--text", str(text_file)]
    assert main([*arguments, *OPTIONS, "--learning-rate", "1", "--quiet"]) == 0
    printed, card = capsys.readouterr().out, (out / "README.md").read_text()
    assert Report.load(out).recovery["best_step"] == 0
    assert (out / "model.safetensors").read_bytes() == (pruned / "model.safetensors").read_bytes()
    *_, before, after = next(line for line in printed.splitlines() if "KL on held-out" in line).split()
    assert before == after
    assert "**Recovery.** No step of it helped: the weights are as they were. After pruning, all weights" in card
    assert "| | dense | pruned |" in card
    assert "as it is stored" not in card


def recovered_otherwise(said, steps=(2, 2), scales=(1, 1), first=(0, 0)):
    """Each argument by rank; texts begin at their `first` row. Whether every weight is as it was."""
    rank = torch.distributed.get_rank()
    model, _ = half_pruned()
    dense = cases.build("llama")
    dense.model.layers[0].mlp.up_proj.weight.data *= scales[rank]
    before, rows = cases.bits(model), cases.batches("llama", rows=12, batch_size=1)
    config = RecoveryConfig(steps=steps[rank], batch_size=2, sequence_length=16)
    with pytest.raises(ValueError, match=said):
        recover_pretrained(model, dense, config, text=rows[first[rank] :], evaluation=False, progress=False)
    return not cases.changed(model, before)


def test_processes_that_are_given_other_text_or_teachers_are_told_so():
    assert together(recovered_otherwise, "different options.*steps is 2, 3", (2, 3)) == [True, True]
    assert together(recovered_otherwise, "different weights .teacher", (2, 2), (1, 2)) == [True, True]
    assert together(recovered_otherwise, "different batches .text", (2, 2), (1, 1), (0, 4)) == [True, True]


def test_models_in_memory_and_those_that_something_else_has_pruned(checkpoint, text_file, tmp_path):
    dense = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    model, _ = half_pruned()
    config = RecoveryConfig(steps=2, batch_size=2, sequence_length=16, evaluation_samples=2, learning_rate=5e-3)
    options = {"text": str(text_file), "processing_class": cases.tokenizer(), "progress": False}
    before, kept = cases.bits(model), cases.bits(dense)
    with pytest.raises(FileExistsError):
        recover_pretrained(model, dense, config, **options, output_dir=checkpoint)
    result = recover_pretrained(model, dense, config, **options, output_dir=tmp_path / "out")
    assert result.model is model
    assert cases.changed(model, before)
    assert not cases.changed(dense, kept)
    assert result.config is None
    assert "pruned and recovered" in (tmp_path / "out" / "README.md").read_text()
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], value) for name, value in model.state_dict().items() if name in written)


@torch.no_grad()
def test_documents_of_their_own_measured_on_the_manual_wherever_it_is_called(text_file):
    texts = [f"{number} {sentence}." for number, sentence in enumerate(text_file.read_text().split(".")[:12])]
    config = RecoveryConfig(steps=2, batch_size=2, sequence_length=16, evaluation_samples=2, packing=False)
    options = {"processing_class": cases.tokenizer(), "progress": False}
    with torch.enable_grad():
        model, _ = half_pruned()
    report = recover_pretrained(model, cases.build(DENSE), config, text=texts, **options).report
    assert "2 windows of 16 tokens" in report.evaluation["protocol"]
    assert "documents, a row each" in report.recovery["text"]["protocol"]


def test_a_pruned_model_without_a_tokenizer_has_the_teachers(checkpoint, text_file, tmp_path):
    half_pruned()[0].save_pretrained(tmp_path / "bare")
    config = RecoveryConfig(steps=1, batch_size=2, sequence_length=16)
    found = recover_pretrained(
        tmp_path / "bare", str(checkpoint), config, text=str(text_file), evaluation=False, progress=False
    )
    assert found.processing_class.get_vocab() == cases.tokenizer().get_vocab()


def test_a_model_in_memory_has_its_bits_when_saving_fails(checkpoint, text_file, tmp_path, monkeypatch):
    dense = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    model, _ = half_pruned()
    before = cases.bits(model)
    config = RecoveryConfig(steps=2, batch_size=2, sequence_length=16)
    options = {"text": str(text_file), "processing_class": cases.tokenizer(), "progress": False, "evaluation": False}

    def full(*args, **kwargs):
        assert cases.changed(model, before)
        raise OSError("the disk is full")

    monkeypatch.setattr("gradprobe_hf.checkpoint.destination.write_checkpoint", full)
    with pytest.raises(OSError, match="full"):
        recover_pretrained(model, dense, config, **options, output_dir=tmp_path / "out")
    assert not cases.changed(model, before)


def test_pruning_with_recovery(checkpoint, text_file, tmp_path, capsys):
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    before = cases.bits(model)
    config = GradProbeConfig(
        sparsity=0.5,
        score="magnitude",
        num_samples=4,
        sequence_length=16,
        evaluation_samples=2,
        recovery_steps=4,
        recovery_learning_rate=5e-3,
    )
    options = {"calibration": str(text_file), "evaluation": "pydoc", "progress": False}
    options["processing_class"] = cases.tokenizer()
    dry = prune_pretrained(model, config, apply=False, **options)
    assert not cases.changed(model, before)
    report = dry.report
    assert report.recovery["options"]["learning_rate"] == 5e-3
    assert report.timings["recovery"] == report.recovery["seconds"]
    assert report.evaluation["divergence"]["kl"] < report.recovery["before"]["divergence"]["kl"]
    print_pruning(report, "out")
    said = capsys.readouterr().out
    assert re.search(r"dense +recovered", said)
    assert f"perplexity as pruned: {report.recovery['before']['pruned']['perplexity']:,.4f}" in said
    dry.save_pretrained(tmp_path / "dry")
    assert not cases.changed(model, before)
    wet = prune_pretrained(model, config, output_dir=tmp_path / "wet", **options)
    written = [load_file(tmp_path / name / "model.safetensors") for name in ("dry", "wet")]
    assert all(torch.equal(written[1][name], value) for name, value in written[0].items())
    assert "model.norm.weight" in cases.changed(model, before)
    assert all(bool((model.get_parameter(name)[mask] == 0).all()) for name, mask in wet.masks.items())
    assert all(torch.equal(written[0][name], value) for name, value in model.state_dict().items() if name in written[0])
    wet.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(again[name], value) for name, value in written[0].items())


def test_the_text_of_a_recovery_is_read_once(text_file, monkeypatch):
    read = []

    def counted(source, *args, **kwargs):
        read.append(source)
        return load_batches(source, *args, **kwargs)

    monkeypatch.setattr("gradprobe_hf.recovery.text.load_batches", counted)
    config = GradProbeConfig(sparsity=0.5, score="magnitude", num_samples=4, sequence_length=16, recovery_steps=1)
    options = {"processing_class": cases.tokenizer(), "progress": False}
    prune_pretrained(cases.build(DENSE), config, calibration=str(text_file), **options)
    assert read == [str(text_file)]


def test_models_are_loaded_for_a_task(text_file, tmp_path):
    dense, teacher, out = cases.build("gpt2"), str(tmp_path / "bare"), tmp_path / "out"
    dense.transformer.save_pretrained(teacher)  # what is in it, tied to the embeddings, is all of the language model
    half_pruned("gpt2")[0].save_pretrained(tmp_path / "pruned")
    cases.tokenizer().save_pretrained(tmp_path / "pruned")
    arguments = ["recover", str(tmp_path / "pruned"), "--teacher", teacher, "--output", str(out), "--quiet"]
    arguments += ["--text", str(text_file), "--evaluation", "none", *OPTIONS[:6]]
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel and the teacher a GPT2Model.*\(task, --task\)"):
        recover_pretrained(tmp_path / "pruned", teacher, text=str(text_file), progress=False)
    assert main([*arguments, "--task", "text-generation"]) == 0
    report = Report.load(out)
    assert report.recovery["options"]["task"] == "text-generation"
    assert report.recovery["held_out"]["0"] > 0
    config = RecoveryConfig(task="text-classification")
    with pytest.raises(ValueError, match="task='text-classification' is for models of AutoModelForSequenceClass"):
        recover_pretrained(half_pruned("gpt2")[0], dense, config, text=str(text_file), progress=False)


@pytest.mark.parametrize("beside", [False, True], ids=["recover", "prune"])
def test_a_recovery_that_leads_away_from_the_dense_model_is_told(beside, text_file, tmp_path, caplog):
    """On what is measured: of the text that it is trained on each step may be better than the one before."""
    ids = torch.full((4, 16), 7)  # nothing like the text
    given = {"evaluation": [{"input_ids": ids}], "processing_class": cases.tokenizer(), "progress": False}
    shape = {"num_samples": 16, "sequence_length": 16}
    if beside:
        training = {"recovery_steps": 30, "recovery_learning_rate": 0.01}
        config = GradProbeConfig(sparsity=0.5, score="magnitude", **training, **shape)
        result = prune_pretrained(cases.build(DENSE), config, calibration=str(text_file), **given)
    else:
        config = RecoveryConfig(steps=30, batch_size=4, learning_rate=0.01, held_out_samples=2, **shape)
        result = recover_pretrained(half_pruned()[0], cases.build(DENSE), config, text=str(text_file), **given)
    report = result.report
    then, now = (found["divergence"]["kl"] for found in (report.recovery["before"], report.evaluation))
    assert report.recovery["best_step"] > 0
    assert now > then
    (said,) = [one for one in report.warnings if "worse" in one]
    assert said.endswith(
        f"KL from the dense model {then:.4f} before, and {now:.4f} after. Train it on text that is like that, or on "
        "more, or leave the recovery out."
    )
    assert said in caplog.text
    result.save_pretrained(tmp_path / "out")
    assert f"\n- {said}" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("dense", "then", "now", "told"),
    [
        (0.5, 0.4, 0.48, False),  # a classifier that is surer than it is right: nearer to the dense one
        (0.5, 0.4, 0.7, True),
        (0.5, 0.8, 0.9, True),
        (0.5, 0.8, 0.6, False),
        (0.5, 0.7, 0.2, False),  # farther from the dense one, and better
    ],
)
def test_where_no_divergence_is_known_a_loss_is_held_against_the_dense_one(dense, then, now, told, pruned):
    loss = {name: {"loss": value} for name, value in (("dense", dense), ("pruned", now))}
    before = {"dense": {"loss": dense}, "pruned": {"loss": then}}
    report = replace(
        Report.load(pruned),
        recovery={"before": before, "rows": "rows"},
        evaluation={**loss, "divergence": None, "source": "sst2"},
    )
    assert (made_worse(report) is not None) == told


def test_what_is_reported_of_a_recovered_model_is_its_own(text_file):
    options = {"sparsity": 0.5, "score": "magnitude", "num_samples": 4, "sequence_length": 16}
    recovery = {"recovery_steps": 4, "recovery_learning_rate": 5e-3}
    ids = torch.randint(256, (4, 16), generator=torch.Generator().manual_seed(2))
    given = {"calibration": str(text_file), "evaluation": [{"input_ids": ids}], "processing_class": cases.tokenizer()}

    def sizes(model, batch):
        return model(input_ids=batch["input_ids"]).logits.square().sum()

    def measured(loss_fn=None, **more):
        model, config = cases.build(DENSE), GradProbeConfig(**options, **recovery, **more)
        result = prune_pretrained(model, config, **given, loss_fn=loss_fn, progress=False)
        return model, result.report.evaluation

    model, found = measured(metric="accuracy")
    right = model(input_ids=ids).logits[:, :-1].argmax(-1) == ids[:, 1:]
    assert found["metric"]["pruned"] == pytest.approx(right.float().mean().item())
    model, found = measured(sizes)
    wanted = [sizes(one, given["evaluation"][0]).item() for one in (model, cases.build(DENSE))]
    assert found["pruned"]["loss"] / found["dense"]["loss"] == pytest.approx(wanted[0] / wanted[1])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"teacher": "gpt2"}, "pruned model is a LlamaForCausalLM and the teacher a GPT2LMHeadModel"),
        ({"teacher": "pruned"}, "no weight is zero in the pruned model that is not zero in the teacher"),
        ({"teacher": "another"}, r"other embeddings than the pruned model: their cosine is -?0\.0\d"),
        ({"text": None}, "text must be text or batches, got None"),
        ({"text": "{text}", "evaluation": "{text}"}, "is the text that is trained on"),
        ({"text": "{text}", "evaluation": "{copy}"}, "is the text that is trained on"),
        ({"text": "nowhere.txt"}, "no such file or folder: text='nowhere.txt'"),
        ({"pruned": "./nowhere", "teacher": "./gone"}, r"pruned='./nowhere', teacher='./gone'"),
        ({"device_map": "auto"}, "device_map='auto' has no part in a recovery"),
        ({"revision": "main"}, "both are loaded already"),
        ({"revision": "v2", "teacher": "me/llama"}, "revision='v2' has no effect .* or give teacher_revision"),
        ({"teacher_revision": "v2"}, "teacher_revision='v2' has no effect here: teacher is loaded already"),
        ({"overwrite": True}, "belongs to output_dir"),
        ({"config": RecoveryConfig(teacher_top_k=260)}, "teacher_top_k=260 of a vocabulary of 260 tokens"),
        ({"config": {"steps": 3}}, "config must be a RecoveryConfig, got dict"),
    ],
    ids=str,
)
def test_what_cannot_work_is_said_before_anything_is_trained(change, said, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr("gradprobe_hf.recovery.recover.distil", None)
    known = {"llama": cases.build("llama"), "gpt2": cases.build("gpt2"), "bert": cases.build("bert")}
    known["pruned"] = half_pruned()[0]
    known["another"] = cases.build("llama", seed=9)
    copied = tmp_path / "another-name.txt"
    copied.write_bytes(text_file.read_bytes())
    change = {
        name: value.format(text=text_file, copy=copied) if isinstance(value, str) else value
        for name, value in change.items()
    }
    given = {"pruned": "pruned", "teacher": "llama", "text": str(text_file), **change}
    for name in ("pruned", "teacher"):
        given[name] = known.get(given[name], given[name])
    with pytest.raises((ValueError, TypeError, OSError), match=said):
        recover_pretrained(**given, processing_class=cases.tokenizer(), progress=False)


@pytest.mark.parametrize(("launched", "how"), [("FSDP", "sharded by FSDP2"), ("DEEPSPEED", "given to DeepSpeed")])
def test_what_a_launcher_shards_is_refused_before_any_text_is_written(launched, how, monkeypatch):
    monkeypatch.setenv(f"ACCELERATE_USE_{launched}", "true")
    monkeypatch.setattr("gradprobe_hf.recovery.recover.read_text", None)
    with pytest.raises(ValueError, match=f"recovery trains all weights, and those of this model are {how}"):
        recover_pretrained(half_pruned()[0], cases.build("llama"), processing_class=cases.tokenizer(), progress=False)


def test_each_model_has_a_revision_of_its_own(monkeypatch, tmp_path):
    asked = {}

    def load(name, **options):
        asked[str(name)] = options.get("revision")
        if name == "me/dense":
            raise OSError("enough")
        return Loaded(half_pruned()[0], "me/pruned")

    monkeypatch.setattr("gradprobe_hf.recovery.models.load", load)
    monkeypatch.setattr("gradprobe_hf.recovery.models.stored_report", lambda *_: (None, None))
    for given in ({}, {"revision": "v1"}, {"revision": "v1", "teacher_revision": "v2"}):
        with pytest.raises(OSError, match="enough"):
            recover_pretrained("me/pruned", "me/dense", processing_class=cases.tokenizer(), progress=False, **given)
        assert asked == {"me/pruned": given.get("revision"), "me/dense": given.get("teacher_revision")}


def test_a_teachers_tokenizer_has_the_teachers_revision(monkeypatch):
    asked = []

    def load(name, revision=None, **_):
        model = half_pruned()[0] if name == "me/pruned" else cases.build(DENSE)
        return Loaded(model, name, processing_kwargs={"revision": revision})

    def load_tokenizer(model, name, revision):
        asked.append((name, revision))
        if len(asked) == 3:  # the pruned model has none
            raise OSError("enough")

    monkeypatch.setattr("gradprobe_hf.recovery.models.load", load)
    monkeypatch.setattr("gradprobe_hf.recovery.models.stored_report", lambda *_: (None, None))
    monkeypatch.setattr("gradprobe_hf.recovery.models.load_processing_class", load_tokenizer)
    with pytest.raises(OSError, match="enough"):
        recover_pretrained("me/pruned", "me/dense", revision="v1", teacher_revision="v2", progress=False)
    assert asked == [("me/pruned", "v1"), ("me/dense", "v2"), ("me/dense", "v2")]


def test_windows_that_cannot_be_dealt_are_refused_before_a_model_is_loaded(monkeypatch):
    monkeypatch.setattr("gradprobe_hf.recovery.recover.join_processes", lambda *_: Processes(0, 3))
    config = RecoveryConfig(batch_size=8, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match=r"dealt to 3 processes .*: choose a multiple of 6 \(--batch-size 12\)"):
        recover_pretrained("me/pruned", "me/dense", config, progress=False)


@pytest.mark.parametrize(("processes", "dealt"), [(1, 8), (3, 9), (8, 8), (16, 16)])
def test_a_pruning_run_deals_whole_shares_to_any_number_of_processes(processes, dealt, tmp_path, monkeypatch):
    def read(_, config, reading):
        arguments = training_arguments(config, tmp_path, processes=reading.processes, saves=False, on_cpu=True)
        assert arguments.per_device_train_batch_size * processes == config.batch_size == dealt
        raise ZeroDivisionError

    monkeypatch.setattr("gradprobe_hf.recovery.of_pruning.read_text", read)
    context = SimpleNamespace(
        model=cases.build(DENSE),
        config=GradProbeConfig(recovery_steps=1),
        processing_class=None,
        processes=Processes(0, processes),
    )
    with pytest.raises(ZeroDivisionError):
        text_read_before(context, "pydoc")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"steps": 0}, "steps must be a whole number >= 1, got 0"),
        ({"learning_rate": 0}, "learning_rate must be a number > 0, like 2e-4, got 0"),
        ({"batch_size": 8, "gradient_accumulation_steps": 3}, "choose a divisor"),
        ({"warmup_steps": 9, "steps": 4}, "warmup_steps=9 is more than steps=4"),
        *(
            ({name: None}, f"{name} must be a whole number >= ., got None")
            for name in ("steps", "batch_size", "early_stopping_patience", "held_out_samples", "save_steps", "seed")
        ),
        ({"bf16": "on"}, "bf16 must be True, False or 'auto', got 'on'"),
        ({"text_column": "a", "text_template": "{b}"}, "both say what the text is"),
        ({"lora_r": 0}, "lora_r must be a whole number >= 1"),
        ({"task": "chess"}, "task must be one of .*, got 'chess'"),
        ({"packing": False, "document_separator": "eos"}, "document_separator='eos' has no effect here"),
    ],
    ids=str,
)
def test_options_that_cannot_be_meant(options, said):
    with pytest.raises(ValueError, match=said):
        RecoveryConfig(**options)


def test_the_seed_decides_where_adapters_begin(checkpoint, text_file):
    """Whatever the caller drew before."""
    config = RecoveryConfig(steps=2, batch_size=2, sequence_length=16, lora_r=2, learning_rate=1e-2)
    found = []
    for drawn in (1, 2):
        pruned = cases.prune(cases.build("llama"), cases.batches("llama"), apply=True, sparsity=0.5).model
        torch.manual_seed(drawn)
        options = {"text": str(text_file), "evaluation": False, "processing_class": cases.tokenizer()}
        found.append(recover_pretrained(pruned, str(checkpoint), config, progress=False, **options).model.state_dict())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    before = cases.prune(cases.build("llama"), cases.batches("llama"), apply=True, sparsity=0.5).model.state_dict()
    assert any(not torch.equal(value, found[0][name]) for name, value in before.items())  # something was learned


def test_adapters_leave_out_what_fused_kernels_read_past_its_module(tmp_path):
    pytest.importorskip("peft")
    torch.manual_seed(0)
    sizes = {"vocab_size": 260, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    dense = MambaForCausalLM(MambaConfig(**sizes)).eval()
    pruned = copy.deepcopy(dense)
    ids = [{"input_ids": torch.randint(3, 250, (2, 16))} for _ in range(8)]
    result = cases.prune(pruned, ids, score="magnitude", apply=True)
    before = cases.bits(pruned)
    config = RecoveryConfig(steps=6, batch_size=2, sequence_length=16, lora_r=2, learning_rate=1e-3, warmup_steps=0)
    with warnings.catch_warnings(action="error", category=FutureWarning):
        found = recover_pretrained(result, dense, config, text=ids, evaluation=False, progress=False)
    changed = {name.split(".")[-2] for name in cases.changed(found.model, before)}
    assert "in_proj" in changed
    assert not changed & {"out_proj", "conv1d"}
    assert found.report.zeros == result.report.zeros


def test_without_peft_adapters_are_refused_before_anything_is_trained(checkpoint, text_file, pruned, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setattr("gradprobe_hf.recovery.recover.distil", lambda *_: pytest.fail("it trains"))
    config = RecoveryConfig(steps=2, sequence_length=16, lora_r=2)
    with pytest.raises(ImportError, match="pip install peft"):
        recover_pretrained(pruned, checkpoint, config, text=str(text_file), evaluation=False, progress=False)


def test_a_result_of_a_recovery_is_no_model(checkpoint):
    result = RecoverResult(cases.build("llama"), None, None, RecoveryConfig(), None)
    for arguments in ((result, str(checkpoint)), (str(checkpoint), result)):
        with pytest.raises(TypeError, match=r"got RecoverResult: pass its \.model"):
            recover_pretrained(*arguments)


def test_a_dataset_of_several_splits_is_no_mixture():
    splits = DatasetDict({"train": Dataset.from_dict({"text": ["a", "b"]})})
    with pytest.raises(ValueError, match=r"a DatasetDict is several data sets: choose one of them, with \['train'\]"):
        shares(splits, 4)


def test_the_teacher_is_let_go_once_its_probabilities_are_written(checkpoint, text_file, monkeypatch):
    pruned = cases.prune(cases.build("llama"), cases.batches("llama"), apply=True, sparsity=0.5).model
    alive = {}
    for top_k in (None, 9):

        def watched(*args, top_k=top_k):
            gc.collect()
            alive[top_k] = sum(isinstance(one, LlamaForCausalLM) for one in gc.get_objects())
            return distil(*args)

        monkeypatch.setattr("gradprobe_hf.recovery.recover.distil", watched)
        config = RecoveryConfig(steps=1, batch_size=2, sequence_length=16, teacher_top_k=top_k)
        recover_pretrained(pruned, str(checkpoint), config, text=str(text_file), evaluation=False, progress=False)
    assert alive[9] == alive[None] - 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_steps": 9}, "RecoveryConfig: unknown option 'max_steps': it is called steps here"),
        ({"lr": 1e-3}, "it is called learning_rate here"),
        ({"warmup_ratio": 0.1}, "did you mean 'warmup_steps'"),
        ({"text": "mine.txt"}, "it is an argument of recover_pretrained, text="),
        ({"train_dataset": "mine.txt"}, "it is an argument of recover_pretrained, text="),
        ({"zeal": 1}, "the options are those of RecoveryConfig, steps and learning_rate first"),
    ],
    ids=str,
)
def test_options_by_another_name(options, said):
    with pytest.raises(TypeError, match=said):
        RecoveryConfig(**options)
    with pytest.raises(ValueError, match=said.removeprefix("RecoveryConfig: ")):
        RecoveryConfig.from_dict(options)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"steps": 9}, r"steps is an option of the configuration: pass RecoveryConfig\(steps=9\) as config"),
        ({"max_steps": 9}, r"pass RecoveryConfig\(steps=9\) as config"),
        ({"hub_model_id": "me/x"}, "hub_model_id= is called push_to_hub= here"),
        ({"tokenizer": "gpt2"}, "recover_pretrained: tokenizer= is called processing_class= here"),
        ({"train_dataset": "mine.txt"}, "train_dataset= is called text= here"),
        ({"calibration": "mine.txt"}, "calibration= is called text= here"),
    ],
    ids=str,
)
def test_arguments_by_another_name(arguments, said):
    with pytest.raises(TypeError, match=said):
        recover_pretrained("nowhere", "nothing", **arguments)


def test_a_configuration_in_a_file(tmp_path):
    config = RecoveryConfig(steps=9, learning_rate=1e-3, lora_r=4, text_column="body")
    config.to_yaml(tmp_path / "config.yaml")
    assert RecoveryConfig.from_yaml(tmp_path / "config.yaml") == config
    (tmp_path / "other.yaml").write_text("max_steps: 9")
    with pytest.raises(ValueError, match=r"other\.yaml: unknown option 'max_steps': it is called steps here"):
        RecoveryConfig.from_yaml(tmp_path / "other.yaml")


@pytest.mark.slow
def test_pruning_with_recovery_goes_on_where_it_was_killed(checkpoint, text_file, tmp_path, monkeypatch):
    config = GradProbeConfig(
        sparsity=0.5, probes=1, update="obs", num_samples=4, sequence_length=16, recovery_steps=60, save_every=1
    )
    options = {"calibration": str(text_file), "evaluation": False, "progress": False, "apply": False}

    def pruned(folder):
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        tokenizer = cases.tokenizer()
        found = prune_pretrained(model, config, processing_class=tokenizer, resume_dir=tmp_path / folder, **options)
        return {name: values.clone() for name, values in found.recovered.items()}

    whole, save = pruned("whole"), Trainer._save_checkpoint

    def killed(self, *args):
        save(self, *args)
        raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_save_checkpoint", killed)
        with pytest.raises(KilledError):
            pruned("run")
    seconds = json.loads((tmp_path / "run" / "recovery" / "checkpoint-50" / "seconds.json").read_text())
    assert set(seconds) == {"recovery"}, "those of other stages are in the state of the run"
    resumed = pruned("run")
    assert all(torch.equal(values, resumed[name]) for name, values in whole.items())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("score", [None, "magnitude", "wanda"])
def test_a_checkpoint_that_could_not_be_written_takes_no_second_training(
    score, checkpoint, text_file, tmp_path, monkeypatch
):
    config = GradProbeConfig(
        sparsity=0.5, score=score, update="none", num_samples=4, sequence_length=16, recovery_steps=2
    )
    options = {"calibration": str(text_file), "evaluation": False, "progress": False}

    def pruned():
        model, state = AutoModelForCausalLM.from_pretrained(checkpoint), tmp_path / "state"
        given = {"processing_class": cases.tokenizer(), "output_dir": tmp_path / "out", "resume_dir": state}
        return prune_pretrained(model, config, **given, **options)

    with monkeypatch.context() as patched:
        patched.setattr("gradprobe_hf.checkpoint.destination.write_checkpoint", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pruned()
    monkeypatch.setattr(Trainer, "train", lambda *_, **__: pytest.fail("it was trained again"))
    assert pruned().report.recovery["steps"] == 2
    assert not (tmp_path / "state").exists()


def test_a_text_that_is_measured_on_in_other_windows_is_refused_before_any_work(text_file, tmp_path, monkeypatch):
    (tmp_path / "shifted.txt").write_text("One sentence before. " + text_file.read_text())
    monkeypatch.setattr("gradprobe_hf.pruning.decide_pruning", lambda *_: pytest.fail("work was done"))
    config = GradProbeConfig(
        preset="fast", num_samples=8, sequence_length=64, evaluation_samples=4, batch_size=2, recovery_steps=2
    )
    with pytest.raises(ValueError, match="of the evaluation text is part of the text that is trained on"):
        prune_pretrained(
            cases.build(DENSE),
            config,
            calibration=str(text_file),
            evaluation=str(tmp_path / "shifted.txt"),
            processing_class=cases.tokenizer(),
            progress=False,
        )


@pytest.mark.parametrize(("source", "asked"), [("self", 8), ({"text": 3, "self": 1}, 32), ("text", None)])
def test_of_a_mixture_only_what_the_model_writes_is_limited(source, asked, monkeypatch):
    seen = []

    def loaded(_, spec, **__):
        seen.append(spec.samples)
        raise ZeroDivisionError

    monkeypatch.setattr("gradprobe_hf.recovery.text.load_batches", loaded)
    monkeypatch.setattr("gradprobe_hf.recovery.text.OWN_WINDOWS", 8)
    config, reading = RecoveryConfig(steps=5, batch_size=8), Reading(cases.build("llama"), None, Processes(), False)
    with pytest.raises(ZeroDivisionError):
        read_text(source, config, reading)
    assert seen == [asked or config.windows]
