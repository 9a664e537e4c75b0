"""Columns, templates, mixtures and splits: what is read of a row, and of which file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from datasets import ClassLabel, Dataset

from gradprobe_hf import GradProbeConfig, RecoveryConfig, prune_pretrained, recover_pretrained
from gradprobe_hf.cli.main import main
from gradprobe_hf.cli.values import mixture
from gradprobe_hf.data import sources
from gradprobe_hf.data.batches import from_rows
from gradprobe_hf.data.text.mixture import mixed
from gradprobe_hf.data.text.packing import Drawn
from tests import cases
from tests.chats import CHAT, CHATML, WITH_BOS, chatting, written
from tests.test_calibration import TOKENIZER, ids, load

KINDS = ClassLabel(names=["a reason", "a way"])
COLUMNS = {"question": ["Why?", "How so?"] * 20, "answer": ["Because.", "That way."] * 20}


def test_a_column_by_its_name_and_several_by_a_template():
    rows = Dataset.from_dict(COLUMNS)
    named = load(rows, text_column="answer")
    assert named.fingerprint == load(COLUMNS["answer"]).fingerprint
    filled = load(rows, text_template="Q: {question}\nA: {answer}")
    texts = [f"Q: {q}\nA: {a}" for q, a in zip(*COLUMNS.values(), strict=True)]
    assert filled.fingerprint == load(texts).fingerprint
    assert filled.describe()["example"] == "Q: Why?\nA: Because."
    assert "example" not in named.describe()
    classes = rows.map(lambda row, number: {"kind": number % 2}, with_indices=True).cast_column("kind", KINDS)
    assert load(classes, text_template="{kind}: {answer}").describe()["example"] == "a reason: Because."


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"no 'text' column; its columns are 'question', 'answer'.*--text-column.*\{question\}\\n\{answer\}"),
        ({"text_column": "body"}, r"'body'.*no such column; its columns are 'question', 'answer'"),
        ({"text_template": "{question} {reply}"}, r"names the column 'reply', which .* its columns are 'question'"),
    ],
)
def test_a_column_that_is_not_there_is_an_error_that_names_those_that_are(options, message):
    with pytest.raises(ValueError, match=message):
        load(Dataset.from_dict(COLUMNS), **options)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{answers}",
            r"the column 'answers', which the template names, holds a list, \['a', 'b'\]: make one text of it",
        ),
        ("{given}", r"'given', which the template names, holds fields: name one of them, given\.by, given\.at\."),
    ],
)
def test_a_template_names_no_column_of_several_values(template, message):
    rows = [{"answers": ["a", "b"], "given": {"by": "someone", "at": "home"}}] * 20
    with pytest.raises(ValueError, match=message):
        load(rows, text_template=template)
    assert load(rows, text_template="{given.by} and {given.at}").describe()["example"] == "someone and home"
    assert load(rows, text_column="given.by").fingerprint == load(["someone"] * 20).fingerprint


def test_texts_of_a_mixture_are_looked_at_before_the_model_writes(monkeypatch):
    monkeypatch.setattr("gradprobe_hf.data.windows._Reader._written", lambda *_: pytest.fail("it wrote a text"))
    with pytest.raises((ValueError, FileNotFoundError), match="missing"):
        load({"self": 1, "missing.txt": 1})
    with pytest.raises(ValueError, match="holds"):
        load({"self": 1, "pydoc": 10**6}, samples=10**7)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.csv", 'text;id\n"some text";3\n', "';' between the names of its columns, 'text;id'"),
        ("rows.csv", "text;id\nsome, and more;3\n", "';' between the names of its columns, 'text;id'"),
        ("rows.csv", "text\tlabel\nsome text\t3\n", "save it with commas as .csv, or with tabs as .tsv"),
        ("rows.tsv", "text,label\nsome text,3\n", "',' between the names of its columns, 'text,label'"),
        ("rows.csv", "text\n", "rows.csv is empty: it holds no rows"),
    ],
    ids=str,
)
def test_a_table_with_another_separator_is_no_text(name, content, said, tmp_path):
    """A number beside a text would be calibrated on as part of it."""
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=said):
        load(str(tmp_path / name))


def test_a_text_in_place_of_names_is_no_separator(tmp_path, caplog):
    line = "A text that was written without a line of names; it goes on behind its semicolon for a while"
    (tmp_path / "rows.csv").write_text(f"{line}\n" * 9)
    load(str(tmp_path / "rows.csv"))
    assert "is read as the names of its columns" in caplog.text


@pytest.mark.parametrize(("ending", "between"), [("csv", ","), ("tsv", "\t")])
def test_tables_are_read_as_they_are_written(ending, between, tmp_path):
    path = tmp_path / f"rows.{ending}"
    quoted = '"He said ""NA"", then"' if ending == "csv" else 'He said "NA", then'
    lines = [between.join(("sentence", "label")), between.join((quoted, "1")), between.join(("NA", "0"))]
    path.write_text("\n".join(lines) + "\n")
    found = load(str(path), samples=2, packing=False, text_column="sentence", length=40)
    rows = [row[mask == 1] for batch in found for row, mask in zip(*list(batch.values())[::-1], strict=True)]
    assert sorted(TOKENIZER.decode(row) for row in rows) == ['He said "NA", then', "NA"]


@pytest.mark.parametrize(
    "rows",
    [
        [{"id": f"r{number}", "body": None if number == 0 else "A text of some words."} for number in range(40)],
        [{"source": "web", "body": ["one paragraph", "another one"]}] * 40,
    ],
    ids=["nothing in the first row", "a list of texts"],
)
def test_a_first_row_without_a_text_does_not_make_one_of_another_column(rows, tmp_path):
    with pytest.raises(ValueError, match=r"the column 'body' must hold a text.* holds (nothing|list)"):
        load(written(tmp_path / "rows.jsonl", rows))


@pytest.mark.parametrize("column", ["id", "doc_id", "url", "source"])
def test_what_says_which_text_a_row_has_is_no_text(column):
    """Of this a model would be calibrated on the numbers of its rows."""
    marks = {column: [f"row number {number} of them" for number in range(40)]}
    found = load(Dataset.from_dict({**marks, "body": COLUMNS["answer"]}))
    assert found.fingerprint == load(COLUMNS["answer"]).fingerprint
    assert "of the column 'body'" in found.protocol
    with pytest.raises(ValueError, match=rf"no 'text' column; its columns are '{column}'.*--text-column"):
        load(Dataset.from_dict(marks))
    assert f"of the column '{column}'" in load(Dataset.from_dict(marks), text_column=column).protocol


@pytest.mark.parametrize("rows", ["A film, number {},0", "One of {},0,"])
def test_a_row_with_more_fields_than_names_is_refused(rows, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(["text,label", *(rows.format(number) for number in range(20))]) + "\n")
    with pytest.raises(ValueError, match="more fields than its first line has names"):
        load(str(path))


def test_what_is_hidden_in_a_folder_is_not_read(tmp_path):
    (tmp_path / "a.txt").write_text("A text of some words. " * 40)
    wanted = load(str(tmp_path)).fingerprint
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".ipynb_checkpoints" / "a.txt").write_text("An older copy. " * 40)
    assert load(str(tmp_path)).fingerprint == wanted


def test_what_is_no_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes("A text. ".encode("utf-16-le") * 50)
    with pytest.raises(ValueError, match=r"a\.txt holds NUL characters"):
        load(str(tmp_path / "a.txt"))
    Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"saved by save_to_disk: give datasets\.load_from_disk"):
        load(str(tmp_path / "saved"))


def test_a_large_text_is_read_in_pieces_of_whole_lines(tmp_path, monkeypatch):
    lines = [f"Line {number} of é many.\n" for number in range(400)]
    (tmp_path / "a.txt").write_text("".join(lines))
    monkeypatch.setattr(sources, "STREAMED_FROM_BYTES", 1)
    monkeypatch.setattr(sources, "PIECE_BYTES", 997)  # lines have 19 to 21 bytes: pieces begin inside of them
    pieces = [row["text"] for row in sources.open_source(str(tmp_path / "a.txt"), "calibration", 3).rows]
    assert pieces != sorted(pieces, key=lambda piece: int(piece.split()[1]))
    assert sorted("".join(pieces).splitlines()) == sorted(line.rstrip() for line in lines)
    assert all(piece in "".join(lines) for piece in pieces)


@pytest.mark.parametrize("streamed_from", [1, 2**20], ids=["in pieces", "whole"])
def test_the_mark_of_an_encoding_is_no_text(streamed_from, tmp_path, monkeypatch):
    """Editors of Windows write one before UTF-8."""
    (tmp_path / "a.txt").write_bytes("\ufeffIt was late.\n".encode())
    monkeypatch.setattr(sources, "STREAMED_FROM_BYTES", streamed_from)
    (row,) = sources.open_source(str(tmp_path / "a.txt"), "calibration", 0).rows
    assert row["text"].rstrip() == "It was late."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"row 2: the column 'text' must .* dataset\.filter\(lambda row: row\['text'\]\)"),
        ("It was\0late.", "row 2: its text holds a NUL character"),
    ],
)
def test_a_row_without_a_text_is_named_with_a_way_to_leave_it_out(text, message):
    with pytest.raises(ValueError, match=message):
        load(Dataset.from_dict({"text": ["It was late. " * 40, text]}))


def test_a_stream_of_token_ids_is_not_tokenised_anew():
    rows = Dataset.from_dict({"text": ["some words"] * 8, "input_ids": [[7, 8, 9, number] for number in range(8)]})
    streamed = rows.to_iterable_dataset().map(lambda row: row)
    assert streamed.column_names is None
    assert sorted(row[3].item() for batch in load(streamed, samples=8) for row in batch["input_ids"]) == list(range(8))


@pytest.mark.parametrize(("first", "warned"), [("It was late, and nobody was there.", True), ("a sentence", False)])
def test_a_table_without_names_says_that_its_first_text_is_taken_for_one(first, warned, tmp_path, caplog):
    path = tmp_path / "rows.tsv"
    path.write_text(f"{first}\nA second text of several words.\nA third one.\n")
    load(str(path), samples=2, packing=False, length=40)
    assert ("its first line is read as the names of its columns" in caplog.text) == warned


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, r"row 2: the column 'text'.*nothing \(null\)"),
        ([1, 2], "cannot be read as json|row 2: the column 'text'"),
    ],
)
def test_a_row_without_a_text_is_named(value, message, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("good", value, "good")))
    with pytest.raises(ValueError, match=message):
        load(str(path))


def test_a_list_as_text_and_rows_that_change_their_types_are_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": ["a", "b"]}) + "\n")
    with pytest.raises(ValueError, match=r"row 1: the column 'text' must hold a text.*holds list \['a', 'b'\]"):
        load(str(path), text_column="text")
    path.write_text('{"text": "a"}\n{"text": {"b": 1}}\n{"text": 3}\n')
    with pytest.raises(ValueError, match=r"cannot be read as json|row 2: the column 'text'.*\{'b': 1\}"):
        load(str(path))


def test_a_document_each_is_what_the_tokenizer_makes_of_it():
    texts = [f"Document {'x' * i} ends." for i in range(1, 9)]
    tokenizer = cases.tokenizer("<s> $A")
    found = load(texts, samples=8, packing=False, length=20, tokenizer=tokenizer)
    rows = [
        row[mask == 1].tolist()
        for batch in found
        for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    assert sorted(rows) == sorted(tokenizer(texts, truncation=True, max_length=20)["input_ids"])
    assert "a row each, of at most 20 tokens, padded and masked (each begins with `<s>`)" in found.protocol
    with pytest.raises(ValueError, match=r"holds 8 documents.*9 were asked for.*packing=True"):
        load(texts, samples=9, packing=False)


@pytest.mark.parametrize("part", ["calibration", "evaluation"])
def test_the_manual_is_cut_into_windows_whatever_is_done_with_documents(part):
    """It is one text: of documents there is no second one."""
    packed, alone = (load("pydoc", part=part, packing=packing) for packing in (True, False))
    assert packed.fingerprint == alone.fingerprint


def test_what_separates_documents_is_in_the_windows_and_in_the_protocol():
    texts = [f"{i:03}" for i in range(40)]
    for separator, text, words in (
        (None, "\n\n", "a blank line"),
        (" | ", " | ", "' | '"),
        ("eos", "</s>", "</s>"),
    ):
        found = load(texts, samples=1, document_separator=separator, seed=5)
        assert f"documents separated by {words}" in found.protocol
        pieces = TOKENIZER(text.join(texts) + (text if separator == "eos" else ""))["input_ids"]
        windows = torch.tensor(pieces[: len(pieces) // 16 * 16]).view(-1, 16)
        order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(5))
        assert torch.equal(ids(found), windows[order[:1]])


def test_a_mixture_has_exact_shares_in_a_seeded_order(text_file, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": "z" * 40}) + "\n" for _ in range(20)))
    weights = {str(rows): 2, str(text_file): 1, "self": 1}
    found = load(weights, samples=9)
    kinds = [
        "z" if (row == ord("z") - 33).float().mean() > 0.5 else "self" if row[0] == 256 else "text"
        for row in ids(found)
    ]
    assert sorted(kinds) == ["self"] * 2 + ["text"] * 2 + ["z"] * 5
    assert kinds != sorted(kinds)
    assert found.fingerprint == load(weights, samples=9, batch_size=3).fingerprint
    assert found.fingerprint != load(weights, samples=9, seed=1).fingerprint
    assert f"5 of rows.jsonl, 2 of {text_file.name}, 2 of the model's own text" in found.source
    assert f"weights {Path(rows).name}=2, {Path(text_file).name}=1, self=1" in found.protocol
    assert str(tmp_path) not in found.protocol


def test_a_mixture_names_the_data_sets_of_the_hub_in_it():
    row = {"input_ids": torch.arange(4)}
    parts = {name: Drawn([row], name, "", dataset_id=of) for name, of in (("a", "x/a"), ("b", None), ("c", "x/a"))}
    drawn = mixed(parts, dict.fromkeys(parts, 1), seed=0)
    read = from_rows(drawn.rows, 1, 0, **drawn.described()).describe()
    assert (read["dataset_id"], read["mixed_ids"]) == (None, ["x/a"])


def test_a_mixture_of_chats_and_text_counts_all_of_the_text(text_file):
    # A dataset has no name, so the mixture is of files.
    path = text_file.parent / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": CHAT}) + "\n" for _ in range(8)))
    found = load(
        {str(path): 1, str(text_file): 1}, samples=8, length=64, assistant_only_loss=True, tokenizer=chatting(CHATML)
    )
    shares = torch.cat([(batch["labels"] != -100).float().mean(1) for batch in found])
    assert sorted((shares == 1).tolist()) == [False] * 4 + [True] * 4
    assert (shares > 0).all()
    assert found.protocol.count("the loss is over the assistant's tokens alone") == 1
    assert found.protocol.count("all tokens count, for these are no chats") == 1


def test_an_evaluation_on_text_of_a_model_that_is_calibrated_on_chats_counts_all_tokens_and_says_so(text_file):
    found = load(text_file, samples=2, part="evaluation", assistant_only_loss=True)
    assert torch.equal(ids(found), ids(load(text_file, samples=2, part="evaluation")))
    assert not any("labels" in batch for batch in found)
    assert found.protocol.endswith("; all tokens count, for these are no chats")


@pytest.mark.parametrize(
    ("source", "options", "holds"),
    [
        ("self", {}, "the model's own text is none"),
        ({"self": 1, "pydoc": 1}, {}, "own text is none and pydoc .* holds texts"),
        (Dataset.from_dict({"input_ids": [[1, 2, 3]]}), {}, "a Dataset holds token ids"),
        ([{"input_ids": torch.ones(1, 4).long()}], {}, "batches have their labels already"),
        ("pydoc", {"part": "evaluation", "is_alone": True}, "holds texts"),
    ],
    ids=["own text", "mixture", "tokenised", "batches", "nothing else is read"],
)
def test_the_assistants_tokens_are_asked_for_where_there_is_a_chat(source, options, holds):
    with pytest.raises(ValueError, match=f"assistant_only_loss=True .* is for chats.*{holds}"):
        load(source, samples=2, assistant_only_loss=True, **options)


def test_mixtures_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd=2").write_text("a file of that name")
    assert mixture(["pydoc"]) == "pydoc"
    assert mixture(["a.jsonl=2", "pydoc=1"]) == {"a.jsonl": 2, "pydoc": 1}
    assert mixture(["a.jsonl", "b.jsonl"]) == {"a.jsonl": 1, "b.jsonl": 1}
    assert mixture(["odd=2"]) == "odd=2"
    with pytest.raises(ValueError, match="'a' is named twice"):
        mixture(["a=1", "a=2"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text_column": "a", "text_template": "{b}"}, "both say what the text is"),
        ({"text_template": "no columns"}, "must name columns in braces"),
        ({"text_template": "{a"}, "is no template"),
        ({"text_template": "{}"}, "without a column's name"),
        ({"packing": False, "document_separator": "eos"}, "document_separator='eos' has no effect here"),
        ({"packing": "yes"}, "packing must be True or False, got 'yes'"),
        ({"text_column": 3}, "text_column must be a text, got 3"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        GradProbeConfig(**options)


@pytest.mark.parametrize("options", [{"text_column": "body"}, {"text_template": "Q: {body}"}], ids=str)
def test_a_column_of_texts_that_have_none_is_refused(options, tmp_path, capsys):
    """It would be ignored, and the card would say otherwise."""
    (tmp_path / "plain.txt").write_text("Some text. " * 400)
    ((name, _),) = options.items()
    model, plain = cases.build("llama"), str(tmp_path / "plain.txt")
    for texts in ({"calibration": plain}, {"calibration": ["some text"] * 9, "evaluation": "pydoc"}, {}):
        with pytest.raises(ValueError, match=rf"{name}=.* has no effect here: .* plain text has none"):
            prune_pretrained(model, GradProbeConfig(**options), processing_class=TOKENIZER, **texts)
    with pytest.raises(ValueError, match=rf"plain text has none \({plain}, pydoc\)"):
        recover_pretrained(model, cases.build("llama"), RecoveryConfig(**options), text=plain, evaluation="pydoc")
    model.save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    flag = name.replace("_", "-")
    assert main(["evaluate", str(tmp_path / "model"), "--data", plain, f"--{flag}", options[name]]) == 1
    assert "has no effect here" in capsys.readouterr().err


def test_a_mixture_needs_columns_in_one_of_its_texts(tmp_path):
    rows = [{"body": "Of plain sentences this is one. " * 20}] * 8
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "plain.txt").write_text("Some text. " * 400)
    texts = {str(tmp_path / "rows.jsonl"): 1, str(tmp_path / "plain.txt"): 1}
    found = cases.prune(
        cases.build("llama"), texts, text_column="body", num_samples=4, sequence_length=16, processing_class=TOKENIZER
    )
    assert "rows.jsonl" in found.report.calibration["source"]


def test_a_text_that_begins_with_bos_has_one():
    """As `apply_chat_template(..., tokenize=False)` renders chats."""
    tokenizer = chatting(WITH_BOS, begins="<s> $A")
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert rendered.startswith("<s>")
    rows = Dataset.from_dict({"text": [rendered, "It is plain, this one."]})
    found = load(rows, samples=2, packing=False, length=48, tokenizer=tokenizer)
    rows = [pair for one in found for pair in zip(one["input_ids"], one["attention_mask"], strict=True)]
    texts = [tokenizer.decode(row[mask == 1]) for row, mask in rows]
    assert all(text.startswith("<s>") and not text.startswith("<s><s>") for text in texts)
    assert len(texts) == 2


@pytest.mark.parametrize(
    ("names", "calibration", "evaluation"),
    [
        (("train.txt", "test.txt"), ["train"], ["test"]),
        (("train-00000-of-00002.txt", "train-00001-of-00002.txt", "dev.txt"), ["train", "train"], ["dev"]),
        (("train/a.txt", "valid/b.txt", "test/c.txt"), ["train"], ["test"]),
        (("TRAIN_1.txt", "Val.txt"), ["TRAIN"], ["Val"]),
        (("data_train.txt", "data_test.txt"), ["data_train"], ["data_test"]),
        (("train_data.txt", "x-testing.txt"), ["train_data"], ["x-testing"]),
        (("constrain.txt", "contest.txt"), ["constrain", "contest"], ["constrain", "contest"]),
        (("training.txt", "trainers.txt"), ["training", "trainers"], ["training", "trainers"]),
        (("train.txt",), ["train"], ["train"]),
        (("a.txt", "b.txt"), ["a", "b"], ["a", "b"]),
    ],
)
def test_splits_of_a_folder_are_read_apart(names, calibration, evaluation, tmp_path):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    for part, wanted in (("calibration", calibration), ("evaluation", evaluation)):
        found = [row["text"] for row in sources.open_source(str(tmp_path), part, 0).rows]
        assert len(found) == len(wanted)
        assert all(any(text.startswith(one) for text in found) for one in wanted)


def test_a_file_beside_splits_is_a_question(tmp_path):
    for name in ("train.txt", "test.txt", "more.txt"):
        (tmp_path / name).write_text(name)
    with pytest.raises(ValueError, match=r"holds train.txt and test.txt, which are splits, beside more.txt, of which"):
        sources.open_source(str(tmp_path), "calibration", 0)


@pytest.mark.parametrize("evaluation", [None, Dataset.from_dict(COLUMNS)], ids=["held out", "named"])
def test_an_example_of_a_text_that_is_not_on_the_hub_is_in_no_file(evaluation, tmp_path):
    rows = Dataset.from_dict(COLUMNS)
    config = GradProbeConfig(
        preset="fast", num_samples=2, sequence_length=16, text_template="Q: {question} A: {answer}"
    )
    result = prune_pretrained(
        cases.build("llama"),
        config,
        calibration=rows,
        evaluation=evaluation,
        processing_class=cases.tokenizer(),
        progress=False,
    )
    assert result.report.calibration["example"] == result.report.evaluation["example"] == "Q: Why? A: Because."
    result.save_pretrained(tmp_path / "out")
    for name in ("README.md", "gradprobe_report.json"):
        text = (tmp_path / "out" / name).read_text()
        assert "Because" not in text
        assert result.report.calibration["fingerprint"][:16] in text


@pytest.mark.parametrize("name", ["x[1].jsonl", "x?.jsonl", "x*.jsonl"])
def test_a_file_is_read_and_none_that_its_name_would_match(name, tmp_path):
    (tmp_path / name).write_text('{"text": "This one."}\n')
    (tmp_path / "x1.jsonl").write_text('{"text": "Another."}\n')
    assert [row["text"] for row in sources.open_source(str(tmp_path / name), "calibration", 0).rows] == ["This one."]


@pytest.mark.parametrize("form", ["arrow", "pandas", "numpy", "torch"])
def test_a_data_set_is_read_whatever_its_format(form):
    data = Dataset.from_list([{"messages": CHAT}] * 2)
    found = load(data.with_format(form), samples=2, packing=False, tokenizer=chatting(CHATML))
    plain = load(data, samples=2, packing=False, tokenizer=chatting(CHATML))
    assert all(
        torch.equal(one["input_ids"], other["input_ids"]) for one, other in zip(found.items, plain.items, strict=True)
    )
