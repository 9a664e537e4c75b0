"""Rows with an image and a text: one text with a place for the image, and labels where it is predicted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Value, concatenate_datasets
from tokenizers.processors import TemplateProcessing
from transformers import (
    GemmaConfig,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PaliGemmaProcessor,
    PreTrainedTokenizerFast,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
)

from gradprobe_hf import GradProbeConfig, prune_pretrained
from gradprobe_hf.model.passes.loss import summed_loss
from gradprobe_hf.tasks.predictions import predicted_next
from tests import cases
from tests.architectures import GROUPED, VISION, byte_tokenizer
from tests.labelled import CASES, batches, build


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


def test_the_day_is_no_part_of_a_chat_of_an_image():
    processor = seeing()
    processor.chat_template = "{{ strftime_now('%d %b %Y') }}" + SEEING
    rows = Dataset.from_dict({"image": CASES["llava"].rows()["image"][:4], "conversations": [ASKED] * 4})
    found = batches("llava", rows, processor=processor)
    assert "01 Jan 2025<s>[user]" in processor.tokenizer.decode(found.items[0]["input_ids"][0])


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


def test_a_text_around_an_image_is_whole_whatever_length_is_asked_for(caplog):
    whole = batches("llava")
    assert not caplog.records
    longest = max(batch["input_ids"].shape[1] for batch in whole)
    asked = batches("llava", length=longest - 1)
    assert asked.fingerprint == whole.fingerprint
    assert f"the longest row has {longest} tokens, and sequence_length={longest - 1} is not kept to" in caplog.text
    assert f"of up to {longest} tokens, none cut" in asked.protocol


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


def test_rows_of_two_images_and_of_none_are_no_rows_of_one_each():
    """Cut by rows, the second image of one would be the other's."""
    rows = CASES["llava"].rows()
    images = [[rows["image"][0], rows["image"][1]], []] * 2
    given = Dataset.from_dict({"images": images, "text": ["<image> and <image>", "no image at all"] * 2})
    found = batches("llava", given, samples=4, batch_size=4)
    assert [len(batch["input_ids"]) for batch in found] == [1] * 4
    assert sorted(len(batch["pixel_values"]) if "pixel_values" in batch else 0 for batch in found) == [0, 0, 2, 2]
    for batch in found:
        assert summed_loss(build("llava"), batch)[0].isfinite(), "each has the places that its images fill"


@pytest.mark.parametrize("given", ["batches", "nothing", "rows"])
def test_tokens_of_an_image_are_not_predicted_where_labels_are_not_given(given):
    """As a processor makes a batch for `generate`: every token of an image would be a word to predict."""
    model, (batch,) = build("llava"), batches("llava", samples=4, batch_size=4)
    unlabelled = {name: value for name, value in batch.items() if name != "labels"}
    prepared = Dataset.from_list([{name: value[row] for name, value in unlabelled.items()} for row in range(4)])
    unlabelled |= {"labels": None} if given == "nothing" else {}
    (found,) = batches("llava", prepared if given == "rows" else [unlabelled], samples=4, batch_size=4)
    assert found.get("labels") is None
    loss, terms = summed_loss(model, found)
    own, count = summed_loss(model, batch)
    assert (loss.item(), int(terms)) == (pytest.approx(own.item()), int(count))
    predicted, labels = predicted_next(model, found, None)
    assert predicted.shape == labels.shape
    assert int((labels != -100).sum()) == int(count)


def test_labels_of_an_image_s_text_by_another_name_are_refused():
    model, (batch,) = build("llava"), batches("llava", samples=4, batch_size=4)
    batch["completion_mask"] = (batch.pop("labels") != -100).long()
    with pytest.raises(ValueError, match=r"a batch has 'completion_mask', which LlavaFor.* does not take"):
        prune_pretrained(model, GradProbeConfig(), calibration=[batch], evaluation=False, progress=False)


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
