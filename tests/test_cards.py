"""What a card says where the model was pruned before, brings code of its own, or is measured again."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import EvalResult, ModelCard, metadata_load
from transformers import AutoModelForCausalLM

from gradprobe_hf import GradProbeConfig, RecoveryConfig, prune_pretrained, recover_pretrained
from gradprobe_hf.checkpoint.card_results import _same, add_results, check_card
from gradprobe_hf.cli import main
from gradprobe_hf.cli.output import print_pruning
from gradprobe_hf.report.card.build import build_card, datasets_read
from gradprobe_hf.report.card.snippet import loading_snippet
from gradprobe_hf.report.card.summary import summary
from gradprobe_hf.report.report import Report
from gradprobe_hf.tasks.table import TASKS
from tests import cases

SHORT = {"num_samples": 4, "sequence_length": 16, "evaluation_samples": 4}
ON_PYDOC = ["--data", "pydoc", "--num-samples", "4", "--sequence-length", "16"]


@pytest.fixture
def warnings_of(capsys):
    """What the command line warns of."""

    def run(*arguments):
        assert main(list(map(str, arguments))) == 0
        return capsys.readouterr().err.splitlines()

    return run


def pruned(source, text, folder, **options):
    config = cases.config(preset="fast", **{**SHORT, **options})
    data = {"calibration": str(text), "evaluation": "pydoc"}
    return prune_pretrained(str(source), config, output_dir=folder, progress=False, **data).report


def results(folder):
    return ModelCard.load(folder / "README.md").data.eval_results


def values(folder, kind):
    return [one.metric_value for one in results(folder) if one.metric_type == kind]


@pytest.fixture(scope="module")
def twice(checkpoint, text_file, tmp_path_factory):
    """A model that is pruned, and pruned again."""
    folder = tmp_path_factory.mktemp("twice")
    pruned(checkpoint, text_file, folder / "half", sparsity=0.5)
    pruned(folder / "half", text_file, folder / "more", sparsity=0.75)
    return folder


# Pruned before.


def test_a_model_that_was_pruned_before_is_not_called_dense(twice, capsys):
    card, report = (twice / "more" / "README.md").read_text(), Report.load(twice / "more")
    assert "The model it was made of had been pruned already, to a sparsity of 50.0%." in card
    assert "| | before | pruned |" in card
    assert "| KL divergence from before, nats per token | 0 |" in card
    assert "times the earlier model's; with" in re.sub(r"\s+", " ", card)
    assert "dense model" not in card
    names = {one.metric_type: one.metric_name for one in results(twice / "more")}
    assert names["kl_divergence"] == "KL divergence from the model it was made of (nats per token)"
    assert names["top1_agreement"] == "Top-1 agreement with the model it was made of"
    print_pruning(report, "more")
    said = capsys.readouterr().out
    assert "KL from before (nats)" in said
    assert not re.search(r"\bdense\b", said)


def test_the_first_pruning_is_beside_the_dense_model(twice, capsys):
    card = (twice / "half" / "README.md").read_text()
    assert "pruned already" not in card
    assert "| | dense | pruned |" in card
    assert "| KL divergence from dense, nats per token | 0 |" in card
    names = {one.metric_type: one.metric_name for one in results(twice / "half")}
    assert names["kl_divergence"] == "KL divergence from the dense model (nats per token)"
    print_pruning(Report.load(twice / "half"), "half")
    assert "KL from dense (nats)" in capsys.readouterr().out


def test_a_model_that_was_made_smaller_before_is_not_called_dense_either(checkpoint, text_file, tmp_path):
    config = cases.config(structure={"blocks": 1}, **SHORT)
    data = {"calibration": str(text_file), "evaluation": "pydoc", "progress": False}
    prune_pretrained(str(checkpoint), config, output_dir=tmp_path / "smaller", **data)
    pruned(tmp_path / "smaller", text_file, tmp_path / "zeros", sparsity=0.5)
    assert "| | dense | pruned |" in (tmp_path / "smaller" / "README.md").read_text()
    card = (tmp_path / "zeros" / "README.md").read_text()
    assert "It had been made smaller before: without 1 block." in card
    assert "| | before | pruned |" in card


def test_nor_is_it_where_methods_are_compared(twice, text_file, capsys):
    options = ["--methods", "magnitude", "--num-samples", "4", "--sequence-length", "16", "--evaluation-samples", "4"]
    compare = ["compare", str(twice / "half"), "--sparsity", "0.75", *options, "--quiet"]
    assert main([*compare, "--calibration", str(text_file), "--evaluation", "pydoc"]) == 0
    said = capsys.readouterr().out
    assert "perplexity of the model it was made of: " in said
    assert "KL: divergence from the model it was made of" in said
    assert not re.search(r"\bdense\b", said)


def test_nor_is_one_that_is_sparse_and_does_not_say_so():
    """Pruned in memory, or by something else; what is recovered towards the dense model of its name is beside that."""
    rows, model = cases.batches("llama"), cases.build("llama")
    cases.prune(model, rows, score="magnitude", sparsity=0.5, apply=True)
    again = cases.prune(model, rows, score="magnitude", sparsity=0.7, apply=True)
    assert again.report.model["pruned_to"] == pytest.approx(0.5, abs=1e-3)
    card = build_card(again.report, again.config, {}, "more").text
    assert "The model it was made of had been pruned already, to a sparsity of 50.0%." in card
    assert "| | before | pruned |" in card
    options = {"text": rows, "evaluation": False, "progress": False}
    found = recover_pretrained(again, cases.build("llama"), RecoveryConfig(steps=1, batch_size=2), **options)
    assert found.report.beside.column == "dense"
    card = build_card(found.report, again.config, {}, "recovered").text
    assert "| zeros in the pruned matrices | - | 70." in card
    assert "towards the predictions of the dense model (" in card
    half = {**found.report.recovery["teacher"], "is_sparse": True}
    assert replace(found.report, recovery={"teacher": half}).beside.column == "before"


@torch.no_grad()
def test_but_one_that_was_trained_without_its_zeros_is(twice, text_file, tmp_path):
    """What had been said of its zeros stays in its configuration."""
    model = AutoModelForCausalLM.from_pretrained(twice / "half")
    for parameter in model.parameters():
        parameter.add_(1e-3)
    shutil.copytree(twice / "half", tmp_path / "tuned")
    model.save_pretrained(tmp_path / "tuned")
    report = pruned(tmp_path / "tuned", text_file, tmp_path / "again", sparsity=0.5)
    assert (report.beside.column, report.model["once_pruned_to"]) == ("dense", 0.5)
    assert not {"pruned_to", "pattern"} & set(report.model)
    card = (tmp_path / "again" / "README.md").read_text()
    assert "It had once been pruned, to a sparsity of 50.0%, and was trained without keeping its zeros since" in card
    assert "| | dense | pruned |" in card


@pytest.mark.parametrize(("dtype", "said"), [("bfloat16", True), ("float32", False), (None, False)])
def test_a_card_says_that_weights_were_converted(dtype, said, checkpoint):
    options = {"evaluation": False, "apply": False, "progress": False, **({"dtype": dtype} if dtype else {})}
    result = prune_pretrained(str(checkpoint), cases.config(score="magnitude"), **options)
    card = build_card(result.report, result.config, {}, "out").text
    assert ("Its weights were converted from float32 to bfloat16 before." in card) is said


def test_a_card_names_the_data_sets_that_were_trained_on_too(twice):
    report = Report.load(twice / "half")
    assert datasets_read(report) is None  # a file
    read = replace(report, calibration={**report.calibration, "dataset_id": "a/calibrated"})
    assert datasets_read(read) == ["a/calibrated"]
    for name, found in {"a/calibrated": ["a/calibrated"], "b/trained": ["a/calibrated", "b/trained"]}.items():
        assert datasets_read(replace(read, recovery={"text": {"dataset_id": name}})) == found
    mixed = replace(report, calibration={**report.calibration, "mixed_ids": ["a/calibrated", "c/too"]})
    assert datasets_read(mixed) == ["a/calibrated", "c/too"]


def test_the_memory_of_a_gpu_stands_beside_that_of_the_host(twice, capsys):
    report = replace(Report.load(twice / "half"), memory={"peak_resident_bytes": 2 * 10**9})
    print_pruning(report, "half")
    assert "peak memory 2.00 GB\n" in capsys.readouterr().out
    report = replace(report, memory={**report.memory, "peak_cuda_bytes": 5 * 10**9})
    said = "peak memory 2.00 GB, on the GPU 5.00 GB"
    print_pruning(report, "half")
    assert f"{said}\n" in capsys.readouterr().out
    assert f"{said}." in build_card(report, GradProbeConfig.from_pretrained(twice / "half"), {}, "half").text


def test_a_card_links_every_model_that_the_base_is_of(twice):
    report = Report.load(twice / "half")
    config = GradProbeConfig.from_pretrained(twice / "half")
    assert "`tiny-llama` (derived from [a/b](https://huggingface.co/a/b)) with" in summary(
        report, config, {"base_model": ["a/b"]}
    )
    both = summary(report, config, {"base_model": ["a/b", "c/d"]})
    assert "(derived from [a/b](https://huggingface.co/a/b) and [c/d](https://huggingface.co/c/d)) with" in both
    assert summary(report, config, {}).startswith("tiny-llama with")


def test_what_is_recovered_towards_the_dense_model_is_beside_that(twice):
    report = Report.load(twice / "more")
    teacher = {"name": "tiny-llama", "parameters": report.model["parameters"], "bytes": 1}
    assert replace(report, recovery={"teacher": teacher}).beside.column == "dense"
    assert replace(report, recovery={"teacher": {**teacher, "name": "half"}}).beside.column == "before"


def test_what_is_measured_beside_a_pruned_model_says_which(twice, checkpoint, tmp_path, capsys):
    more = shutil.copytree(twice / "more", tmp_path / "more")
    evaluate = ["evaluate", str(more), *ON_PYDOC, "--write-card", "--against"]
    assert main([*evaluate, str(twice / "half")]) == 0
    assert "KL from half (nats)" in capsys.readouterr().out
    assert "KL divergence from half (nats per token)" in {one.metric_name for one in results(more)}
    assert main([*evaluate, str(checkpoint)]) == 0
    assert "KL from dense (nats)" in capsys.readouterr().out
    # On the same windows, so in place of the one before.
    (kl,) = (one for one in results(more) if one.metric_type == "kl_divergence")
    assert kl.metric_name == "KL divergence from the dense model (nats per token)"


# Measured again.


def texts(folder, count, number):
    folder.mkdir()
    words = (f"Text {number} says {i * number % 17} of {i}." for i in range(count))
    (folder / "train.txt").write_text(" ".join(words), encoding="utf-8")
    return str(folder / "train.txt")


def test_other_windows_of_a_text_are_another_result(twice, checkpoint, tmp_path):
    half = shutil.copytree(twice / "half", tmp_path / "half")
    before = results(half)
    other = ["evaluate", str(half), "--data", "pydoc", "--sequence-length", "16", "--num-samples", "6", "--write-card"]
    assert main([*other, "--against", str(checkpoint)]) == 0
    assert results(half)[: len(before)] == before
    assert len(values(half, "kl_divergence")) == len(values(half, "perplexity")) == 2
    assert len({str(one.metric_args) for one in results(half)}) == 2
    # What was measured in one pass goes with it: no divergence is left of a pass that is no more there.
    assert main(other) == 0
    assert len(values(half, "perplexity")) == 2
    assert values(half, "kl_divergence") == [one.metric_value for one in before if one.metric_type == "kl_divergence"]


def test_a_protocol_is_another_result_of_the_same_text(twice, tmp_path):
    half, text = shutil.copytree(twice / "half", tmp_path / "half"), texts(tmp_path / "a", 200, 3)
    earlier = len(values(half, "perplexity"))
    evaluate = ["evaluate", str(half), "--data", text, "--sequence-length", "16", "--write-card"]
    for _ in range(2):  # each takes the place of its own
        assert main([*evaluate, "--num-samples", "4"]) == main([*evaluate, "--protocol", "paper"]) == 0
    assert len(values(half, "perplexity")) == earlier + 2
    assert any(one.metric_args["protocol"].startswith("the paper protocol") for one in results(half))


def test_another_text_of_the_same_name_is_another_result(twice, tmp_path):
    half = shutil.copytree(twice / "half", tmp_path / "half")
    earlier = len(values(half, "perplexity"))
    for name, number in (("a", 3), ("b", 5)):
        text = texts(tmp_path / name, 200, number)
        shown = ["--num-samples", "4", "--sequence-length", "16", "--write-card"]
        assert main(["evaluate", str(half), "--data", text, *shown]) == 0
    assert len(values(half, "perplexity")) == earlier + 2


def test_texts_whose_names_begin_alike_are_results_of_their_own(twice, tmp_path):
    """The Hub's clients hold results of one type of data for those of one data set, and show the first one's name."""
    half = shutil.copytree(twice / "half", tmp_path / "half")
    for name, number in (("my news.txt", 3), ("my code.txt", 5)):
        text = Path(texts(tmp_path / name.split(".")[0], 200, number)).rename(tmp_path / name)
        shown = ["--num-samples", "4", "--sequence-length", "16", "--write-card"]
        assert main(["evaluate", str(half), "--data", str(text), *shown]) == 0
    assert {one.dataset_name for one in results(half)} >= {"my news.txt", "my code.txt"}


def test_what_is_said_in_a_card_of_somebody_elses_stays(tmp_path):
    card = tmp_path / "README.md"
    result = EvalResult("text-generation", "arc", "arc", "acc", 0.1, metric_name="acc, 0-shot")
    card.write_text("---\nlanguage: no\n---\nNorsk.\n")  # False, to YAML 1.1
    check_card(tmp_path)
    add_results(tmp_path, [result])
    assert ModelCard.load(card).data.language == "no"
    entry = {"task": {"type": "t"}, "dataset": {"name": "ARC 25-shot", "type": "arc", "args": {"num_few_shot": 25}}}
    theirs = [
        entry | {"metrics": [{"type": "acc", "value": 50.1}], "source": {"url": "https://a.test", "name": "A"}},
        {"task": {"type": "t"}, "dataset": {"name": "ARC 0-shot", "type": "arc"}}
        | {
            "metrics": [{"type": "acc", "value": 40.2, "stderr": 0.5}],
            "source": {"url": "https://b.test", "name": "B"},
        },
    ]
    card.write_text(f"---\n{yaml.safe_dump({'model-index': [{'name': 'M', 'results': theirs}]})}---\nTheirs.\n")
    for value in (0.1, 0.2):  # the second replaces the first
        add_results(tmp_path, [EvalResult("t", "arc", "ARC", "acc", value)])
    (model,) = metadata_load(card)["model-index"]
    new = {"task": {"type": "t"}, "dataset": {"type": "arc", "name": "ARC"}, "metrics": [{"type": "acc", "value": 0.2}]}
    assert model == {"name": "M", "results": [*theirs, new]}
    acc = {"type": "acc", "value": 0.1}
    model = {"results": [{"task": {"type": "t"}, "dataset": {"type": "d", "name": "d"}, "metrics": [acc]}]}
    two = yaml.safe_dump({"model-index": [model | {"name": "A"}, model | {"name": "B"}]})
    card.write_text(f"---\n{two}---\nTwo.\n")
    with pytest.raises(ValueError, match="its model-index is of 2 models"):
        check_card(tmp_path)


def test_a_result_of_known_text_replaces_one_that_did_not_say_so():
    read = {"protocol": "p", "fingerprint": "f"}
    plain, told, other = (
        EvalResult("text-generation", "d", "d", "perplexity", 10.0, metric_args=args)
        for args in (read, {**read, "calibrated_on": "about 12% of it"}, {**read, "fingerprint": "g"})
    )
    assert _same(plain, told)
    assert not _same(plain, other)


def test_a_task_of_the_harness_is_replaced_by_its_name():
    one = [EvalResult("text-generation", "arc", "arc", "acc", value, metric_name="acc, 0-shot") for value in (0.1, 0.2)]
    five = EvalResult("text-generation", "arc", "arc", "acc", 0.3, metric_name="acc, 5-shot")
    assert _same(*one)
    assert not _same(one[0], five)


LONGER = {"sequence_length": 64, "num_samples": 24}
MEASURED = ["--num-samples", "40", "--sequence-length"]  # most of these texts


def test_the_text_that_was_calibrated_on_is_known_by_what_it_holds(checkpoint, tmp_path, warnings_of):
    own, other = texts(tmp_path / "own", 200, 3), texts(tmp_path / "other", 200, 5)
    copy = shutil.copy(own, tmp_path / "another name.txt")
    pruned(checkpoint, own, tmp_path / "half", sparsity=0.5, **LONGER)
    evaluate = ["evaluate", tmp_path / "half", *MEASURED]
    for text in (own, copy):
        for how in (["64"], ["48", "--write-card"]):
            said = warnings_of(*evaluate, *how, "--data", text)
            assert any("is what the model was calibrated on" in one for one in said)
    for text in (other, "pydoc"):
        assert not any("calibrated on" in said for said in warnings_of(*evaluate, "48", "--data", text, "--write-card"))
    results = ModelCard.load(tmp_path / "half" / "README.md").data.eval_results
    marks = [(one.dataset_name, one.metric_args.get("calibrated_on")) for one in results]
    assert sum(mark is not None for _, mark in marks) == 2, marks  # not those of the other two
    assert dict(marks)["another name.txt"].startswith("about ")


def test_so_is_a_part_of_a_mixture_and_the_text_of_a_recovery(checkpoint, tmp_path, warnings_of, capsys):
    own, other, third = (texts(tmp_path / name, 200, number) for name, number in {"a": 3, "b": 5, "c": 7}.items())
    mixture = {own: 1, "pydoc": 1}
    config = cases.config(preset="fast", **{**SHORT, **LONGER}, sparsity=0.5)
    options = {"calibration": mixture, "evaluation": False, "progress": False}
    prune_pretrained(str(checkpoint), config, output_dir=tmp_path / "half", **options)
    training = RecoveryConfig(steps=3, batch_size=4, sequence_length=64)
    given = {"text": other, "evaluation": False, "progress": False, "output_dir": tmp_path / "recovered"}
    recover_pretrained(tmp_path / "half", checkpoint, training, **given)
    evaluate = ["evaluate", tmp_path / "recovered", *MEASURED, "48", "--data"]
    for text, what in ((own, "calibrated"), (other, "trained")):
        said = [one for one in warnings_of(*evaluate, text) if "is what the model was" in one]
        assert len(said) == 1
        assert f"is what the model was {what} on" in said[0]
    assert not any("is what the model was" in one for one in warnings_of(*evaluate, third))
    assert main([*map(str, evaluate), other, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["known_text"]["trained"] > 0.2


def test_so_is_text_that_chose_the_sparsity(checkpoint, tmp_path, warnings_of):
    own, choosing = texts(tmp_path / "own", 200, 3), tmp_path / "choosing.txt"
    shutil.move(texts(tmp_path / "other", 200, 5), choosing)
    config = cases.config(preset="fast", **{**SHORT, **LONGER}, sparsity=0.2, max_metric_drop="50%")
    data = {"calibration": str(own), "evaluation": str(choosing), "progress": False}
    prune_pretrained(str(checkpoint), config, output_dir=tmp_path / "half", **data)
    evaluate = ["evaluate", tmp_path / "half", *MEASURED, "48", "--write-card", "--data"]
    for text in (own, choosing):
        (said,) = [one for one in warnings_of(*evaluate, text) if "shows too little" in one]
        assert ("is what its sparsity was chosen by" in said) == (text == choosing)
    marks = {one.dataset_name: one.metric_args.get("chosen_on") for one in results(tmp_path / "half")}
    assert marks[choosing.name].startswith("about ")
    assert marks[Path(own).name] is None


# Code of its own.

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""
AUTO_MAP = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}


@pytest.fixture
def own_code(checkpoint, tmp_path, monkeypatch):
    """A folder whose model transformers does not have."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = shutil.copytree(checkpoint, tmp_path / "own")
    config = json.loads((folder / "config.json").read_text())
    config |= {"auto_map": AUTO_MAP, "model_type": "own", "architectures": ["OwnForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_own.py").write_text(CODE)
    return folder


def snippet_of(folder):
    return re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)[1]


@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_a_model_with_code_of_its_own_is_loaded_so(with_tokenizer, own_code, tmp_path, monkeypatch):
    if not with_tokenizer:
        for path in own_code.glob("tokenizer*"):
            path.unlink()
    config, out = cases.config(sparsity=0.5, score="magnitude"), tmp_path / "half"
    options = {"trust_remote_code": True, "evaluation": False, "progress": False}
    prune_pretrained(str(own_code), config, output_dir=out, **options)
    card = " ".join((out / "README.md").read_text().split())
    assert "plain transformers checkpoint" not in card
    assert "The repository runs code of its own" in card
    snippet = snippet_of(out)
    assert snippet.count("trust_remote_code=True") == snippet.count("from_pretrained(")
    monkeypatch.chdir(tmp_path)
    found = {}
    exec(snippet, found)
    assert type(found["model"]).__name__ == "OwnForCausalLM"
    recovery, again = RecoveryConfig(steps=1, batch_size=2), tmp_path / "recovered"
    given = {"text": cases.batches("llama"), "evaluation": False, "progress": False, "trust_remote_code": True}
    recover_pretrained(out, own_code, recovery, **given, output_dir=again)
    card = " ".join((again / "README.md").read_text().split())
    assert "It is a checkpoint, made with" in card
    assert "The repository runs code of its own" in card
    assert "had been pruned already" not in card


def test_code_that_transformers_has_a_class_for_is_not_asked_for(checkpoint, tmp_path, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    model.config.auto_map = AUTO_MAP
    cases.prune(model, cases.batches("llama"), score="magnitude", sparsity=0.5, output_dir=tmp_path / "half")
    card = (tmp_path / "half" / "README.md").read_text()
    assert "plain transformers checkpoint" in " ".join(card.split())
    assert "trust_remote_code" not in card


def test_a_class_of_the_user_s_is_not_imported_from_transformers(twice):
    report = Report.load(twice / "half")
    for name, shown in {"LlamaForCausalLM": "LlamaForCausalLM", "MineForCausalLM": "AutoModelForCausalLM"}.items():
        alone = replace(report, model={**report.model, "class": name, "processing_class": "NoneType"})
        assert f"from transformers import {shown}\n" in loading_snippet(alone, "out")


def test_every_snippet_names_the_model_where_it_can_be_told_to_trust():
    snippets = [text for rows in TASKS.values() for row in rows for text in (row.snippet, row.chat_snippet) if text]
    for snippet in snippets:
        assert len(re.findall(r"\bpipeline\(|from_pretrained\(", snippet)) == snippet.count('"{where}"') > 0
