"""Metrics against what is worked out by hand or by search, and what they decide."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from accelerate import disk_offload
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification, MarianConfig, MarianMTModel

from gradprobe_hf import GradProbeConfig, compare_pretrained
from gradprobe_hf.tasks.metrics import METRICS, accuracy, f1, word_error_rate
from gradprobe_hf.tasks.predictions import predicted_next, written_texts
from tests import cases, labelled
from tests.launch import together

LABELLED = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=12)
WORDS = st.lists(st.sampled_from("abc"), max_size=5)


@given(LABELLED)
def test_accuracy_and_f1_from_the_table_of_confusions(pairs):
    said, right = zip(*pairs, strict=True)
    confusions = Counter(pairs)
    assert accuracy(said, right) == pytest.approx(sum(confusions[one, one] for one in range(4)) / len(pairs))
    scores = []
    for one in set(said) | set(right):
        hits, predicted, there = confusions[one, one], said.count(one), right.count(one)
        precision, recall = hits / predicted if predicted else 0, hits / there if there else 0
        scores.append(2 * precision * recall / (precision + recall) if hits else 0)
    assert f1(said, right) == pytest.approx(sum(scores) / len(scores))


@given(st.lists(st.tuples(WORDS, WORDS.filter(bool)), min_size=1, max_size=3))
def test_word_errors_are_the_fewest_edits(pairs):
    @cache
    def fewest(a, b):
        if not a or not b:
            return len(a) + len(b)
        return min(fewest(a[1:], b) + 1, fewest(a, b[1:]) + 1, fewest(a[1:], b[1:]) + (a[0] != b[0]))

    wanted = sum(fewest(tuple(a), tuple(b)) for a, b in pairs) / sum(len(b) for _, b in pairs)
    assert word_error_rate([" ".join(a) for a, _ in pairs], [" ".join(b) for _, b in pairs]) == pytest.approx(wanted)


def report(name, **options):
    case = labelled.CASES[name]
    rows = case.rows()
    options = {
        "calibration": rows,
        "evaluation": rows,
        "num_samples": 8,
        "sequence_length": 32,
        "batch_size": 3,
    } | options
    return cases.prune(labelled.build(name), options.pop("calibration"), processing_class=case.processor(), **options)


@pytest.mark.parametrize("side", ["left", "right"])
def test_next_tokens_of_padded_rows_are_those_of_the_rows(side):
    model, rows = cases.build("llama"), [torch.arange(9, 16), torch.arange(30, 34)]
    lengths, pad = [len(row) for row in rows], [7 - len(row) for row in rows]
    sides = [(one, 0) if side == "left" else (0, one) for one in pad]
    batch = {
        "input_ids": torch.stack([F.pad(row, one) for row, one in zip(rows, sides, strict=True)]),
        "attention_mask": torch.stack(
            [F.pad(torch.ones(length).long(), one) for length, one in zip(lengths, sides, strict=True)]
        ),
    }
    found, labels = predicted_next(model, batch, None)
    alone = [predicted_next(model, {"input_ids": row[None]}, None) for row in rows]
    counted = labels != -100
    assert torch.equal(labels[counted], torch.cat([one[0] for _, one in alone]))
    assert torch.equal(found[counted], torch.cat([one[0] for one, _ in alone]))


def test_accuracy_before_and_after_is_what_the_models_predict():
    case, model = labelled.CASES["bert"], labelled.build("bert")
    rows, words = case.rows(), case.processor()
    result = cases.prune(model, rows, evaluation=rows, processing_class=words, apply=True, num_samples=8, sparsity=0.8)
    metric = result.report.evaluation["metric"]

    def share_right(one):
        right = 0
        for text, label in zip(rows["sentence"], rows["label"], strict=True):
            ids = torch.tensor([words(text)["input_ids"]])
            right += int(one(ids).logits.argmax()) == label
        return right / len(rows)

    with torch.no_grad():
        assert metric["pruned"] == share_right(model)
        assert metric["dense"] == share_right(labelled.build("bert"))
    assert result.report.evaluation["dense"]["terms"] == len(rows)
    assert result.report.evaluation["samples"] == 8, "all rows, where no number was asked for"


def test_a_sparsity_is_searched_for_that_keeps_the_accuracy():
    found = report("bert", metric="accuracy", max_metric_drop=0.2, sparsity=0.9, sparsity_step=0.3, batch_size=2).report
    assert len(found.curve) > 1
    for point in found.curve:
        assert point["within"] == (point["metric"] >= point["limit"])
        assert (4 * point["metric"]) == int(4 * point["metric"]), "a share of the four rows that choose"
    assert found.selection["metric"] == "accuracy"
    broken = found.evaluation["metric"]["pruned"] < found.evaluation["metric"]["dense"] - 0.2
    assert broken == any("beyond max_metric_drop" in warning for warning in found.warnings)
    assert (4 * found.evaluation["metric"]["pruned"]) % 1 == 0, "and of the four that do not"
    kept = max((point["sparsity"] for point in found.curve if point["within"]), default=0)
    assert found.sparsity == pytest.approx(kept, abs=2e-3)


def test_an_error_rate_is_searched_from_below():
    found = report("wav2vec2", max_metric_drop="5%", sparsity=0.6, sparsity_step=0.3, sequence_length=None).report
    assert found.curve
    for point in found.curve:
        assert point["within"] == (point["metric"] <= point["limit"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": "wer"}, "metric='wer' is not one of task='text-classification'; it knows 'accuracy', 'f1'"),
        ({"metric": "f1", "evaluation": False}, "metric='f1' cannot be measured: there is nothing to measure on"),
        ({"metric": "f1", "metric_fn": float, "max_metric_drop": 1.0}, "metric='f1' and metric_fn are two metrics"),
        ({"metric": "bleu", "task": "text-classification"}, "metric='bleu' is not one of task='text-classification'"),
        ({"metric": "accurate"}, "metric must be one of 'accuracy', 'f1'"),
        ({"calibration": {"pydoc": 1, "self": 2}}, "a mixture is of texts, and text-classification reads rows"),
        ({"task": "classification"}, "task must be one of"),
        ({"task": "fill-mask", "label_column": "label"}, "task='fill-mask' reads no labels"),
    ],
)
def test_metrics_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        report("bert", **options)


def test_a_comparison_has_the_metric_of_each_row():
    rows, words = labelled.classified(), labelled.tokenizer()
    data = {"evaluation": rows, "processing_class": words}
    config = GradProbeConfig(num_samples=8, batch_size=2, sparsity=0.7, score="random")
    found = compare_pretrained(
        labelled.build("bert"), config, {"random": config}, calibration=rows, progress=False, **data
    )
    alone = cases.prune(labelled.build("bert"), rows, **data, num_samples=8, batch_size=2, sparsity=0.7, score="random")
    assert found.rows[0].metric == alone.report.evaluation["metric"]["pruned"]
    assert found.evaluation["metric"]["dense"] == alone.report.evaluation["metric"]["dense"]


BLEU = """
import datasets
import evaluate

class Bleu(evaluate.Metric):
    def _info(self):
        features = datasets.Features(
            {"predictions": datasets.Value("string"), "references": datasets.Sequence(datasets.Value("string"))}
        )
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        return {"bleu": sum(a in b for a, b in zip(predictions, references)) / len(predictions)}
"""


def test_bleu_is_what_evaluate_computes(tmp_path, monkeypatch):
    """Its script comes from the Hub; one in the working folder goes before."""
    METRICS["bleu"].check.cache_clear()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"metric='bleu'.*Load it once with network"):
        report("t5", metric="bleu")
    (tmp_path / "bleu").mkdir()
    (tmp_path / "bleu" / "bleu.py").write_text(BLEU)
    found = report("t5", metric="bleu", num_samples=2, evaluation_samples=2).report.evaluation["metric"]
    METRICS["bleu"].check.cache_clear()
    assert found["name"] == "bleu"
    assert 0 <= found["pruned"] <= 1


def before_and_after(name, folder=None):
    """The metric of a model, in memory or offloaded to `folder`."""
    case, model = labelled.CASES[name], labelled.build(name)
    if folder is not None:
        disk_offload(model, folder, torch.device("cpu"))
    options = {"num_samples": 6, "batch_size": 2, "preset": "fast", "apply": False}
    if name != "wav2vec2":  # which neither reads nor writes text
        options["sequence_length"] = 32
    rows = case.rows()
    return cases.prune(model, rows, evaluation=rows, processing_class=case.processor(), **options).report.evaluation[
        "metric"
    ]


@pytest.mark.parametrize("name", ["bert", pytest.param("whisper", marks=pytest.mark.slow)])
def test_an_offloaded_model_has_the_same_metric(name, tmp_path):
    assert before_and_after(name, tmp_path) == before_and_after(name)


@pytest.mark.parametrize("name", ["bert", pytest.param("wav2vec2", marks=pytest.mark.slow)])
def test_two_processes_have_the_metric_of_one(name):
    alone = before_and_after(name)
    for one in together(before_and_after, name):
        assert one == alone


def test_no_more_is_written_than_there_are_positions_for():
    """Marian's, BART's and Pegasus' encoder and decoder have as many as one number says, Whisper's decoder another."""
    torch.manual_seed(0)
    small = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    ends = {"pad_token_id": 258, "decoder_start_token_id": 258, "eos_token_id": None, "forced_eos_token_id": None}
    size = {"vocab_size": cases.VOCABULARY, "max_position_embeddings": 32}
    model = MarianMTModel(MarianConfig(**small, **heads, **ends, **size)).eval()
    ids = torch.arange(25)[None]
    written, _ = written_texts(model, {"input_ids": ids, "labels": ids}, cases.tokenizer())
    assert len(written) == 1


@pytest.mark.parametrize("forced", [None, 257])
def test_how_long_a_text_may_be_is_no_matter_of_its_batch(forced):
    """One that writes on and on did so for the longest reference of them all: its errors grew with `batch_size`."""
    torch.manual_seed(0)
    small = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    ends = {"pad_token_id": 258, "decoder_start_token_id": 258, "eos_token_id": None, "forced_eos_token_id": forced}
    model = MarianMTModel(MarianConfig(**small, **heads, **ends, vocab_size=cases.VOCABULARY)).eval()
    ids = torch.randint(3, 200, (2, 40))
    labels = ids.clone()
    labels[1, 5:] = -100
    (_, short), _ = written_texts(model, {"input_ids": ids, "labels": labels}, cases.tokenizer())
    (alone,), _ = written_texts(model, {"input_ids": ids[1:], "labels": labels[1:, :5]}, cases.tokenizer())
    assert short == alone
    assert short
    # Whisper leaves out what its decoder begins with.
    model, processor = labelled.build("whisper"), labelled.CASES["whisper"].processor()
    model.generation_config.eos_token_id = None
    (batch,) = labelled.batches("whisper", labelled.CASES["whisper"].rows(), samples=2, batch_size=2).items
    batch["labels"][1, 3:] = -100
    (_, short), _ = written_texts(model, batch, processor)
    one = {name: value[1:] for name, value in batch.items()} | {"labels": batch["labels"][1:, :3]}
    (alone,), _ = written_texts(model, one, processor)
    assert short == alone
    assert short


def test_a_mask_of_pairs_of_tokens_hides_no_token_from_the_metric():
    (rows,) = cases.batches("llama", rows=2, length=16)
    mask = torch.ones(16, 16).tril().bool().expand(2, 1, 16, 16)
    model = cases.build("llama")
    plain, paired = (predicted_next(model, batch, None) for batch in (rows, {**rows, "attention_mask": mask}))
    assert all(torch.equal(one, other) for one, other in zip(plain, paired, strict=True))


def test_errors_in_no_words_are_refused():
    with pytest.raises(ValueError, match="have no word"):
        word_error_rate(["something"], [" "])


def one_number():
    config = labelled.build("bert").config
    config.num_labels = 1
    return AutoModelForSequenceClassification.from_config(config).eval()


def squared_logits(model, batch):
    return model(input_ids=batch["input_ids"]).logits.square().sum()


@pytest.mark.parametrize(
    ("make", "labels", "why"),
    [
        (one_number, lambda: torch.tensor([1, 0]), "the model predicts one number, which is no class"),
        (lambda: labelled.build("bert"), lambda: None, "the evaluation batches have no 'labels'"),
        (lambda: labelled.build("bert"), lambda: torch.ones(2, 3).long(), "the labels are several of a row"),
        (lambda: labelled.build("tags"), lambda: torch.ones(2).long(), "the labels are not one of each token"),
    ],
    ids=["one number", "none", "several", "of rows"],
)
def test_what_is_no_class_has_no_accuracy(make, labels, why):
    """The most likely of one class is always the same, and that of other labels was an error behind all the work."""
    batches = [{"input_ids": torch.randint(3, 250, (2, 12)), "labels": labels()} for _ in range(4)]
    batches = [{name: value for name, value in batch.items() if value is not None} for batch in batches]
    given = {"evaluation": batches, "loss_fn": squared_logits}
    result = cases.prune(make(), batches, **given)
    assert result.report.evaluation["metric"] is None
    with pytest.raises(ValueError, match=f"metric='accuracy' cannot be measured: {why}"):
        cases.prune(make(), batches, **given, metric="accuracy")
