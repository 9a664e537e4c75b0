"""Where no text to measure on is named, a part of the calibration's own that does not calibrate is measured on."""

from __future__ import annotations

import json
import random

import pytest
import torch
from datasets import Dataset
from transformers import BertForQuestionAnswering

from gradprobe_hf.data import sources
from gradprobe_hf.data.batches import shared_rows
from gradprobe_hf.data.text import pieces
from gradprobe_hf.run.context import RunRequest
from gradprobe_hf.run.request.inputs import load_inputs, written
from tests import cases, labelled
from tests.chats import CHAT, CHATML, LONG, chatting

LETTERS = random.Random(0)  # no two windows may be alike by chance
SENTENCES = ["".join(LETTERS.choices("abcdefghijklmnopqrstuvwxyz", k=40)) + "." for _ in range(200)]
TEXT = " ".join(SENTENCES)
CHATS = [{"messages": [{"role": "user", "content": sentence}, *CHAT[1:]]} for sentence in SENTENCES]
SHORT = {"num_samples": 8, "sequence_length": 32}


def read(calibration, evaluation=None, *, model=None, tokenizer=None, **options):
    """The texts of a run."""
    request = RunRequest(
        LONG if model is None else model,
        cases.config(**SHORT | options),
        calibration,
        cases.tokenizer("<s> $A") if tokenizer is None else tokenizer,
        evaluation,
        progress=False,
    )
    return written(load_inputs(request))


def tokenised():
    ids = cases.tokenizer()(SENTENCES, truncation=True, max_length=20)["input_ids"]
    return Dataset.from_dict({"input_ids": ids})


@pytest.mark.parametrize(
    ("calibration", "options"),
    [
        (TEXT, {}),
        (SENTENCES, {"document_separator": "eos"}),
        (SENTENCES, {"packing": False}),
        (CHATS, {}),
        (
            CHATS,
            {"packing": False, "assistant_only_loss": True, "sequence_length": 128},
        ),
        (tokenised(), {}),
    ],
    ids=["text", "documents", "not packed", "chats", "the assistant's answers", "tokenised"],
)
def test_what_is_measured_on_does_not_calibrate(calibration, options):
    calibration = [calibration] if isinstance(calibration, str) else calibration
    tokenizer = chatting(CHATML)
    found = read(calibration, tokenizer=tokenizer, **options)
    alone = read(calibration, False, tokenizer=tokenizer, **options)
    assert found.calibration.fingerprint == alone.calibration.fingerprint
    assert found.evaluation.samples == 20
    assert shared_rows(found.calibration, found.evaluation) == 0
    assert "behind the first 8, which are for calibration" in found.evaluation.protocol
    other = read(calibration, tokenizer=tokenizer, evaluation_samples=5, **options)
    assert other.evaluation.samples == 5


def test_what_is_measured_of_a_large_text_begins_other_pieces(monkeypatch):
    monkeypatch.setattr(pieces, "LARGEST_TEXT", 1_000)
    monkeypatch.setattr(pieces, "LARGEST_SHARE", 1)
    found = read([TEXT], evaluation_samples=6)
    assert found.calibration.fingerprint == read([TEXT], False).calibration.fingerprint
    assert found.evaluation.samples == 6
    assert all("pieces of the text" in part.protocol for part in (found.calibration, found.evaluation))
    assert shared_rows(found.calibration, found.evaluation) == 0


def test_what_is_measured_of_a_large_data_set_is_not_what_calibrates(monkeypatch):
    monkeypatch.setattr(sources, "STREAMED_FROM_BYTES", 1)
    monkeypatch.setattr(sources, "PIECE_BYTES", 1_000)
    rows = Dataset.from_dict({"text": ["".join(LETTERS.choices("abcdefgh", k=40)) for _ in range(2_000)]})
    found = read(rows, evaluation_samples=6)
    assert found.calibration.fingerprint == read(rows, False).calibration.fingerprint
    assert found.evaluation.samples == 6
    assert all("parts of the rows drawn" in part.protocol for part in (found.calibration, found.evaluation))
    assert shared_rows(found.calibration, found.evaluation) == 0


def test_windows_that_calibrate_and_those_that_do_not_are_of_one_order():
    """All of them together are the windows of a run that calibrates on all of them."""
    found = read([TEXT], num_samples=8, evaluation_samples=7)
    whole = read([TEXT], False, num_samples=15)
    parts = [batch["input_ids"] for part in (found.calibration, found.evaluation) for batch in part]
    assert torch.equal(torch.cat(parts), torch.cat([batch["input_ids"] for batch in whole.calibration]))


def test_of_a_mixture_each_text_of_the_users_is_measured(tmp_path):
    for name, text in {"one": TEXT, "two": TEXT[::-1]}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    weights = {"self": 2, str(tmp_path / "one.txt"): 1, str(tmp_path / "two.txt"): 1}
    found = read(weights)
    assert found.evaluation.samples == 20
    assert found.evaluation.source == "one.txt, two.txt"
    assert found.evaluation.protocol.count("behind the first 2, which are for calibration") == 2
    assert shared_rows(found.calibration, found.evaluation) == 0
    assert "own text" in found.calibration.source


def test_so_is_a_text_of_which_there_is_little(tmp_path):
    """A window that calibrates is enough to have one that is measured."""
    for name, text in {"one": TEXT, "two": TEXT[::-1]}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    found = read({str(tmp_path / "one.txt"): 49, str(tmp_path / "two.txt"): 1}, num_samples=50)
    assert [part[0] for part in found.evaluation.protocol.split(".txt: ")[1:]] == ["2", "1"]
    assert found.evaluation.samples == 21


@pytest.mark.parametrize("test", ["another text", "no labels that are known"])
def test_the_split_for_it_where_there_is_one(test, tmp_path):
    rows = [{"sentence": text, "label": n % 3} for n, text in enumerate(labelled.texts(12))]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    label = 1 if test == "another text" else -1
    others = [{"sentence": f"other {n}", "label": label} for n in range(6)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in others))
    model, case = labelled.build("bert"), labelled.CASES["bert"]
    found = read(str(tmp_path), model=model, tokenizer=case.processor(), num_samples=5)
    assert found.evaluation.samples == 5, "as many as calibrate"
    assert ("behind" in found.evaluation.protocol) == (label == -1)
    assert found.metric.name == "accuracy"


@pytest.mark.parametrize("name", labelled.CASES)
def test_rows_of_every_task(name):
    case = labelled.CASES[name]
    length = {} if name in ("vit", "wav2vec2", "recordings") else {"sequence_length": 32}
    options = {"num_samples": 4, "sequence_length": None, **length}
    found = read(case.rows(), model=labelled.build(name), tokenizer=case.processor(), **options)
    assert found.evaluation.samples == (18 if name == "masked" else 4), "all that is left"
    assert shared_rows(found.calibration, found.evaluation) == 0


def test_nothing_where_too_little_is_left():
    held = len(cases.tokenizer()(TEXT)["input_ids"]) // 31
    assert not read([TEXT], num_samples=held - 3).evaluation, "three windows say nothing"
    assert read([TEXT], num_samples=held - 4).evaluation.samples == 4
    assert read([TEXT], evaluation_samples=2).evaluation.samples == 2, "as asked"
    assert not read(cases.batches("llama")).evaluation, "batches come as they are"
    assert read([TEXT], recovery_steps=2).evaluation.source.startswith("pydoc"), "a recovery trains on the rest"
    assert not read([TEXT], False).evaluation
    assert not read(tokenised().select(range(8))).evaluation, "all rows calibrate"


def test_text_without_labels_is_no_error_where_none_are_needed():
    """A model for questions is pruned by a score that needs no loss; and of plain text it has none to measure."""
    model = BertForQuestionAnswering(labelled.build("bert").config)
    found = read([TEXT], model=model, tokenizer=labelled.tokenizer(), score="wanda")
    assert found.calibration.samples == 8
    assert not found.evaluation
