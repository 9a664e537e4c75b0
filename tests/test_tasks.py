"""Every task, from rows of a data set to a pruned model with its metric; and what cannot be read is said."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from datasets import ClassLabel, Dataset, Features, List, Value
from PIL import Image
from transformers import BertForQuestionAnswering

from gradprobe_hf.data import sources
from gradprobe_hf.data.batches import from_iterable, shared_rows
from gradprobe_hf.data.labelled import TaskOptions
from gradprobe_hf.data.windows import TextOptions, WindowSpec, load_batches
from gradprobe_hf.tasks.columns import LabelNames
from gradprobe_hf.tasks.table import task_of_class
from tests import cases, labelled
from tests.architectures import ARCHITECTURES
from tests.labelled import CASES, batches

FEW = {"num_samples": 4, "batch_size": 2, "sparsity": 0.5}
SHORT = 4  # tokens, fewer than any text here has


@pytest.mark.parametrize("name", CASES)
def test_rows_of_every_task_prune_its_model(name):
    case, model = CASES[name], labelled.build(name)
    result = cases.prune(
        model,
        case.rows(),
        evaluation=case.rows(),
        processing_class=case.processor(),
        apply=True,
        sparsity=0.5,
        num_samples=4,
        evaluation_samples=4,
        sequence_length=None if name in ("vit", "wav2vec2", "recordings") else 32,
        batch_size=2,
    )
    report = result.report
    assert sum(int((target.matrix(model) == 0).sum()) for target in result.targets) == report.zeros
    assert report.sparsity == pytest.approx(0.5, abs=1e-3)
    assert report.model["task"] == case.task
    metric = report.evaluation["metric"]
    assert (metric and metric["name"]) == case.metric


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"llava"}))  # of a text without an image windows are cut
def test_a_length_that_cuts_nothing_is_refused(name):
    model, rows, processor = labelled.build(name), CASES[name].rows(), CASES[name].processor()
    shapes = []
    for length in (32, SHORT):
        items = batches(name, length=length).items
        shapes.append([{key: value.shape for key, value in batch.items()} for batch in items])
    prune = partial(cases.prune, model, rows, processing_class=processor, **FEW, sequence_length=SHORT)
    if shapes[0] != shapes[1]:
        prune()
    else:
        with pytest.raises(ValueError, match=f"sequence_length={SHORT} has no effect here: for .* no text is cut"):
            prune()


def test_texts_are_padded_and_have_the_class_of_their_row():
    found = batches("bert", samples=8, batch_size=4)
    reference = labelled.CASES["bert"].rows().shuffle(seed=0)
    words = labelled.tokenizer()
    assert torch.cat([batch["labels"] for batch in found]).tolist() == reference["label"][:]
    for batch, start in zip(found, (0, 4), strict=True):
        encoded = words(reference["sentence"][start : start + 4])["input_ids"]
        for row, wanted, mask in zip(batch["input_ids"], encoded, batch["attention_mask"], strict=True):
            assert row[mask.bool()].tolist() == wanted
            assert (row[~mask.bool()] == 258).all()
    assert "sentence, label" in found.protocol
    assert found.tokens == sum(len(one) for one in words(reference["sentence"][:])["input_ids"])


def test_labels_by_name_find_the_models_own_numbers():
    """A data set that numbers the same labels in another order, as MNLI and many models of it do."""
    names = ["positive", "Negative", "neutral"]
    rows = Dataset.from_dict(
        {"text": list("abcdef"), "label": [0, 1, 2, 0, 1, 2]},
        features=Features({"text": Value("string"), "label": ClassLabel(names=names)}),
    )
    by_number = batches("bert", rows, samples=6)
    assert "matched to the model's by name" in by_number.protocol
    named = Dataset.from_dict({"text": list("abcdef"), "tag": [names[label] for label in rows["label"]]})
    by_name = batches("bert", named, samples=6, label_column="tag")
    wanted = [labelled.LABELS[names[label].lower()] for label in rows.shuffle(seed=0)["label"]]
    for found in (by_number, by_name):
        assert torch.cat([batch["labels"] for batch in found]).tolist() == wanted


@pytest.mark.parametrize(
    ("stored", "known", "message"),
    [
        (["pos", "neg"], ["NEGATIVE", "POSITIVE"], None),  # matched: each is the beginning of one
        (["0", "1"], ["NEGATIVE", "POSITIVE"], None),
        (["bad", "good"], ["LABEL_0", "LABEL_1"], None),
        (["bad", "good"], ["NEGATIVE", "POSITIVE"], "calls its labels 'bad', 'good', and the model 'NEGATIVE', 'POS"),
        (["neg", "good"], ["NEGATIVE", "POSITIVE"], "which is which"),
        (["1", "0", "10"], ["cat", "dog", "hen"], "which is which"),  # in the order of text: no numbers of the model's
    ],
)
def test_names_of_labels_that_are_not_the_models_are_no_numbers_of_its(stored, known, message):
    ids = {name: number for number, name in enumerate(known)}
    if message is not None:
        with pytest.raises(ValueError, match=message):
            LabelNames(ids, len(ids), tuple(stored))
        return
    names = LabelNames(ids, 2, tuple(stored))
    assert names.renumbered == (stored[0] == "pos")
    assert names.number(0, "row 1") == int(names.renumbered)


IMAGENET = [
    "tench, Tinca tinca",
    "tabby, tabby cat",
    "Egyptian cat",
    "catamaran",
    "dogsled, dog sled",
    "hotdog, hot dog",
]


def test_the_beginning_of_a_name_tells_a_class_only_where_each_has_its_partner():
    """A folder of cats was taken for one of catamarans."""
    ids = {name: number for number, name in enumerate(IMAGENET)}
    with pytest.raises(ValueError, match=r"calls its labels 'cat', 'dog', and the model .* which is which"):
        LabelNames(ids, 6, ("cat", "dog"))
    words = LabelNames(ids, 6, ("hot dog", "tench", "catamaran"))
    assert [words.number(stored, "row 1") for stored in range(3)] == [5, 0, 3]
    assert words.in_other_words == {"hot dog": "hotdog, hot dog", "tench": "tench, Tinca tinca"}


def test_classes_that_are_called_by_numbers_go_by_these(caplog):
    """`datasets` sorts folders 1 to 10 as text: 10 was taken for 2 stars."""
    sorted_as_text = tuple(sorted(map(str, range(1, 11))))
    stars = LabelNames({f"{number} stars": number - 1 for number in range(1, 11)}, 10, sorted_as_text)
    assert [stars.number(place, "row 1") + 1 for place in range(10)] == list(map(int, sorted_as_text))
    model = labelled.build("bert")
    model.config.id2label = {number: f"LABEL_{number}" for number in range(11)}
    model.config.label2id = {name: number for number, name in model.config.id2label.items()}
    model.config.num_labels = 11
    for names, is_told in ((sorted(map(str, range(11))), True), ([f"{number:02}" for number in range(11)], False)):
        caplog.clear()
        features = Features({"text": Value("string"), "label": ClassLabel(names=names)})
        batches(
            "bert", Dataset.from_dict({"text": list("abcd"), "label": [0, 1, 2, 3]}, features=features), model=model
        )
        assert ("in the order of text: '10' is label 2, and so it is taken" in caplog.text) == is_told


@pytest.mark.parametrize("back", [None, {}, {"LABEL_0": 0, "LABEL_1": 1}, {"neg": 0, "pos": 1}], ids=str)
def test_names_that_a_model_shows_are_its_names(back):
    """`from_pretrained(..., id2label=...)` leaves `label2id` as transformers makes it up: classes came out reversed."""
    model = labelled.build("bert")
    model.config.id2label, model.config.label2id = {0: "NEGATIVE", 1: "POSITIVE"}, back
    rows = Dataset.from_dict(
        {"text": list("abcd"), "label": [0] * 4},
        features=Features({"text": Value("string"), "label": ClassLabel(names=["pos", "neg"])}),
    )
    named = Dataset.from_dict({"text": list("abcd"), "label": ["POSITIVE"] * 4})
    for given in (rows, named):
        assert torch.cat([batch["labels"] for batch in batches("bert", given, model=model)]).tolist() == [1] * 4
    model.config.label2id = {"NEGATIVE": 1, "POSITIVE": 0}
    with pytest.raises(ValueError, match="calls label 0 'NEGATIVE' in id2label, and label 1 in label2id"):
        batches("bert", rows, model=model)


def test_letters_of_either_case_may_be_classes_of_their_own():
    names = LabelNames({"a": 0, "B": 1, "A": 2, "b": 3}, 4, ("A", "a", "B", "b"))
    assert [names.number(stored, "row 1") for stored in range(4)] == [2, 0, 1, 3]


def test_measures_that_are_all_the_same_are_those_of_a_split_without_any():
    """STS-B's test split has -1 for each row: the loss would be a distance to that."""
    model = labelled.build("bert")
    model.config.num_labels = 1
    rows = Dataset.from_dict({"text": [f"row {number}" for number in range(20)], "label": [-1.0] * 20})
    with pytest.raises(ValueError, match=r"all 16 rows have the label -1\.0, .* seem not to be published"):
        batches("bert", rows, model=model, samples=16)
    assert batches("bert", rows, model=model, samples=8)  # so few may be the same by chance


def test_numerals_are_the_names_that_begin_with_them():
    names = LabelNames({f"{stars} star{'s' * (stars > 1)}": stars - 1 for stars in range(1, 6)}, 5)
    assert [names.number(str(stars), "row 1") for stars in range(1, 6)] == list(range(5))
    assert names.number(1, "row 1") == 1
    with pytest.raises(ValueError, match="row 1 has label 6, and the model has 5"):
        names.number("6", "row 1")


@pytest.mark.parametrize(("name", "columns"), [("t5", ["input_ids", "labels"]), ("bert", ["input_ids", "label"])])
def test_a_tokenised_dataset_works_as_it_is(name, columns):
    case = CASES[name]
    words = case.processor()
    plain = labelled.classified()
    targets = {"label": plain["label"], "labels": words(plain["sentence"][:])["input_ids"]}
    values = {"input_ids": words(plain["sentence"][:])["input_ids"]} | targets
    rows = Dataset.from_dict({column: values[column] for column in columns} | {"idx": list(range(len(plain)))})
    found = batches(name, rows, samples=8, batch_size=3)
    order = rows.shuffle(seed=0)
    labels = [row.tolist() for batch in found for row in batch["labels"]]
    if name == "bert":
        assert labels == order["label"][:]
    else:
        assert [[token for token in row if token != -100] for row in labels] == order["labels"][:]
    result = cases.prune(labelled.build(name), rows, processing_class=words, num_samples=8, batch_size=3)
    assert result.report.sparsity == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("prepared", [True, False], ids=["tokens", "texts"])
def test_rows_with_several_labels_have_a_number_for_each(prepared):
    """Whole numbers, as tables have them, though the loss takes fractions."""
    model, words = labelled.build("bert"), labelled.tokenizer()
    several = [[number % 2, 1, 0] for number in range(4)]
    given = {"input_ids": words(labelled.texts(4))["input_ids"]} if prepared else {"text": labelled.texts(4)}
    rows = Dataset.from_dict(given | {"labels": several})
    with pytest.raises(ValueError, match=r"problem_type='multi_label_classification'"):
        batches("bert", rows, model=model)
    model.config.problem_type = "multi_label_classification"
    found = batches("bert", rows, model=model)
    labels = torch.cat([batch["labels"] for batch in found])
    assert labels.dtype == torch.float32
    assert labels.tolist() == rows.shuffle(seed=0)["labels"][:]
    assert model(**found.items[0]).loss.isfinite()
    for wrong in ([0, 1], ["a", "b"], [0, 2, 1]):
        with pytest.raises(ValueError, match=r"needs 3 numbers: for each label 1 where it is the row's"):
            batches("bert", Dataset.from_dict(given | {"labels": [wrong] * 4}), model=model)


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        ([1, 0, 0], [0, 0, 1]),  # for each of the data set's labels
        ([0], [0, 0, 1]),  # the numbers of the row's classes, as many as it has
        ([2, 0], [1, 0, 1]),
        ([], [0, 0, 0]),
        ([2, 1, 0], [1, 1, 1]),
    ],
    ids=str,
)
def test_several_labels_with_names_find_the_models_own(stored, wanted):
    model = labelled.build("bert")
    model.config.problem_type = "multi_label_classification"
    assert labelled.LABELS == {"negative": 0, "neutral": 1, "positive": 2}
    names = List(ClassLabel(names=["positive", "neutral", "negative"]))
    features = Features({"text": Value("string"), "labels": names})
    rows = Dataset.from_dict({"text": list("abcd"), "labels": [stored] * 4}, features=features)
    found = batches("bert", rows, model=model)
    assert "labels matched to the model's by name" in found.protocol
    assert torch.cat([batch["labels"] for batch in found]).tolist() == [wanted] * 4


def test_two_of_two_labels_or_one_of_them_is_not_guessed():
    model = labelled.build("bert")
    config = model.config
    config.problem_type, config.id2label, config.label2id = "multi_label_classification", {0: "a", 1: "b"}, None
    features = Features({"text": Value("string"), "labels": List(ClassLabel(names=["a", "b"]))})
    rows = Dataset.from_dict({"text": list("abcd"), "labels": [[0, 1]] * 4}, features=features)
    with pytest.raises(ValueError, match=r"a row has the labels \[0, 1\]: whether both are the row's, or one of two"):
        batches("bert", rows, model=model)


def test_a_text_and_its_pair_are_both_read():
    rows = Dataset.from_dict({"text": ["one"] * 4, "text_pair": ["two"] * 4, "label": [0] * 4})
    found = batches("bert", rows)
    assert "(text, text_pair, label)" in found.protocol
    assert found.items[0]["input_ids"][0].tolist() == labelled.tokenizer()("one", "two")["input_ids"]


@pytest.mark.parametrize("begins", [True, False])
def test_a_prefix_of_the_task_that_no_row_has_is_told(begins, caplog):
    model = labelled.build("t5")
    model.config.task_specific_params = {"summarization": {"prefix": "summarize: "}}
    texts = ["summarize: a text" if begins else "a text"] * 4
    batches("t5", Dataset.from_dict({"text": texts, "target": ["b"] * 4}), model=model)
    assert ('no row begins with one: --text-template "summarize: {column}"' in caplog.text) is not begins


@pytest.mark.parametrize(
    ("beside", "options", "told"),
    [
        ({"title": "what it is about"}, {}, True),
        ({"title": "what it is about"}, {"text_column": "content"}, False),
        ({"title": "what it is about"}, {"text_template": "{title} {content}"}, False),
        ({"kind": "Books", "url": "a b c d"}, {}, False),
        ({"label_text": "it is very bad", "date": "Mon Apr 06 22:19:45 2009", "part": "text of words"}, {}, False),
        ({"title": None}, {}, False),
    ],
    ids=["unread", "one named", "both read", "no text", "nothing more", "nothing"],
)
def test_text_that_is_not_read_is_told(beside, options, told, caplog):
    row = {"content": "a text of words", "label": 0} | beside
    batches("bert", Dataset.from_list([row] * 4), **options)
    found = "read from 'content' alone, not from 'title': --text-template '{title} {content}' gives the model all of it"
    assert (found in caplog.text) is told
    assert ("--text-template" in caplog.text) is told


UNREAD = {
    "question-answering": (
        lambda: BertForQuestionAnswering(labelled.build("bert").config),
        {"id": ["a"], "context": ["b"], "question": ["c"], "answers": [{"text": ["b"], "answer_start": [0]}]},
        "'input_ids', 'start_positions' and 'end_positions'",
    ),
    "image-segmentation": (
        lambda: next(one for one in ARCHITECTURES if one.name == "SegFormer").build(),
        {"image": [Image.new("RGB", (8, 8))], "label": [Image.new("L", (8, 8))]},
        "'pixel_values', .* and 'labels', a class for each pixel",
    ),
}


@pytest.mark.parametrize("task", UNREAD)
def test_rows_of_which_nothing_is_made_say_what_is_needed(task):
    make, columns, needed = UNREAD[task]
    model = make()
    found = task_of_class(type(model).__name__)
    assert found.name == task
    options = {"part": "calibration", "model": model, "processing_class": None, "task": TaskOptions(found)}
    with pytest.raises(ValueError, match=rf"prepare rows that hold {needed} \(dataset\.map\), or give batches"):
        load_batches(Dataset.from_dict(columns), WindowSpec(1, 8, 1), **options)


def test_the_tokens_of_a_stream_that_was_mapped_win_over_its_text():
    words = labelled.tokenizer()
    plain = labelled.classified().to_iterable_dataset()
    mapped = plain.map(lambda row: {"input_ids": words("prefix: " + row["sentence"])["input_ids"]})
    assert mapped.column_names is None
    (batch, _) = batches("bert", mapped)
    assert words.decode(batch["input_ids"][0]).startswith("prefix: ")
    assert "tokenised rows" in batches("bert", mapped).protocol


@pytest.mark.parametrize("prepared", [False, True])
def test_a_stream_that_is_sorted_by_class_is_mixed_or_warned_of(prepared, monkeypatch, caplog):
    columns = {"sentence": ["a text"] * 5000, "label": [0] * 2500 + [1] * 2500}
    columns |= {"input_ids": [[1, 2, 3]] * 5000} if prepared else {}
    stream = Dataset.from_dict(columns).to_iterable_dataset()
    found = batches("bert", stream, samples=64)
    assert 16 < sum(int(batch["labels"].sum()) for batch in found) < 48
    assert "drawn with seed 0 from 10,000 rows at a time of a stream" in found.protocol
    assert not caplog.text
    monkeypatch.setattr(sources, "SHUFFLE_BUFFER", 100)
    batches("bert", stream, samples=64)
    assert "all 64 rows that were drawn of this stream have the label 0, as if it were sorted" in caplog.text
    caplog.clear()
    batches("bert", stream, samples=8)
    batches("bert", Dataset.from_dict({name: values[:64] for name, values in columns.items()}), samples=64)
    assert not caplog.text


def test_the_first_token_of_each_word_has_its_label():
    rows = Dataset.from_dict({"tokens": [["Ada", "in", "Rome"]], "labels": [["B-PER", "O", "B-LOC"]]})
    (batch,) = batches("tags", rows, samples=1)
    ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    words = labelled.word_tokenizer()
    pieces = [words([word], is_split_into_words=True)["input_ids"] for word in ("Ada", "in", "Rome")]
    assert ids == [token for piece in pieces for token in piece]
    wanted = [[label, *[-100] * (len(piece) - 1)] for piece, label in zip(pieces, (1, 0, 2), strict=True)]
    assert labels == [label for one in wanted for label in one]


@pytest.mark.parametrize(
    ("name", "columns", "read"),
    [
        ("bert", ("premise", "hypothesis", "source", "label"), "premise, hypothesis, label"),
        ("bert", ("question1", "question2", "text", "label"), "question1, question2, label"),
        ("bert", ("id", "tweet", "label"), "tweet, label"),
        ("t5", ("source", "article", "highlights"), "article, highlights"),
        ("t5", ("source", "target"), "source, target"),
    ],
)
def test_the_text_of_a_row_is_found_beside_what_says_where_it_is_from(name, columns, read):
    values = {column: [f"{column} {number}" for number in range(4)] for column in columns} | {"label": [0, 1, 2, 0]}
    rows = Dataset.from_dict({column: values[column] for column in columns})
    assert f"({read})" in batches(name, rows).protocol


def test_padding_decides_no_mask():
    rows = Dataset.from_dict({"text": ["word " * count for count in (1, 6, 4, 2)]})
    found = [batches("masked", rows, batch_size=size, packing=False) for size in (1, 2, 4)]
    labels = [[one[one != -100].tolist() for batch in made for one in batch["labels"]] for made in found]
    assert labels[0] == labels[1] == labels[2]


def test_what_is_named_is_read_though_tokens_and_labels_stand_beside_it():
    columns = {"input_ids": [[7, 7, 7]] * 4, "label": [0] * 4, "other": [2, 1, 2, 1], "sentence": ["abc"] * 4}
    rows = Dataset.from_dict(columns)
    found = batches("bert", rows, label_column="other")
    assert sorted(torch.cat([one["labels"] for one in found]).tolist()) == [1, 1, 2, 2]
    assert (torch.cat([one["input_ids"] for one in found]) == 7).all()
    words = batches("bert", rows, label_column="other", text_column="sentence")
    assert not (torch.cat([one["input_ids"] for one in words]) == 7).any()
    with pytest.raises(ValueError, match="there is no such column"):
        batches("bert", rows, label_column="nothing")


def test_two_texts_with_the_same_labels_of_words_are_two():
    labels = torch.ones(1, 6, dtype=torch.long)
    one, other = (
        from_iterable([{"input_ids": torch.arange(6)[None] + shift, "labels": labels}], "x") for shift in (0, 7)
    )
    assert shared_rows(one, other) == 0
    assert shared_rows(one, one) == 1


def test_tokens_are_masked_as_bert_was_trained():
    reader_model, rows = labelled.build("masked"), Dataset.from_dict({"text": ["many words " * 4000]})
    found, other = (
        load_batches(
            rows,
            WindowSpec(200, 64, batch_size),
            part="calibration",
            model=reader_model,
            processing_class=labelled.tokenizer(),
            task=TaskOptions(task_of_class("BertForMaskedLM")),
        )
        for batch_size in (8, 3)
    )
    assert found.fingerprint == other.fingerprint
    plain = load_batches(
        rows,
        WindowSpec(200, 64, 8),
        part="calibration",
        model=reader_model,
        processing_class=labelled.tokenizer(),
    )
    ids, labels = (torch.cat([batch[name] for batch in found]) for name in ("input_ids", "labels"))
    original = torch.cat([batch["input_ids"] for batch in plain])
    hidden = labels != -100
    assert torch.equal(ids[~hidden], original[~hidden])
    assert torch.equal(labels[hidden], original[hidden])
    assert hidden.any(1).all()
    assert float(hidden.float().mean()) == pytest.approx(0.15, abs=0.01)
    assert float((ids[hidden] == 259).float().mean()) == pytest.approx(0.8, abs=0.03)
    assert float((ids[hidden] == original[hidden]).float().mean()) == pytest.approx(0.1, abs=0.03)
    assert "masked with seed 0" in found.protocol


@pytest.mark.parametrize(
    ("name", "columns", "message"),
    [
        ("bert", {"sentence": ["a"] * 4, "stars": [1] * 4}, r"no column of labels.*sentence, stars.*--label-column"),
        ("bert", {"label": [1] * 4, "a": ["b"] * 4, "c": ["d"] * 4}, r"'a' and 'c' may be it.*--text-column"),
        ("bert", {"article": ["a"] * 4, "review": ["b"] * 4, "label": [1] * 4}, "'article' and 'review' may be it"),
        ("bert", {"id": ["a"] * 4, "label": [1] * 4, "dialog": [["b"]] * 4}, "a column of text, and there is none"),
        ("bert", {"text": ["a"] * 4, "label": [0.5] * 4}, "a label is a whole number or a name, got float"),
        ("bert", {"text": ["a"] * 4, "label": [7] * 4}, r"label 7, and the model has 3 labels, 0 to 2"),
        (
            "bert",
            {"text": ["a"] * 4, "label": ["great"] * 4},
            r"'great', which is none .*'negative' \(0\)",
        ),
        ("bert", {"text": ["a", None, "b", "c"], "label": [0] * 4}, "None where a text is needed"),
        ("bert", {"text": ["a"] * 4, "label": [0, None, 1, 1]}, "has no label"),
        ("bert", {"text": ["a"] * 2, "label": [0] * 2}, "holds 2 rows and 4 were asked for"),
        ("bert", {"input_ids": [[1]] * 4, "label": [9] * 4}, "label 9, and the model has 3 labels"),
        ("vit", {"picture": ["a.png"] * 4, "label": [0] * 4}, "a column of images, and there is none"),
        ("vit", {"image": ["no/such.png"] * 4, "label": [0] * 4}, "is no image"),
        ("whisper", {"text": ["a"] * 4}, "a column of audio, and there is none"),
        ("whisper", {"audio": [{"array": [0.1] * 9, "sampling_rate": 8000}] * 4, "text": ["a"] * 4}, "8000 Hz.*16000"),
        ("tags", {"tokens": [["a", "b"]] * 4, "labels": [[0]] * 4}, "a list of words and a label for each"),
        ("t5", {"text": ["a"] * 4}, "no column of labels"),
    ],
)
def test_rows_that_cannot_be_read_are_refused(name, columns, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        batches(name, Dataset.from_dict(columns))


def test_a_template_is_not_filled_with_nothing():
    """A row without a value would be calibrated on the word None."""
    rows = Dataset.from_dict({"a": ["one", None, "two", None], "label": [0, 1, 0, 1]})
    model, case = labelled.build("bert"), CASES["bert"]
    with pytest.raises(ValueError, match=r"the column 'a', which the template names, holds nothing"):
        load_batches(
            rows,
            WindowSpec(4, 32, 2, text=TextOptions(text_template="say {a}")),
            part="calibration",
            model=model,
            processing_class=case.processor(),
            task=TaskOptions(task_of_class(type(model).__name__)),
            progress=False,
        )


def test_a_decoder_that_classifies_needs_its_pad_token():
    model = labelled.build("llama")
    model.config.pad_token_id = None
    with pytest.raises(ValueError, match=r"no pad_token_id.*batch_size=1"):
        batches("llama", model=model)
    assert len(batches("llama", model=model, batch_size=1)) == 4


def test_rows_without_what_reads_them_are_refused():
    model = labelled.build("vit")
    with pytest.raises(ValueError, match=r"an image processor.*processing_class="):
        cases.prune(model, CASES["vit"].rows(), processing_class=cases.tokenizer(), num_samples=4)


def test_a_task_that_is_another_models_is_refused():
    with pytest.raises(ValueError, match=r"AutoModelForTokenClassification.*BertForSequenceClassification"):
        cases.prune(labelled.build("bert"), labelled.classified(), task="token-classification", num_samples=4)


@pytest.mark.parametrize(
    ("length", "said"), [(8, ", cut at 8 tokens, texts to write cut at 8 tokens"), (512, "seed 0")]
)
def test_texts_to_write_that_are_cut_are_told(length, said):
    assert batches("t5", length=length).protocol.endswith(said)


@pytest.mark.parametrize("glued", [True, False])
def test_words_without_blanks_are_warned_of(glued, caplog):
    batches("tags", processor=cases.tokenizer() if glued else labelled.word_tokenizer())
    assert ("add_prefix_space=True" in caplog.text) == glued
