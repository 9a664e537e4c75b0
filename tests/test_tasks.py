"""Every task, from rows of a data set to a pruned model with its metric; and what cannot be read is said."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Audio, ClassLabel, Dataset, Features, Value, concatenate_datasets
from PIL import Image
from tokenizers.processors import TemplateProcessing
from transformers import (
    ASTConfig,
    ASTFeatureExtractor,
    ASTForAudioClassification,
    BertForQuestionAnswering,
    GemmaConfig,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PaliGemmaProcessor,
    PreTrainedTokenizerFast,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
)
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from gradprobe_hf.data import sources
from gradprobe_hf.data.labelled import TaskOptions
from gradprobe_hf.data.windows import TextOptions, WindowSpec, load_batches
from gradprobe_hf.tasks.columns import LabelNames
from gradprobe_hf.tasks.media_batches import as_image
from gradprobe_hf.tasks.table import task_of_class
from tests import cases, labelled
from tests.architectures import ARCHITECTURES, GROUPED, VISION, byte_tokenizer

CASES = labelled.CASES
FEW = {"num_samples": 4, "batch_size": 2, "sparsity": 0.5}
SHORT = 4  # tokens, fewer than any text here has


def batches(
    name, rows=None, *, samples=4, length=32, batch_size=2, label_column=None, model=None, processor=None, **text
):
    case = CASES[name]
    model = model or labelled.build(name)
    return load_batches(
        case.rows() if rows is None else rows,
        WindowSpec(samples, length, batch_size, text=TextOptions(**text)),
        part="calibration",
        model=model,
        processing_class=processor or case.processor(),
        task=TaskOptions(task_of_class(type(model).__name__), label_column),
        progress=False,
    )


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
    ],
)
def test_names_of_labels_that_are_not_the_models_are_no_numbers_of_its(stored, known, message):
    ids = {name: number for number, name in enumerate(known)}
    if message is not None:
        with pytest.raises(ValueError, match=message):
            LabelNames(ids, 2, tuple(stored))
        return
    names = LabelNames(ids, 2, tuple(stored))
    assert names.renumbered == (stored[0] == "pos")
    assert names.number(0, "row 1") == int(names.renumbered)


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


def test_prepared_images_work_as_they_are():
    rows = Dataset.from_dict({"pixel_values": torch.randn(4, 3, 8, 8).tolist(), "labels": [0, 1, 2, 0]})
    found = batches("vit", rows)
    assert found.items[0]["pixel_values"].shape == (2, 3, 8, 8)
    assert sorted(torch.cat([batch["labels"] for batch in found]).tolist()) == [0, 0, 1, 2]


def test_speech_that_is_prepared_is_padded_as_its_extractor_does():
    """The loss of rows of unequal lengths is the same, whatever rows they are in a batch with."""
    config = labelled.build("wav2vec2").config
    config.ctc_loss_reduction, config.feat_extract_norm = "sum", "layer"  # as models that are trained with masks
    model = type(labelled.build("wav2vec2"))(config).eval()
    rows = Dataset.from_dict({"input_values": labelled._waves(8), "labels": [[5, 6], [7]] * 4, "idx": list(range(8))})
    together, alone = (batches("wav2vec2", rows, samples=8, batch_size=size, model=model) for size in (4, 1))
    assert [batch["attention_mask"].shape for batch in together] == [batch["input_values"].shape for batch in together]
    with torch.no_grad():
        losses = [sum(float(model(**batch).loss) for batch in found) for found in (together, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_padding_that_would_be_heard_is_refused():
    processor = CASES["wav2vec2"].processor()
    processor.feature_extractor.return_attention_mask = False  # as of models that were trained without masks
    rows = Dataset.from_dict({"input_values": labelled._waves(4), "labels": [[5, 6]] * 4})
    with pytest.raises(ValueError, match=r"input_values have unequal lengths.*batch_size=1"):
        batches("wav2vec2", rows, processor=processor)
    assert all("attention_mask" not in batch for batch in batches("wav2vec2", rows, processor=processor, batch_size=1))


def test_prepared_images_of_several_sizes_are_refused():
    rows = Dataset.from_dict({"pixel_values": [torch.zeros(3, 8, 8 + side).tolist() for side in range(4)]})
    with pytest.raises(ValueError, match=r"pixel_values of the shapes \(3, 8, \d+\) and \(3, 8, \d+\)"):
        batches("vit", rows.add_column("label", [0] * 4))


@pytest.mark.parametrize("has_mask", [True, False])
def test_recordings_are_heard_as_their_extractor_makes_them_one_by_one(has_mask, caplog):
    caplog.set_level("INFO")
    case, model = CASES["recordings"], labelled.build("recordings")
    extractor = case.processor()
    extractor.return_attention_mask = has_mask
    found = batches("recordings", samples=8, batch_size=4, processor=extractor)
    assert len(found) == (2 if has_mask else 8)  # without a mask padding would be heard
    assert ("they are read one by one" in caplog.text) == (not has_mask)
    expected = []
    for row in case.rows().shuffle(seed=0).select(range(8)):
        inputs = extractor(row["audio"], sampling_rate=16_000, return_tensors="pt")
        loss = torch.nn.functional.cross_entropy(model(**inputs).logits, torch.tensor([row["label"]]))
        expected.append(loss.item())
    losses = [model(**batch).loss.item() * len(batch["labels"]) for batch in found]
    assert sum(losses) == pytest.approx(sum(expected), rel=1e-5)


@pytest.mark.parametrize("streamed", [False, True])
def test_recordings_are_decoded_at_the_rate_that_the_model_hears(streamed, monkeypatch):
    """A library that decodes audio is not always there: this one hears a second of silence in every file."""

    def decoded(feature, value, **_):
        rate = feature.sampling_rate or 48_000  # the file's own
        samples = SimpleNamespace(data=torch.zeros(1, rate) + len(value["bytes"]), sample_rate=rate)
        return SimpleNamespace(get_all_samples=lambda: samples)

    monkeypatch.setattr(Audio, "decode_example", decoded)
    columns = {"audio": [{"bytes": b"0" * number, "path": None} for number in range(1, 5)], "label": [0, 1, 2, 0]}
    rows = Dataset.from_dict(columns).cast_column("audio", Audio())
    assert rows[0]["audio"].get_all_samples().sample_rate == 48_000
    found = batches("recordings", rows.to_iterable_dataset() if streamed else rows)
    assert [batch["input_values"].shape for batch in found] == [(2, 16_000)] * 2
    assert rows.features["audio"].sampling_rate is None, "the user's own stays as it is"


def test_recordings_that_are_filled_to_one_length_go_together():
    """AST's features are of as many frames, whatever is heard."""
    config = ASTConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_length=64,
        num_mel_bins=32,
        num_labels=3,
    )
    extractor = ASTFeatureExtractor(num_mel_bins=32, max_length=64)
    names = Features({"audio": [Value("float32")], "label": ClassLabel(names=["LABEL_2", "LABEL_0", "LABEL_1"])})
    rows = CASES["recordings"].rows().cast(names)
    found = batches("recordings", rows, model=ASTForAudioClassification(config).eval(), processor=extractor)
    assert [batch["input_values"].shape for batch in found] == [(2, 64, 32)] * 2
    taken = rows.shuffle(seed=0).select(range(4))
    assert torch.cat([batch["labels"] for batch in found]).tolist() == [(2, 0, 1)[label] for label in taken["label"]]
    alone = extractor(taken[0]["audio"], sampling_rate=16_000, return_tensors="pt")["input_values"][0]
    assert torch.equal(found.items[0]["input_values"][0], alone)


@pytest.mark.parametrize("seconds", [1.0, 1.5])
def test_speech_that_the_model_would_not_hear_the_end_of_is_refused(seconds):
    rows = Dataset.from_dict({"audio": [[0.1] * int(16_000 * seconds)] * 2, "text": ["all that is said"] * 2})
    if seconds == 1:  # as long as the extractor of these tests hears
        assert len(batches("whisper", rows, samples=2)) == 1
        return
    with pytest.raises(ValueError, match=r"lasts 1\.5 seconds, and the model hears 1 of them.*<= 16000\)"):
        batches("whisper", rows, samples=2)


PICTURE = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    "given",
    [
        PICTURE,
        PICTURE.tolist(),
        torch.from_numpy(PICTURE).permute(2, 0, 1),
        torch.from_numpy(PICTURE).permute(2, 0, 1) / 255,
        (PICTURE / 255).astype(np.float32),
    ],
    ids=["bytes", "lists", "channels first", "floats, channels first", "floats"],
)
def test_an_array_is_the_image_that_it_shows(given):
    assert np.array_equal(np.asarray(as_image(given)), PICTURE)


def test_images_in_another_form_than_the_models_are_turned_into_it():
    floats = Dataset.from_dict({"image": list(PICTURE[None].repeat(4, 0) / 255), "label": [0] * 4})
    wanted = Dataset.from_dict({"image": [Image.fromarray(PICTURE)] * 4, "label": [0] * 4})
    images = [batches("vit", rows).items[0]["pixel_values"] for rows in (floats.with_format("torch"), wanted)]
    assert torch.equal(*images)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (PICTURE.astype(np.float32), "float32 values from 0 to 249: give whole numbers from 0 to 255, or floats"),
        (PICTURE / 127.5 - 1, "float64 values from -1 to 0.95"),
        (PICTURE.astype(np.uint16) * 100, "uint16 values"),
        (np.zeros((4, 9, 7, 3)), r"an array of shape \[4, 9, 7, 3\]"),
    ],
)
def test_an_array_that_is_no_image_is_refused(array, message):
    with pytest.raises(ValueError, match=message):
        as_image(array)


def test_a_model_of_one_channel_sees_gray():
    model = labelled.build("vit")
    model.config.num_channels = 1
    gray = ViTImageProcessorPil(size={"height": 8, "width": 8}, image_mean=[0.5], image_std=[0.5])
    (batch, _) = batches("vit", model=model, processor=gray)
    assert batch["pixel_values"].shape == (2, 1, 8, 8)


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


def test_no_token_of_an_image_is_a_label():
    (batch, _) = batches("llava")
    image = batch["input_ids"] == cases.VOCABULARY
    assert image.sum(1).tolist() == [4, 4]
    assert (batch["labels"][image] == -100).all()
    assert torch.equal(batch["labels"] != -100, batch["attention_mask"].bool() & ~image)


SEEING = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{% for c in m.content %}"
    "{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}{% endfor %}</s>{% endfor %}"
)


def seeing(begins="<s> $A"):
    """LLaVA's processor with a chat template that writes the BOS, and a tokenizer that writes it, too."""
    processor = CASES["llava"].processor()
    processor.chat_template = SEEING
    processor.tokenizer.backend_tokenizer.post_processor = cases.tokenizer(begins).backend_tokenizer.post_processor
    return processor


ASKED = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat"}]
IN_PARTS = [
    {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "What?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "A cat"}]},
]
WITHOUT_A_PLACE = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "A cat"}]


@pytest.mark.parametrize(
    ("images", "chats", "system"),
    [
        ("image", {"conversations": ASKED}, ""),
        ("image", {"conversations": ASKED, "system": "Be brief."}, "[system]Be brief.</s>"),
        ("images", {"messages": IN_PARTS}, ""),
        ("image", {"dialog": WITHOUT_A_PLACE}, ""),
    ],
)
def test_a_chat_of_an_image_is_rendered_with_it(images, chats, system):
    pictures = CASES["llava"].rows()["image"][:4]
    pictures = [[one] for one in pictures] if images == "images" else pictures
    rows = Dataset.from_dict(
        {"id": list("abcd"), images: pictures} | {name: [value] * 4 for name, value in chats.items()}
    )
    processor = seeing()
    found = batches("llava", rows, processor=processor)
    said = processor.tokenizer.decode(found.items[0]["input_ids"][0]).replace("<image>" * 4, "<image>")
    assert said == f"<s>{system}[user]<image>What?</s>[assistant]A cat</s>"
    assert f"({images}, {next(iter(chats))})" in found.protocol
    assert found.items[0]["pixel_values"].shape[0] == 2


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"conversations": [ASKED]}, {"processor": None}, "holds chats, and this LlavaProcessor has no chat template"),
        ({"conversations": [ASKED], "answer": ["a"]}, {"label_column": "answer"}, "leave label_column unset"),
        ({"conversations": [ASKED * 2]}, {}, "has 1 images, and its text has places for 2"),
        ({"conversations": [ASKED], "system": [3]}, {}, "the column 'system' beside the messages"),
    ],
)
def test_a_chat_that_cannot_be_rendered_with_its_image_is_refused(columns, options, message):
    rows = Dataset.from_dict({"image": CASES["llava"].rows()["image"][:1]} | columns)
    with pytest.raises(ValueError, match=message):
        batches("llava", rows, samples=1, **{"processor": seeing(), **options})


def test_a_template_makes_the_text_beside_an_image():
    columns = {"image": CASES["llava"].rows()["image"][:2], "asked": ["What?"] * 2, "said": ["A cat"] * 2}
    rows, processor = Dataset.from_dict(columns), seeing()
    (batch,) = batches("llava", rows, samples=2, processor=processor, text_template="{asked} {said}.")
    said = processor.tokenizer.decode(batch["input_ids"][0]).replace("<image>" * 4, "<image>")
    assert said == "<s>[user]<image>What? A cat.</s>"


def paligemma():
    """A model whose processor has what is asked in front, as a prefix that it sees as a whole."""
    backend = byte_tokenizer().backend_tokenizer
    backend.post_processor = TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])
    words = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>", image_token="<image>"
    )
    images = SiglipImageProcessorPil(size={"height": 8, "width": 8})
    images.image_seq_length = 4
    processor = PaliGemmaProcessor(images, words)
    text = GemmaConfig(**GROUPED | {"vocab_size": len(words)}, head_dim=4)
    vision = SiglipVisionConfig(**VISION, vision_use_head=False)
    config = PaliGemmaConfig(
        text_config=text, vision_config=vision, image_token_id=words.image_token_id, projection_dim=16
    )
    torch.manual_seed(0)
    return PaliGemmaForConditionalGeneration(config).eval(), processor


def test_a_class_that_is_written_is_written_by_name():
    """An answer, or a text to write: "1" says nothing of a picture."""
    asked = {"question": ["What?"] * 2, "animal": [0, 1]}
    features = {"question": Value("string"), "animal": ClassLabel(names=["cat", "dog"])}
    named = Dataset.from_dict(asked, features=Features(features))
    images = Dataset.from_dict({"image": CASES["llava"].rows()["image"][:2]})
    given = {"text_column": "question", "label_column": "animal", "samples": 2}
    (batch,) = batches("llava", concatenate_datasets([images, named], axis=1), **given).items
    tokenizer = byte_tokenizer()
    told = {tokenizer.decode(ids[ids != -100], skip_special_tokens=True)[-3:] for ids in batch["labels"]}
    assert told == {"cat", "dog"}
    (batch,) = batches("t5", named, **given).items
    assert {tokenizer.decode(ids[ids != -100], skip_special_tokens=True) for ids in batch["labels"]} == {"cat", "dog"}
    heard = Dataset.from_dict({"audio": CASES["whisper"].rows()["audio"][:2]})
    spoken = concatenate_datasets([heard, named.select_columns(["animal"])], axis=1)
    (batch,) = batches("whisper", spoken, label_column="animal", samples=2).items
    assert {tokenizer.decode(ids[ids != -100], skip_special_tokens=True) for ids in batch["labels"]} == {"cat", "dog"}


@pytest.mark.parametrize("asked", [{"text": ["A cat", "Two"]}, {"asked": ["What?"] * 2, "said": ["A cat", "Two"]}])
def test_what_is_predicted_of_an_image_is_not_seen_before(asked):
    model, processor = paligemma()
    rows = Dataset.from_dict({"image": CASES["llava"].rows()["image"][:2]} | asked)
    labels = {"text_column": "asked", "label_column": "said"} if "said" in asked else {}
    (batch,) = batches("llava", rows, model=model, processor=processor, samples=2, **labels).items
    told = [ids[ids != -100] for ids in batch["labels"]]
    assert [processor.tokenizer.decode(ids) for ids in told] == [f"{one}</s>" for one in [*asked.values()][-1]]
    first = int((batch["labels"][1] != -100).nonzero()[0])
    other = batch | {"input_ids": batch["input_ids"].clone()}
    other["input_ids"][1, first:] = 65  # the answer
    with torch.no_grad():
        before, after = (model(**one).logits[1, first - 1] for one in (batch, other))
    torch.testing.assert_close(before, after)
    seen = batch | {"labels": batch["input_ids"].clone()}
    with pytest.raises(ValueError, match=r"token_type_ids are 0.*suffix"):
        cases.prune(model, [seen], processing_class=processor)


def test_a_text_of_an_image_begins_once():
    (batch, _) = batches("llava", processor=seeing())
    assert (batch["input_ids"] == 256).sum(1).tolist() == [1, 1]
    (plain, _) = batches("llava", processor=seeing(begins="$A"))
    assert torch.equal(batch["input_ids"], plain["input_ids"])


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


@pytest.mark.parametrize("size", [1, 4])
def test_a_text_of_an_image_is_the_same_in_batches_that_are_padded_on_the_left(size):
    """Its first token is predicted by nothing: not by the padding before it either."""
    processor, texts = (
        CASES["llava"].processor(),
        ["<image> a", "<image> a longer one", "<image> two", "<image> and so on"],
    )
    processor.tokenizer.backend_tokenizer.post_processor = cases.tokenizer("<s> $A").backend_tokenizer.post_processor
    processor.tokenizer.padding_side = "left"
    rows = Dataset.from_dict({"image": CASES["llava"].rows()["image"][:4], "text": texts})
    counted = [
        sum(
            int((batch["labels"][:, 1:] != -100).sum())
            for batch in batches("llava", rows, batch_size=n, processor=processor)
        )
        for n in (1, size)
    ]
    assert counted[0] == counted[1] > 0
    begins = cases.tokenizer().bos_token_id
    for batch in batches("llava", rows, batch_size=size, processor=processor):
        assert (batch["labels"][:, 1:] != begins).all()


def test_paths_of_images_beside_texts_are_images(tmp_path):
    path = tmp_path / "a.png"
    CASES["llava"].rows()["image"][0].save(path)
    rows = [{"image": str(path), "text": "<image> a cat"}] * 2
    assert all("pixel_values" in batch for batch in batches("llava", rows, samples=2))
    with pytest.raises(ValueError, match=r"b\.png' is no image: .*No such file"):
        batches("llava", [{"image": "b.png", "text": "<image> a cat"}] * 2, samples=2)


@pytest.mark.parametrize("layout", [None, "numpy", "torch"])
@pytest.mark.parametrize("column", ["image", "images"])
def test_arrays_beside_texts_are_images(column, layout):
    """A table has them as lists in lists, which nothing but the name of their column tells from other numbers."""
    rows = CASES["llava"].rows()
    arrays = [np.asarray(image) for image in rows["image"]]
    arrays = [[one] for one in arrays] if column == "images" else arrays
    given = Dataset.from_dict({column: arrays, "text": rows["text"]}).with_format(layout)
    assert batches("llava", given).fingerprint == batches("llava", rows).fingerprint


@pytest.mark.parametrize(("column", "nothing"), [("image", None), ("images", []), ("images", None)])
def test_texts_without_images_stand_among_those_with_one(column, nothing):
    """The first row is one of them: it does not make a text of all others."""
    rows = CASES["llava"].rows()
    pictures = [[image] if column == "images" else image for image in rows["image"]]
    given = Dataset.from_dict({column: [nothing, nothing, *pictures[2:]], "text": rows["text"]})
    found = batches("llava", given, samples=8, batch_size=1)
    assert sum("pixel_values" in batch for batch in found) == 6
    said = [CASES["llava"].processor().tokenizer.decode(batch["input_ids"][0]) for batch in found]
    assert sorted(one for one in said if "<image>" not in one) == rows["text"][:2]


def test_a_processor_without_tokens_of_the_text_is_refused():
    processor = CASES["llava"].processor()

    class TrOCR(type(processor)):
        def __call__(self, **asked):
            made = processor(**asked)
            return {"pixel_values": made["pixel_values"], "labels": made["input_ids"]}

    reading = TrOCR.__new__(TrOCR)
    reading.__dict__.update(processor.__dict__)
    with pytest.raises(ValueError, match=r"TrOCR makes pixel_values, labels .*and no 'input_ids'"):
        batches("llava", processor=reading)


def test_a_list_of_rows_with_images_is_rows():
    rows = CASES["vit"].rows()
    given = [{"image": image, "label": label} for image, label in zip(rows["image"], rows["label"], strict=True)]
    assert batches("vit", given).fingerprint == batches("vit", rows).fingerprint


def test_all_that_is_said_is_a_label_where_all_is_heard():
    """CTC aligns the labels with the whole recording."""
    rows = Dataset.from_dict({"audio": CASES["wav2vec2"].rows()["audio"][:2], "text": ["ab cd " * 9, "abc"]})
    (batch,) = batches("wav2vec2", rows, samples=2, length=8)
    assert sorted((batch["labels"] != -100).sum(1).tolist()) == [3, 54]


@pytest.mark.parametrize(
    ("length", "said"), [(8, ", cut at 8 tokens, texts to write cut at 8 tokens"), (512, "seed 0")]
)
def test_texts_to_write_that_are_cut_are_told(length, said):
    assert batches("t5", length=length).protocol.endswith(said)


def test_recordings_of_unequal_lengths_are_padded_by_encoder_decoders_too():
    """Whisper's extractor makes 30 seconds of everything; Moonshine's pads as it is told."""
    case = CASES["whisper"]
    processor = replace(case.processor(), feature_extractor=CASES["wav2vec2"].processor().feature_extractor)
    waves = [[0.1] * 400, [0.1] * 300]
    rows = Dataset.from_dict({"audio": waves, "text": ["a", "b"]})
    (batch,) = batches("whisper", rows, samples=2, processor=processor)
    assert batch["labels"].shape[0] == 2


@pytest.mark.parametrize("glued", [True, False])
def test_words_without_blanks_are_warned_of(glued, caplog):
    batches("tags", processor=cases.tokenizer() if glued else labelled.word_tokenizer())
    assert ("add_prefix_space=True" in caplog.text) == glued
