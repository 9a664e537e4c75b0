"""Classifiers on the command line: from a file of labelled rows to a checkpoint, its card and its pipeline."""

from __future__ import annotations

import csv
import json

import pytest
from huggingface_hub import ModelCard
from transformers import AutoModelForSequenceClassification, pipeline
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from gradprobe_hf.cli import main
from gradprobe_hf.data.labelled import TaskOptions
from gradprobe_hf.data.windows import WindowSpec, load_batches
from gradprobe_hf.report.card.build import build_card
from gradprobe_hf.tasks.table import task_of_class
from tests import cases, labelled

SMALL = ["--num-samples", "6", "--sequence-length", "32", "--batch-size", "2", "--quiet", "--preset", "fast"]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny-bert"
    labelled.build("bert").save_pretrained(folder)
    labelled.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "sst2.csv"
    names = list(labelled.LABELS)
    rows = [(text, names[number % 3]) for number, text in enumerate(labelled.texts(12))]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("sentence", "stars"), *rows])
    return path


def test_a_classifier_from_a_file_to_its_card(classifier, sentences, tmp_path, capsys):
    out = tmp_path / "out"
    columns = [
        "--task",
        "text-classification",
        "--text-column",
        "sentence",
        "--label-column",
        "stars",
        "--metric",
        "f1",
    ]
    data = ["--calibration", str(sentences), "--evaluation", str(sentences)]
    assert main(["prune", str(classifier), "--output", str(out), *columns, *data, *SMALL, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    f1 = report["evaluation"]["metric"]
    card = ModelCard.load(out / "README.md")
    assert card.data.pipeline_tag == "text-classification"
    (result,) = card.data.eval_results
    assert (result.task_type, result.metric_type, result.metric_value) == (
        "text-classification",
        "f1",
        round(f1["pruned"], 4),
    )
    for said in (
        f"| F1 | {f1['dense']:.4f} | {f1['pruned']:.4f} |",
        "12 examples (sentence, stars)",
        'pipeline("text-classification"',
    ):
        assert said in card.text, said
    assert "perplexity" not in card.text.lower()
    assert pipeline("text-classification", model=str(out))("a sentence")[0]["label"] in labelled.LABELS
    measure = ["evaluate", str(out), "--data", str(sentences), *columns, "--quiet"]
    assert main([*measure, "--against", str(classifier), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)["metric"]
    assert (again["pruned"], again["dense"]) == (f1["pruned"], f1["dense"])
    assert main(measure) == 0
    assert f"{f1['pruned']:.4f}" in capsys.readouterr().out


def test_a_task_loads_its_own_head_or_says_what_is_missing(classifier, sentences, tmp_path, capsys):
    asked = ["--task", "fill-mask", "--calibration", str(sentences), "--output", str(tmp_path / "out")]
    assert main(["prune", str(classifier), *asked, *SMALL]) == 1
    assert "cls.predictions" in capsys.readouterr().err.splitlines()[-1]
    assert main(["estimate", str(classifier), "--task", "text-classification", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == str(classifier)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--label-column", "mood"], "--label-column mood: there is no such column; the data has"),
        (["--text-column", "words"], "--text-column words: there is no such column"),
        (["--packing", "off"], "--packing has no effect here"),
        (["--metric", "wer"], "--metric wer is not one of --task text-classification"),
        (["--calibration", "pydoc"], "is plain text, and text-classification needs rows with labels"),
    ],
)
def test_wrong_input_is_one_readable_line(flags, said, classifier, sentences, tmp_path, capsys):
    line = ["prune", str(classifier), "--output", str(tmp_path / "out"), "--calibration", str(sentences)]
    assert main([*line, "--label-column", "stars", *SMALL, *flags]) == 1
    shown = capsys.readouterr().err.splitlines()[-1]
    assert said in shown
    assert not (tmp_path / "out").exists()


def test_a_folder_of_images_is_a_data_set(tmp_path):
    for part, count in (("train", 4), ("test", 2)):
        for number, image in enumerate(labelled.CASES["vit"].rows()["image"][:count]):
            place = tmp_path / part / ("LABEL_2", "LABEL_0")[number % 2]
            place.mkdir(parents=True, exist_ok=True)
            image.save(place / f"{number}.png")
    model = labelled.build("vit")
    found = {
        part: load_batches(
            str(tmp_path),
            WindowSpec(count, 32, 2),
            part=part,
            model=model,
            processing_class=ViTImageProcessorPil(size={"height": 8, "width": 8}),
            task=TaskOptions(task_of_class("ViTForImageClassification")),
        )
        for part, count in (("calibration", 4), ("evaluation", 2))
    }
    labels = [int(label) for batch in found["calibration"] for label in batch["labels"]]
    assert sorted(labels) == [0, 0, 2, 2], "by their names, which the folder sorts in another order"
    assert found["evaluation"].samples == 2


def test_a_card_of_an_image_model_speaks_of_images():
    case = labelled.CASES["vit"]
    options = {"evaluation": case.rows(), "num_samples": 8, "preset": "fast"}
    result = cases.prune(labelled.build("vit"), case.rows(), processing_class=case.processor(), **options)
    card = build_card(result.report, result.config, {}, "out")
    text = " ".join(card.text.split())
    assert "8 images (image, label), shuffled with seed 0" in text
    assert "over 8 images" in text
    assert card.data.pipeline_tag == "image-classification"
    assert "token" not in text.partition("## Limits")[0]


def _measuring():
    """A model that gives a text a number, and rows with one."""
    config = labelled.build("bert").config
    config.num_labels = 1
    rows = [{"text": text, "label": number / 2} for number, text in enumerate(labelled.texts())]
    return AutoModelForSequenceClassification.from_config(config), rows, labelled.tokenizer(), {}


def _with_a_loss_of_its_own():
    return cases.build("llama"), cases.batches("llama"), None, {"loss_fn": lambda model, _: model.lm_head.weight.sum()}


def _hearing():
    case = labelled.CASES["wav2vec2"]
    return labelled.build("wav2vec2"), case.rows(), case.processor(), {}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_measuring, "the mean loss over 8 examples"),
        (_with_a_loss_of_its_own, "the mean loss over 6 windows"),
        (_hearing, "the mean loss, in nats, over 8 recordings"),
    ],
)
def test_a_card_says_what_a_loss_is_in_and_a_mean_over(make, said):
    model, rows, processing_class, options = make()
    given = {"processing_class": processing_class, "score": "magnitude", **options}
    result = cases.prune(model, rows, evaluation=rows, **given)
    assert said in " ".join(build_card(result.report, result.config, {}, "out").text.split())


def test_an_error_that_is_squared_is_not_shown_in_nats(tmp_path, capsys):
    model, rows, processing_class, _ = _measuring()
    for one in (model, processing_class):
        one.save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluate = ["evaluate", str(tmp_path / "model"), "--data", str(tmp_path / "rows.jsonl"), "--quiet"]
    assert main(evaluate) == main([*evaluate, "--against", str(tmp_path / "model")]) == 0
    shown = capsys.readouterr().out
    assert shown.count("loss") == 2
    assert "nats" not in shown
