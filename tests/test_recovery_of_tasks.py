"""Recovery of what is no language model: the loss is the divergence where labels are, on the command line too."""

from __future__ import annotations

import copy
import csv
import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from huggingface_hub import ModelCard
from transformers import (
    AutoModelForSequenceClassification,
    FNetConfig,
    FNetForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    ResNetConfig,
    ResNetForImageClassification,
)

from gradprobe_hf import GradProbeConfig, RecoveryConfig, prune_pretrained, recover_pretrained
from gradprobe_hf.cli.main import main
from gradprobe_hf.data.labelled import TaskOptions
from gradprobe_hf.data.windows import WindowSpec, load_batches
from gradprobe_hf.recovery.distil import distil, teacher_of, workplace
from gradprobe_hf.recovery.text import Reading, collated, read_text
from gradprobe_hf.report.report import Report
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.runtime.stopwatch import Stopwatch
from gradprobe_hf.tasks.table import task_of_class
from tests import cases, labelled
from tests.trainers import zeros

RECOVERED = ("bert", "llama", "tags", "masked", "t5", "vit", "whisper")
LENGTH = 24
CONFIG = RecoveryConfig(steps=10, batch_size=2, learning_rate=1e-3, sequence_length=LENGTH)
OF_IMAGES = replace(CONFIG, sequence_length=None)


def half_pruned(name, dtype=torch.float32):
    """A model, and the masks of the half of it that is zero."""
    config = GradProbeConfig(sparsity=0.5, score="magnitude", scope="row")
    model = labelled.build(name).to(dtype)
    return model, dict(prune_pretrained(model, config, evaluation=False, progress=False).masks)


def rows_of(name, model, config=CONFIG):
    case = labelled.CASES[name]
    return read_text(case.rows(), config, Reading(model, case.processor(), Processes(), False))


def naive(name, dense, pruned, count):
    """The mean divergence over the labels of the last rows, each by itself, as the data set has them."""
    case = labelled.CASES[name]
    batches = load_batches(
        case.rows(),
        WindowSpec(CONFIG.windows, LENGTH, 1, CONFIG.seed, at_most=True),
        part="calibration",
        model=dense,
        processing_class=case.processor(),
        task=TaskOptions(task_of_class(type(dense).__name__, dense.config.is_encoder_decoder), most=CONFIG.windows),
    )
    total, terms = 0.0, 0
    for batch in list(batches)[-count:]:
        counted = batch["labels"] != -100
        p, q = (model(**batch).logits.log_softmax(-1)[counted] for model in (dense, pruned))
        total += float(F.kl_div(q, p, log_target=True, reduction="sum"))
        terms += int(counted.sum())
    return total / terms


@pytest.mark.parametrize("name", RECOVERED)
def test_the_loss_is_the_divergence_where_labels_are(name, tmp_path):
    dense, (pruned, masks) = labelled.build(name), half_pruned(name)
    text = rows_of(name, dense)
    last = text.rows[-3:]
    text = replace(text, rows=[*last, *last], held_out=3)  # what is learned is measured
    with torch.no_grad():
        wanted = naive(name, dense, pruned, 3)
    assert wanted > 1e-4
    # Rows of several lengths in one batch; a divergence that is small already takes small steps.
    config = replace(CONFIG, batch_size=3, learning_rate=1e-4 if name == "bert" else 1e-3)
    with workplace(tmp_path, Processes(), Stopwatch(), False) as here:
        found = distil(pruned, teacher_of(dense, text, config, here), text, config, here)
    assert found.held_out[0] == pytest.approx(wanted, rel=1e-3)
    assert min(found.held_out.values()) < 0.9 * wanted
    assert zeros(pruned, masks) == (0, 0)


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_half_precision(name):
    dense, (pruned, masks) = labelled.build(name).to(torch.bfloat16), half_pruned(name, torch.bfloat16)
    case = labelled.CASES[name]
    given = {"text": case.rows(), "processing_class": case.processor(), "progress": False}
    found = recover_pretrained(pruned, dense, OF_IMAGES if name == "vit" else CONFIG, **given)
    measured = [*found.report.recovery["held_out"].values()]
    assert all(map(math.isfinite, measured))
    assert len(set(measured)) > 1, "something is trained"
    if name == "bert":  # random images tell nothing about others: whether they help is chance, in float32, too
        assert min(measured) < measured[0]
    assert pruned.dtype == torch.bfloat16
    assert zeros(pruned, masks)[0] == 0


def test_a_smaller_model_without_an_embedding_of_tokens_is_recovered(tmp_path):
    case, dense = labelled.CASES["vit"], labelled.build("vit")
    given = {"processing_class": case.processor(), "progress": False, "evaluation": False}
    dense.save_pretrained(tmp_path / "dense")
    smaller = GradProbeConfig(structure={"ffn": 8}, update="none", num_samples=4)
    prune_pretrained(dense, smaller, calibration=case.rows(), output_dir=tmp_path / "small", **given)
    config = replace(OF_IMAGES, steps=2)
    found = recover_pretrained(tmp_path / "small", tmp_path / "dense", config, text=case.rows(), **given)
    assert found.report.recovery["steps"] == 2
    assert found.model.num_parameters() < labelled.build("vit").num_parameters()


def test_masked_text_is_known_whatever_is_masked():
    """Which tokens are hidden is drawn anew in every batch, and the labels say what stood there."""
    case, model = labelled.CASES["masked"], labelled.build("masked")
    given = {"processing_class": case.processor(), "progress": False}
    words = case.rows()["text"][0].split()
    trained, other = (Dataset.from_dict({"text": [" ".join(half)]}) for half in (words[::-1], words[: len(words) // 2]))
    pruned, config = half_pruned("masked")[0], replace(CONFIG, evaluation_samples=4)
    with pytest.raises(ValueError, match="evaluation rows are trained on"):
        recover_pretrained(pruned, model, config, text=trained, evaluation=trained, **given)
    assert recover_pretrained(pruned, model, config, text=trained, evaluation=other, **given).report.evaluation
    pruning = GradProbeConfig(
        sparsity=0.5, preset="fast", num_samples=4, batch_size=2, sequence_length=24, evaluation_samples=4
    )
    for evaluation, shared in ((trained, True), (other, False)):
        report = prune_pretrained(
            model, pruning, calibration=trained, evaluation=evaluation, apply=False, **given
        ).report
        assert any("also calibrated on" in warning for warning in report.warnings) == shared


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_pruning_with_recovery(name):
    case, dense = labelled.CASES[name], labelled.build(name)
    config = GradProbeConfig(
        sparsity=0.5, preset="fast", num_samples=4, batch_size=2, recovery_steps=10, recovery_learning_rate=1e-3
    )
    given = {"calibration": case.rows(), "evaluation": case.rows(), "processing_class": case.processor()}
    with pytest.raises(ValueError, match="of the 8 evaluation rows are trained on"):
        prune_pretrained(dense, config, **given, progress=False)
    others = case.rows().select(range(2))
    given |= {"calibration": case.rows().select(range(2, 8)), "evaluation": others}
    result = prune_pretrained(dense, config, **given, progress=False)
    recovery = result.report.recovery
    assert recovery["options"]["metric"] == config.metric
    assert (recovery["rows"], recovery["windows"], recovery["held_out_windows"]) == ("rows", 5, 1)
    assert recovery["unit"] == ("tokens" if name == "bert" else "rows")
    assert min(recovery["held_out"].values()) < recovery["held_out"]["0"]
    assert result.report.evaluation["metric"]["name"] == "accuracy"
    assert all(bool((dense.get_parameter(one)[mask] == 0).all()) for one, mask in result.masks.items())


@pytest.fixture
def sentences(tmp_path):
    names = list(labelled.LABELS)
    rows = [(text, names[number % 3]) for number, text in enumerate(labelled.texts(24))]
    for name, part in (("train", rows[:16]), ("test", rows[16:])):
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("sentence", "stars"), *part])
    return tmp_path


def test_a_classifier_on_the_command_line(sentences, tmp_path, capsys):
    model, pruned, out = (str(tmp_path / name) for name in ("model", "pruned", "out"))
    labelled.build("bert").save_pretrained(model)
    half_pruned("bert")[0].save_pretrained(pruned)
    for folder in (model, pruned):
        labelled.tokenizer().save_pretrained(folder)
    train, test = str(sentences / "train.csv"), str(sentences / "test.csv")
    columns = ["--task", "text-classification", "--text-column", "sentence", "--label-column", "stars"]
    training = ["--steps", "10", "--batch-size", "2", "--learning-rate", "1e-3", "--quiet", "--metric", "f1"]
    command = ["recover", pruned, "--teacher", model, "--output", out, *columns, *training]
    assert main([*command, "--evaluation", test]) == 1
    assert "--text self is what a language model writes, and a BertForSequence" in capsys.readouterr().err
    assert main([*command, "--text", train, "--evaluation", train]) == 1
    assert main([*command, "--text", train, "--evaluation", test]) == 0
    report, printed = Report.load(out), capsys.readouterr().out
    before, after = report.recovery["before"], report.evaluation
    measured = ["evaluate", out, "--data", test, *columns, "--metric", "f1", "--json", "--quiet"]
    assert main([*measured, "--against", model]) == 0
    f1 = json.loads(capsys.readouterr().out)["metric"]
    assert (after["metric"]["dense"], after["metric"]["pruned"]) == (f1["dense"], f1["pruned"])
    assert before["metric"]["dense"] == f1["dense"]
    assert after["rows"] == "examples"
    assert after["pruned"]["perplexity"] is after["divergence"] is None
    values = [f"{one:.4f}" for one in (f1["dense"], before["metric"]["pruned"], f1["pruned"])]
    assert " ".join(next(line for line in printed.splitlines() if line.strip().startswith("F1")).split()[1:]) == (
        " ".join(values)
    )
    assert "KL on held-out rows" in printed
    assert "perplexity" not in printed
    card = ModelCard.load(f"{out}/README.md")
    assert f"| F1 | {values[0]} | {values[2]} |" in card.text
    assert f"loss {before['pruned']['loss']:,.4f}, F1 {values[1]} before" in card.text
    assert "perplexity" not in card.text.lower()
    assert "nats per prediction" in card.text
    assert {result.metric_type for result in card.data.eval_results} == {"f1"}
    AutoModelForSequenceClassification.from_pretrained(out)


def _regression():
    config = labelled.build("bert").config
    config.num_labels = 1
    return AutoModelForSequenceClassification.from_config(config)


def _several_labels():
    config = labelled.build("bert").config
    config.problem_type = "multi_label_classification"
    return AutoModelForSequenceClassification.from_config(config)


@pytest.mark.parametrize("make", [_regression, _several_labels, lambda: labelled.build("wav2vec2")])
def test_what_predicts_no_class_is_refused(make):
    with pytest.raises(ValueError, match="recovery compares predictions of one token or class out of several"):
        recover_pretrained(make(), make(), CONFIG, text=labelled.classified(), progress=False)


PIXELS = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 0])


def test_convolutions_that_something_else_has_pruned_are_recovered(tmp_path):
    """No zero was seen in a model that has its weights in these alone."""
    config = ResNetConfig(num_labels=3, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    dense = ResNetForImageClassification(config).eval()
    pruned = copy.deepcopy(dense)
    masks = {name: one.abs() < one.abs().median() for name, one in pruned.named_parameters() if one.ndim == 4}
    with torch.no_grad():
        for name, mask in masks.items():
            pruned.get_parameter(name)[mask] = 0
    before = cases.bits(pruned)
    with pytest.raises(ValueError, match="no weight is zero"):
        recover_pretrained(dense, copy.deepcopy(dense), OF_IMAGES, text=[{"pixel_values": PIXELS, "labels": LABELS}])
    options = {"text": [{"pixel_values": PIXELS, "labels": LABELS}], "output_dir": tmp_path / "out", "progress": False}
    found = recover_pretrained(pruned, dense, replace(OF_IMAGES, steps=3), **options)
    assert cases.changed(pruned, before)
    assert all(not pruned.get_parameter(name)[mask].any() for name, mask in masks.items())
    assert {row.name for row in found.report.matrices} == masks.keys()
    assert found.report.zeros == sum(int(mask.sum()) for mask in masks.values())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"config": replace(OF_IMAGES, teacher_top_k=2)}, "teacher_top_k=2 is of a causal language model's vocabulary"),
        ({"config": replace(OF_IMAGES, task="text-classification")}, "task='text-classification' is for models of"),
        ({"config": replace(OF_IMAGES, label_column="kind")}, "'kind'"),
        ({"config": replace(OF_IMAGES, metric="bleu")}, "metric='bleu' is not one of task='image-classification'"),
        ({"text": [{"pixel_values": PIXELS}]}, "no loss without labels"),
        ({"text": [{"pixel_values": PIXELS, "labels": torch.full((4,), -100)}]}, "0 different rows with a prediction"),
        ({"text": [{"pixel_values": PIXELS[:1].repeat(2, 1, 1, 1), "labels": torch.zeros(2).long()}]}, "1 different"),
        ({"text": "self", "push_to_hub": "me/vit"}, "text='self' is what a language model writes"),
        ({"text": "pydoc"}, "does not read plain text, but images"),
        ({"evaluation": "pydoc"}, "plain text"),
        ({"config": CONFIG}, "sequence_length=24 has no effect here: for image-class"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_work_is_said_before_anything_is_trained(change, said, monkeypatch):
    monkeypatch.setattr("gradprobe_hf.recovery.recover.distil", lambda *_: pytest.fail("something was trained"))
    case = labelled.CASES["vit"]
    given = {"config": OF_IMAGES, "text": case.rows(), "processing_class": case.processor(), "progress": False}
    with pytest.raises(ValueError, match=said):
        recover_pretrained(half_pruned("vit")[0], labelled.build("vit"), **given | change)


def test_batches_of_ones_own_are_rows_without_their_padding():
    """A row is the same alone and beside longer ones; -100 leaves out what it is a label of."""
    dense = labelled.build("tags")
    ids = torch.randint(256, (3, 9), generator=torch.Generator().manual_seed(1))
    mask, labels = torch.ones(3, 9, dtype=torch.long), torch.ones(3, 9, dtype=torch.long)
    mask[1, 5:], labels[1, 5:], labels[2] = 0, -100, -100
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels, "token_type_ids": torch.zeros_like(ids)}
    text = read_text([batch], CONFIG, Reading(dense, None, Processes(), False))
    assert [len(row["input_ids"]) for row in text.rows] == [9, 5]  # the last has nothing to predict
    assert [row["labels"].tolist() for row in text.rows] == [[1] * 9, [1] * 5]
    again = text.layout.inputs(collated([*text.trained, *text.kept_back], text.layout))
    logits = dense(**again).logits
    alone = dense(input_ids=ids[1:2, :5]).logits
    torch.testing.assert_close(logits[1, :5], alone[0], rtol=1e-4, atol=1e-5)
    assert "labels" not in again


@pytest.mark.parametrize("width", [16, 17])
def test_labels_of_a_decoder_are_whole_beside_a_shorter_source(width):
    """Padded to one width, as `padding="max_length"` does with both, they were cut where the source ends."""
    dense = labelled.build("t5")
    lengths = [(5, 14), (8, 16), (10, 12)]
    ids, mask, labels = torch.zeros(3, 16).long(), torch.zeros(3, 16).long(), torch.full((3, width), -100)
    for row, (source, target) in enumerate(lengths):
        ids[row, :source], mask[row, :source] = torch.arange(2, source + 2), 1
        labels[row, :target] = torch.arange(3, target + 3)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    text = read_text([batch], CONFIG, Reading(dense, None, Processes(), False))
    assert [len(row["input_ids"]) for row in text.rows] == [source for source, _ in lengths]
    assert [int((row["labels"] != -100).sum()) for row in text.rows] == [target for _, target in lengths]


def test_what_an_architecture_never_trains_stays():
    """Whisper's sinusoids, which other tools make anew. What a user has frozen trains all the same."""
    dense, student = labelled.build("whisper"), labelled.build("whisper")
    with torch.no_grad():
        student.model.encoder.layers[0].fc1.weight[:, ::2] = 0
    student.model.decoder.layers[0].fc1.weight.requires_grad_(False)
    before = cases.bits(student)
    case = labelled.CASES["whisper"]
    options = {"text": case.rows(), "evaluation": False, "processing_class": case.processor(), "progress": False}
    recover_pretrained(student, dense, CONFIG, **options)
    moved = {name for name, bits in cases.bits(student).items() if not torch.equal(bits, before[name])}
    assert "model.encoder.embed_positions.weight" not in moved
    assert "model.decoder.layers.0.fc1.weight" in moved
    assert not student.model.encoder.embed_positions.weight.requires_grad


def test_two_texts_for_one_source_are_two_rows():
    """A decoder is given them: of five captions of a picture all are trained on."""
    dense = labelled.build("t5")
    source = torch.arange(6)[None]
    batches = [{"input_ids": source, "labels": source + number} for number in (1, 1, 2, 3)]
    text = read_text(batches, CONFIG, Reading(dense, None, Processes(), False))
    assert [int(row["labels"][0]) for row in text.rows] == [1, 2, 3]
    pairs = (0, 0), (0, 1), (1, 0)
    classes = [{"input_ids": source + shift, "labels": torch.tensor([label])} for shift, label in pairs]
    assert len(read_text(classes, CONFIG, Reading(labelled.build("bert"), None, Processes(), False)).rows) == 2


def test_what_computes_with_padding_is_given_rows_of_one_length():
    config = FNetConfig(vocab_size=260, hidden_size=16, num_hidden_layers=1, intermediate_size=32, num_labels=2)
    model = FNetForSequenceClassification(config)
    rows = [{"input_ids": torch.arange(length)[None], "labels": torch.tensor([0])} for length in (5, 6, 7)]
    with pytest.raises(ValueError, match=r"computes with padding, too, .*Give rows of one length"):
        read_text(rows, CONFIG, Reading(model, None, Processes(), False))


def test_a_classifier_without_a_padding_token_is_refused_before_the_pruning(monkeypatch):
    monkeypatch.setattr("gradprobe_hf.pruning.decide_pruning", lambda *_: pytest.fail("it was probed"))
    sizes = {"vocab_size": 260, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    model = GPT2ForSequenceClassification(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, num_labels=2)).eval()
    rows = [{"input_ids": torch.arange(number, number + 8)[None], "labels": torch.tensor([0])} for number in range(20)]
    with pytest.raises(ValueError, match="has no pad_token_id, by which it would find the last token"):
        cases.prune(model, rows, batch_size=1, recovery_steps=2)
