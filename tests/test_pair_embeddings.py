"""Models that make embeddings of images and of texts, CLIP and SigLIP: calibrated and measured by how far both move."""

from __future__ import annotations

import json
import re

import pytest
import torch
import torch.nn.functional as F
from datasets import ClassLabel, Dataset, Features, Image
from transformers import (
    AutoModelForZeroShotImageClassification,
    CLIPConfig,
    CLIPForImageClassification,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPProcessor,
    SiglipConfig,
    SiglipImageProcessorPil,
    SiglipModel,
    SiglipProcessor,
    pipeline,
)

from gradprobe_hf import GradProbeConfig, prune_pretrained
from gradprobe_hf.cli.main import main
from gradprobe_hf.data.batches import Batches, shared_rows
from gradprobe_hf.data.labelled import Labels, RowSpec
from gradprobe_hf.data.text.text_options import TextOptions
from gradprobe_hf.data.windows import open_rows
from gradprobe_hf.estimation.passes import cost_of_batch
from gradprobe_hf.estimation.watch import Watch
from gradprobe_hf.model.loading.load import skeleton
from gradprobe_hf.model.passes.loss import summed_loss
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.report.report import Report
from gradprobe_hf.tasks.embeddings import DIRECTION
from gradprobe_hf.tasks.table import task_for, task_of_class
from tests.architectures import EOS, TEXT, VISION, byte_tokenizer
from tests.test_image_embeddings import enlarged, images

OPTIONS = {"sparsity": 0.5, "num_samples": 6, "batch_size": 3}
TASK = task_of_class("CLIPModel")
SIDE = {"height": 8, "width": 8}


def clip(dtype=torch.float32):
    torch.manual_seed(0)
    return enlarged(CLIPModel(CLIPConfig(text_config=dict(TEXT), vision_config=dict(VISION), projection_dim=8)), dtype)


def siglip(dtype=torch.float32):
    torch.manual_seed(0)
    config = SiglipConfig(text_config={**TEXT, "projection_size": 16}, vision_config=dict(VISION))
    return enlarged(SiglipModel(config), dtype)


def processor(model):
    if isinstance(model, CLIPModel):
        return CLIPProcessor(CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size=SIDE), byte_tokenizer())
    tokenizer = byte_tokenizer()
    tokenizer.model_input_names = ["input_ids"]  # as those of released SigLIPs
    return SiglipProcessor(SiglipImageProcessorPil(size=SIDE), tokenizer)


def captions(count=14):
    return [f"picture {number}{'!' * number}" for number in range(count)]


def rows(count=14, seed=0):
    return Dataset.from_dict({"image": images(count, seed), "caption": captions(count)})


def spec_of(*, length=512, batch_size=3, label_column=None, **text):
    options = {"batch_size": batch_size, "seed": 0, "text": TextOptions(**text), "label_column": label_column}
    return RowSpec(task=TASK, samples=6, length=length, takes_loss=True, **options)


def read(model, source, **options):
    labels = Labels(spec_of(**options), model, processor(model))
    return list(labels.batches(open_rows(source, "calibration", 0)))


def both(model, batch):
    """The oracle: the two embeddings as the model's users take them."""
    text = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
    pixels = batch["pixel_values"].to(model.dtype)
    one, other = model.get_image_features(pixel_values=pixels), model.get_text_features(**text)
    return [F.normalize(getattr(made, "pooler_output", made), dim=-1) for made in (one, other)]


def cosines(dense, pruned, batch):
    """The mean of an image's and its text's, `[rows]`."""
    pairs = zip(both(dense, batch), both(pruned, batch), strict=True)
    return torch.stack([(first * second).sum(-1) for first, second in pairs]).mean(0)


@pytest.mark.parametrize("make", [clip, siglip])
def test_the_loss_is_how_far_both_moved_and_its_gradient_goes_along_a_direction(make):
    dense, pruned = make(torch.float64), make(torch.float64)
    batch = read(dense, rows())[0]
    loss, terms = summed_loss(dense, batch)
    assert (terms, loss.item()) == (3, pytest.approx(0, abs=1e-12))
    for tower in ("vision_model", "text_model"):
        name = next(target.name for target in find_targets(dense) if target.name.startswith(tower))
        weight = dense.get_parameter(name)
        (found,) = torch.autograd.grad(summed_loss(dense, batch)[0], weight)
        embedding = torch.cat(both(dense, batch), dim=-1) / 2**0.5
        (wanted,) = torch.autograd.grad((embedding * batch[DIRECTION].double()).sum(), weight)
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)
        assert found.abs().max() > 0
        with torch.no_grad():
            pruned.get_parameter(name).mul_(0.5)
        far = 1 - cosines(dense, pruned, batch)
        torch.testing.assert_close(summed_loss(pruned, batch)[0], far.sum())
    assert far.min() > 1e-4


@pytest.mark.parametrize("make", [clip, siglip])
def test_texts_are_padded_as_in_training_and_rows_do_not_depend_on_each_other(make):
    model = make()
    together, alone = read(model, rows(), batch_size=6)[0], read(model, rows(), batch_size=1)
    widths = {batch["input_ids"].shape[1] for batch in alone}
    assert (widths == {64}) if make is siglip else len(widths) > 1
    said = Labels(spec_of(length=512), model, processor(model)).batches(open_rows(rows(), "calibration", 0)).protocol
    assert ("padded to 64 tokens" in said) == (make is siglip)
    assert "cut at" not in said
    assert "attention_mask" in together if make is clip else "attention_mask" not in together
    torch.testing.assert_close(together["labels"], torch.cat([batch["labels"] for batch in alone]))
    assert torch.equal(together[DIRECTION], torch.cat([batch[DIRECTION] for batch in alone]))


def test_a_shorter_text_is_padded_to_all_positions_where_the_last_one_has_the_embedding():
    whole, cut = read(siglip(), rows())[0], read(siglip(), rows(), length=8)[0]
    assert whole["input_ids"].shape == cut["input_ids"].shape == (3, 64)
    assert (cut["input_ids"][:, 8:] == byte_tokenizer().pad_token_id).all()
    assert not torch.equal(whole["input_ids"], cut["input_ids"])


@pytest.mark.parametrize("preset", ["fast", "best"])
def test_what_is_measured_is_what_the_checkpoint_computes(preset, tmp_path, capsys):
    model, out = tmp_path / "model", tmp_path / "out"
    clip().save_pretrained(model)
    processor(clip()).save_pretrained(model)
    for name, seed in (("some", 0), ("others", 1)):
        folder = tmp_path / name
        folder.mkdir()
        told = [{"file_name": f"{number}.png", "text": text} for number, text in enumerate(captions())]
        (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, told)))
        for number, image in enumerate(images(seed=seed)):
            image.save(folder / f"{number}.png")
    arguments = ["prune", str(model), "--output", str(out), "--preset", preset, "--sparsity", "0.5", "--quiet"]
    arguments += [
        "--num-samples",
        "6",
        "--calibration",
        str(tmp_path / "some"),
        "--evaluation",
        str(tmp_path / "others"),
    ]
    assert main(arguments) == 0
    report = Report.load(out)
    dense, pruned = (AutoModelForZeroShotImageClassification.from_pretrained(one).eval() for one in (model, out))
    batch = processor(dense)(text=captions(), images=images(seed=1), padding=True, return_tensors="pt")
    with torch.no_grad():
        found = cosines(dense, pruned, batch).mean().item()
    assert report.evaluation["metric"]["pruned"] == pytest.approx(found, abs=1e-5)
    assert report.evaluation["metric"]["dense"] == pytest.approx(1)
    assert found < 0.999
    assert "14 images with text (image, text)" in report.evaluation["protocol"]
    assert {row.block.split(".")[0] for row in report.matrices} == {"vision_model", "text_model"}
    assert report.model["task"] == "zero-shot-image-classification"
    assert not any("also calibrated on" in warning for warning in report.warnings), "these are other images"
    compared = ["evaluate", str(out), "--against", str(model), "--data", str(tmp_path / "others"), "--json"]
    capsys.readouterr()
    assert main(compared) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["metric"]["pruned"] == pytest.approx(found, abs=1e-5)
    snippet = re.search("```python\n(.*?)```", (out / "README.md").read_text(), re.S)[1]
    images(1)[0].save(tmp_path / "picture.png")
    code = snippet.replace('"picture.png"', repr(str(tmp_path / "picture.png"))).replace('"out"', repr(str(out)))
    exec(code, {})


def test_structures_of_two_towers_are_refused(tmp_path):
    model = clip()
    given = {"calibration": rows(), "evaluation": rows(seed=1), "processing_class": processor(model)}
    config = GradProbeConfig(structure={"ffn": 8}, num_samples=6)
    with pytest.raises(ValueError, match="structure is for models of one stack of blocks"):
        prune_pretrained(model, config, **given, output_dir=tmp_path / "out", progress=False)


def test_batches_with_the_model_s_own_loss_are_taken_as_they_are():
    model = clip()
    ids = torch.cat([torch.randint(200, (4, 6)), torch.full((4, 1), EOS)], dim=1)
    batch = {"input_ids": ids, "pixel_values": torch.randn(4, 3, 8, 8), "return_loss": True}
    options = {"calibration": [batch], "evaluation": [batch], "progress": False}
    report = prune_pretrained(model, GradProbeConfig(sparsity=0.5), **options).report
    assert report.evaluation.get("metric") is None
    assert report.evaluation["pruned"]["loss"] != report.evaluation["dense"]["loss"]


def test_a_row_is_known_again_by_its_image_and_its_text():
    """ "A photo of a cat" may be said of many."""
    model = clip()
    of = [
        Batches(tuple(read(model, source, batch_size=size)), source="rows", samples=6, tokens=9, protocol="rows")
        for source, size in ((rows(6), 3), (rows(6), 6), (rows(6, seed=1), 3))
    ]
    assert shared_rows(of[0], of[1]) == 6
    assert shared_rows(of[0], of[2]) == 0


def test_prepared_rows_have_both():
    model = clip()
    batch = read(model, rows(), batch_size=6)[0]
    both = {name: batch[name].tolist() for name in ("input_ids", "attention_mask", "pixel_values")}
    told = Dataset.from_dict({**both, "return_loss": [True] * 6})
    torch.testing.assert_close(read(model, told, batch_size=6)[0]["labels"].sort(0)[0], batch["labels"].sort(0)[0])
    with pytest.raises(ValueError, match="embeddings of images with text, and the data has no 'pixel_values'"):
        read(model, told.remove_columns(["pixel_values"]), batch_size=6)


def test_a_batch_without_a_loss_says_what_it_takes():
    batch = {"input_ids": torch.randint(200, (4, 6)), "pixel_values": torch.randn(4, 3, 8, 8)}
    with pytest.raises(
        ValueError, match=r"has return_loss=True\. Give that, rows of images with text, or a loss_fn; score"
    ):
        prune_pretrained(clip(), GradProbeConfig(sparsity=0.5), calibration=[batch], evaluation=False, progress=False)


def test_a_classifier_with_clip_s_eyes_wants_labels():
    model = CLIPForImageClassification(CLIPConfig(vision_config=dict(VISION)))
    batch = {"pixel_values": torch.randn(4, 3, 8, 8)}
    with pytest.raises(ValueError, match="CLIPForImageClassification has no loss without labels"):
        prune_pretrained(model, GradProbeConfig(sparsity=0.5), calibration=[batch], evaluation=False, progress=False)


def test_one_tower_alone_is_for_something_else():
    for name in ("CLIPVisionModel", "SiglipTextModel", "CLIPTextModelWithProjection", "BertModel"):
        with pytest.raises(ValueError, match="task='zero-shot-image-classification' is for models of"):
            task_for("zero-shot-image-classification", name)


def test_a_class_stands_for_its_name():
    named = Dataset.from_dict({"image": images(6), "label": [0, 1, 0, 1, 0, 1]})
    named = named.cast(Features({"image": Image(), "label": ClassLabel(names=["cat", "dog"])}))
    for options, wanted in (
        ({"text_template": "a photo of a {label}"}, {"a photo of a cat", "a photo of a dog"}),
        ({"text_column": "label"}, {"cat", "dog"}),
    ):
        (batch,) = read(clip(), named, batch_size=6, **options)
        found = byte_tokenizer().batch_decode(batch["input_ids"], skip_special_tokens=True)
        assert set(found) == wanted
    unknown = named.map(lambda row, number: {"label": -1} if number == 3 else {}, with_indices=True)
    with pytest.raises(ValueError, match=r"a row has class -1 in 'label', of which the data set names 0 to 1"):
        read(clip(), unknown, batch_size=6, text_column="label")


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        ("caption", [["one", "two"]] * 6, "the data needs a column of text"),
        ("text", [["one", "two"]] * 6, r"a row has .* where one text of its image is needed \(text\)"),
        ("text", [""] * 6, "where one text of its image is needed"),
        ("messages", [[{"role": "user", "content": "a cat"}]] * 6, "the data needs a column of text"),
    ],
    ids=["several", "several texts", "none", "a chat"],
)
def test_rows_without_one_text_for_each_image_are_refused(column, values, said):
    with pytest.raises(ValueError, match=said):
        read(clip(), Dataset.from_dict({"image": images(6), column: values}))


def test_labels_have_no_effect():
    with pytest.raises(ValueError, match="label_column='caption' has no effect here"):
        read(clip(), rows(), label_column="caption")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (["a text"] * 9, "CLIPModel does not read plain text, but images with text"),
        ("pydoc", "CLIPModel does not read plain text, but images with text"),
        (Dataset.from_dict({"text": ["a text"] * 9}), "the data needs a column of images, and there is none"),
        ({"pydoc": 1.0}, "a mixture is of texts, and zero-shot-image-classification reads rows of images with text"),
    ],
    ids=["texts", "plain text", "rows of text", "mixture"],
)
def test_text_alone_is_refused(source, said):
    model = clip()
    given = {"calibration": source, "evaluation": False, "processing_class": processor(model), "progress": False}
    with pytest.raises(ValueError, match=said):
        prune_pretrained(model, GradProbeConfig(**OPTIONS), **given)


def test_a_saved_one_classifies_without_examples(tmp_path):
    model = siglip()
    given = {"calibration": rows(), "evaluation": False, "processing_class": processor(model), "progress": False}
    prune_pretrained(model, GradProbeConfig(**OPTIONS), output_dir=tmp_path / "out", **given)
    classify = pipeline("zero-shot-image-classification", model=str(tmp_path / "out"))
    assert len(classify(images(1)[0], candidate_labels=["a cat", "a dog"])) == 2


def test_its_passes_are_estimated_with_both_towers():
    model, real = skeleton(clip().config, CLIPModel), clip()
    found = cost_of_batch(model, find_targets(model), 3, 16, device=torch.device("cpu"))
    texts = [caption.ljust(15, "!") for caption in captions(6)]
    batch = read(real, Dataset.from_dict({"image": images(6), "text": texts}))[0]
    assert batch["input_ids"].shape == (3, 16)
    for target in find_targets(real):
        real.get_parameter(target.parameter).requires_grad_()
    with Watch([*real.parameters(), *real.buffers()]) as watch:
        summed_loss(real, batch)[0].backward()
    assert found.simulated
    assert found.flops == pytest.approx(watch.flops, rel=0.1)
