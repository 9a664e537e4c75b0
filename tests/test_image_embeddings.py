"""Models that make embeddings of images: calibrated and measured by how far those move."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from PIL import Image
from safetensors.torch import load_file
from transformers import (
    AutoModel,
    BeitConfig,
    BeitModel,
    CvtConfig,
    CvtModel,
    Dinov2Config,
    Dinov2Model,
    IJepaConfig,
    IJepaModel,
    ViTConfig,
    ViTImageProcessor,
    ViTMAEConfig,
    ViTMAEModel,
    ViTModel,
    ViTMSNConfig,
    ViTMSNModel,
)

from gradprobe_hf import GradProbeConfig, RecoveryConfig, prune_pretrained, recover_pretrained
from gradprobe_hf.checkpoint.inspect import inspect_checkpoint
from gradprobe_hf.cli.main import main
from gradprobe_hf.data.batches import Batches
from gradprobe_hf.data.embedding_labels import with_embeddings
from gradprobe_hf.estimation.passes import cost_of_batch
from gradprobe_hf.estimation.watch import Watch
from gradprobe_hf.model.loading.load import skeleton
from gradprobe_hf.model.passes.loss import summed_loss
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.report.report import Report
from gradprobe_hf.tasks.embeddings import DIRECTION
from gradprobe_hf.tasks.table import task_for, task_of_class

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
OPTIONS = {"sparsity": 0.5, "num_samples": 6, "batch_size": 3}
PROCESSOR = ViTImageProcessor(size={"height": 16, "width": 16})


def images(count=14, seed=0):
    drawn = np.random.default_rng(seed).integers(0, 256, (count, 12, 20, 3), dtype=np.uint8)
    return [Image.fromarray(one) for one in drawn]


def enlarged(model, dtype=torch.float32):
    """As initialised, all images have nearly the same embedding."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return model.to(dtype).eval()


def dinov2(dtype=torch.float32):
    torch.manual_seed(0)
    return enlarged(Dinov2Model(Dinov2Config(**SIZES, mlp_ratio=2)), dtype)


def vit(dtype=torch.float32, **options):
    torch.manual_seed(0)
    return enlarged(ViTModel(ViTConfig(**SIZES, intermediate_size=32), **options), dtype)


def pixels(dtype=torch.float32, rows=4):
    generator = torch.Generator().manual_seed(3)
    found = torch.randn(rows, 3, 16, 16, generator=generator).to(dtype)
    return Batches(({"pixel_values": found},), source="rows", samples=rows, tokens=rows, protocol="rows")


def pooled(model, values):
    return F.normalize(model(pixel_values=values).pooler_output, dim=-1)


def class_token(model, values):
    return F.normalize(model(pixel_values=values).last_hidden_state[:, 0], dim=-1)


@pytest.mark.parametrize(
    ("make", "embedding"),
    [(dinov2, pooled), (vit, pooled), (lambda dtype: vit(dtype, add_pooling_layer=False), class_token)],
    ids=["dinov2", "vit", "vit without a pooler"],
)
def test_the_loss_is_how_far_they_moved_and_its_gradient_goes_along_a_direction(make, embedding):
    dense, pruned = make(torch.float64), make(torch.float64)
    name = find_targets(pruned)[-1].name
    (batch,) = with_embeddings(pixels(torch.float64), dense, seed=0)
    loss, terms = summed_loss(dense, batch)
    assert (terms, loss.item()) == (4, pytest.approx(0, abs=1e-12))
    weight = dense.get_parameter(name)
    (found,) = torch.autograd.grad(loss, weight)
    along = (embedding(dense, batch["pixel_values"]) * batch[DIRECTION].double()).sum()
    torch.testing.assert_close(found, torch.autograd.grad(along, weight)[0], rtol=1e-6, atol=1e-9)
    with torch.no_grad():
        pruned.get_parameter(name).mul_(0.5)
    cosines = (embedding(dense, batch["pixel_values"]) * embedding(pruned, batch["pixel_values"])).sum(-1)
    torch.testing.assert_close(summed_loss(pruned, batch)[0], (1 - cosines).sum())
    assert cosines.max() < 0.9999


@pytest.mark.parametrize("preset", ["fast", "best"])
def test_what_is_measured_is_what_the_checkpoint_computes(preset, tmp_path):
    model, out, others = tmp_path / "model", tmp_path / "out", tmp_path / "others" / "one"
    dinov2().save_pretrained(model)
    PROCESSOR.save_pretrained(model)
    for folder, seed in ((tmp_path / "some" / "one", 0), (others, 1)):
        folder.mkdir(parents=True)
        for number, image in enumerate(images(seed=seed)):
            image.save(folder / f"{number}.png")
    arguments = ["prune", str(model), "--output", str(out), "--preset", preset, "--sparsity", "0.5"]
    arguments += ["--num-samples", "6", "--calibration", str(tmp_path / "some"), "--evaluation", str(others.parent)]
    assert main([*arguments, "--quiet"]) == 0
    report, dense, pruned = Report.load(out), AutoModel.from_pretrained(model), AutoModel.from_pretrained(out)
    assert report.model["task"] == "image-feature-extraction"
    values = PROCESSOR(images(seed=1), return_tensors="pt").pixel_values
    cosines = (pooled(dense.eval(), values) * pooled(pruned.eval(), values)).sum(-1)
    assert report.evaluation["metric"]["pruned"] == pytest.approx(cosines.mean().item(), abs=1e-5)
    assert report.evaluation["metric"]["dense"] == pytest.approx(1)
    assert cosines.mean() < 0.999
    assert "14 images (image)" in report.evaluation["protocol"]
    assert "pipeline_tag: image-feature-extraction" in (out / "README.md").read_text()


def test_evaluate_measures_it_beside_the_dense_model(tmp_path, capsys):
    dinov2().save_pretrained(tmp_path / "model")
    PROCESSOR.save_pretrained(tmp_path / "model")
    rows = Dataset.from_dict({"image": images(), "label": [0, 1] * 7})  # which is of no use here
    prune_pretrained(
        str(tmp_path / "model"), GradProbeConfig(**OPTIONS), calibration=rows, evaluation=False, progress=False
    ).save_pretrained(tmp_path / "out")
    (tmp_path / "data").mkdir()
    for number, image in enumerate(images(seed=2)):
        image.save(tmp_path / "data" / f"{number}.png")
    asked = ["evaluate", str(tmp_path / "out"), "--data", str(tmp_path / "data"), "--quiet"]
    assert main([*asked, "--against", str(tmp_path / "model")]) == 0
    shown = capsys.readouterr().out
    assert "cosine to the embeddings before" in shown
    assert "perplexity" not in shown
    assert main([*asked, "--against", str(tmp_path / "model"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    values = PROCESSOR(images(seed=2), return_tensors="pt").pixel_values
    dense, pruned = (AutoModel.from_pretrained(tmp_path / name).eval() for name in ("model", "out"))
    cosines = (pooled(dense, values) * pooled(pruned, values)).sum(-1)
    assert found["metric"]["pruned"] == pytest.approx(cosines.mean().item(), abs=1e-5)
    assert main(asked) == 1
    assert "name the dense model with --against" in " ".join(capsys.readouterr().err.split())


def test_prepared_pixels_are_read_too():
    values = PROCESSOR(images(), return_tensors="pt").pixel_values
    rows = {"image": Dataset.from_dict({"image": images()}), "pixels": Dataset.from_dict({"pixel_values": values})}
    losses = {}
    for name, data in rows.items():
        given = {"calibration": data, "evaluation": data, "processing_class": PROCESSOR, "progress": False}
        losses[name] = prune_pretrained(dinov2(), GradProbeConfig(**OPTIONS), **given).report.evaluation["pruned"]
    assert losses["pixels"]["loss"] == pytest.approx(losses["image"]["loss"], rel=1e-3)


def test_a_loss_of_the_users_own_is_called_with_pixels_alone():
    names = set()

    def loss(model, batch):
        names.update(batch)
        return model(**batch).last_hidden_state.square().sum()

    rows = Dataset.from_dict({"image": images(), "label": [0, 1] * 7})
    given = {"calibration": rows, "evaluation": rows, "processing_class": PROCESSOR}
    prune_pretrained(dinov2(), GradProbeConfig(**OPTIONS), **given, loss_fn=loss, progress=False)
    assert names == {"pixel_values"}


@pytest.mark.parametrize("change", [{"sparsity": 0.5}, {"structure": {"ffn": 8}}], ids=["zeros", "channels"])
def test_a_checkpoint_without_a_pooler_stays_one(change, tmp_path, caplog):
    """DINO's ViTs: `from_pretrained` makes up a pooler, which would be what the embedding is."""
    dense, model, out = vit(add_pooling_layer=False), tmp_path / "model", tmp_path / "out"
    dense.save_pretrained(model)
    PROCESSOR.save_pretrained(model)
    rows = Dataset.from_dict({"image": images()})
    options = {"calibration": rows, "evaluation": rows, "progress": False, "output_dir": out}
    report = prune_pretrained(model, GradProbeConfig(**{**OPTIONS, "sparsity": None, **change}), **options).report
    said = "model has no weights of the pooler of ViTModel, which is left off"
    assert said in caplog.text
    assert f"{said}." in report.warnings
    assert not any("pooler" in name for name in load_file(out / "model.safetensors"))
    values = PROCESSOR(images(), return_tensors="pt").pixel_values
    pruned = ViTModel.from_pretrained(out, add_pooling_layer=False).eval()
    cosines = (class_token(dense, values) * class_token(pruned, values)).sum(-1)
    assert report.evaluation["metric"]["pruned"] == pytest.approx(cosines.mean().item(), abs=1e-5)
    assert inspect_checkpoint(out).zeros == ("sparsity" in change) * report.zeros
    taken = {**options, "allow_missing_weights": True, "output_dir": None}
    asked = prune_pretrained(model, GradProbeConfig(**OPTIONS), **taken)
    assert asked.model.pooler is None, "nobody wants noise for an embedding"


def test_what_makes_no_vector_of_an_image_or_another_each_time_is_refused():
    rows = Dataset.from_dict({"image": images()})
    given = {"calibration": rows, "evaluation": False, "processing_class": PROCESSOR, "progress": False}
    patches = IJepaModel(IJepaConfig(**SIZES, intermediate_size=32), add_pooling_layer=False)
    with pytest.raises(ValueError, match="IJepaModel makes no single vector of an image"):
        prune_pretrained(patches, GradProbeConfig(**OPTIONS), **given)
    hiding = ViTMAEConfig(**SIZES, intermediate_size=32)
    with pytest.raises(ValueError, match=r"another embedding of the same image each time.*mask_ratio=0"):
        prune_pretrained(enlarged(ViTMAEModel(hiding)), GradProbeConfig(**OPTIONS), **given)
    hiding.mask_ratio = 0.0
    prune_pretrained(enlarged(ViTMAEModel(hiding)), GradProbeConfig(**OPTIONS), **given)


def test_convolutions_without_a_pooler_are_refused():
    """A class token of CvT is beside its last hidden state, which is [rows, channels, height, width]."""
    config = CvtConfig(embed_dim=[4, 8, 8], num_heads=[1, 1, 1], depth=[1, 2, 3])
    with pytest.raises(ValueError, match="CvtModel makes no single vector of an image"):
        with_embeddings(pixels(), CvtModel(config), seed=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_pixels_have_the_dtype_of_the_model(dtype):
    """BEiT does not convert them by itself."""
    torch.manual_seed(0)
    model = enlarged(BeitModel(BeitConfig(**SIZES, intermediate_size=32)), dtype)
    rows = Dataset.from_dict({"image": images()})
    given = {"calibration": rows, "evaluation": rows, "processing_class": PROCESSOR, "progress": False}
    report = prune_pretrained(model, GradProbeConfig(**OPTIONS), **given).report
    assert report.evaluation["metric"]["dense"] == pytest.approx(1, abs=1e-3)


def test_two_that_are_stored_in_different_dtypes_are_compared(tmp_path, capsys):
    torch.manual_seed(0)
    model = enlarged(BeitModel(BeitConfig(**SIZES, intermediate_size=32)))
    for name, dtype in (("dense", torch.float32), ("other", torch.bfloat16)):
        model.to(dtype).save_pretrained(tmp_path / name)
        PROCESSOR.save_pretrained(tmp_path / name)
    (tmp_path / "data").mkdir()
    for number, image in enumerate(images()):
        image.save(tmp_path / "data" / f"{number}.png")
    asked = ["evaluate", str(tmp_path / "other"), "--against", str(tmp_path / "dense"), "--quiet", "--json"]
    assert main([*asked, "--data", str(tmp_path / "data")]) == 0
    found = json.loads(capsys.readouterr().out)["metric"]
    assert (found["dense"], found["pruned"]) == (pytest.approx(1), pytest.approx(1, abs=1e-2))
    assert found["pruned"] < 1


def test_a_card_is_true_of_a_model_that_pools_nothing(tmp_path):
    torch.manual_seed(0)
    model = enlarged(ViTMSNModel(ViTMSNConfig(**SIZES, intermediate_size=32)))
    given = {"calibration": Dataset.from_dict({"image": images()}), "evaluation": False, "processing_class": PROCESSOR}
    prune_pretrained(model, GradProbeConfig(**OPTIONS), **given, progress=False).save_pretrained(tmp_path / "out")
    snippet = re.search("```python\n(.*?)```", (tmp_path / "out" / "README.md").read_text(), re.S)[1]
    images(1)[0].save(tmp_path / "picture.png")
    code = snippet.replace('"picture.png"', repr(str(tmp_path / "picture.png")))
    code = code.replace('"out"', repr(str(tmp_path / "out")))
    exec(code, {})


def test_labels_that_would_not_be_read_are_refused():
    rows = Dataset.from_dict({"image": images(), "label": [0, 1] * 7})
    given = {"calibration": rows, "evaluation": False, "processing_class": PROCESSOR, "progress": False}
    with pytest.raises(ValueError, match="label_column='label' has no effect here"):
        prune_pretrained(dinov2(), GradProbeConfig(**OPTIONS, label_column="label"), **given)


def test_a_recovery_is_refused_with_what_can_be_done():
    rows = Dataset.from_dict({"image": images()})
    with pytest.raises(ValueError, match=r"a Dinov2Model makes others\. Fine-tune it"):
        recover_pretrained(dinov2(), dinov2(), RecoveryConfig(steps=2), text=rows, progress=False)


def test_only_models_that_read_images_are_for_it():
    assert task_of_class("Dinov2Model").name == task_of_class("ViTModel").name == "image-feature-extraction"
    assert task_for("image-feature-extraction", "CLIPVisionModel").embeds
    for name in ("BertModel", "ViTForImageClassification", "CLIPModel"):
        with pytest.raises(ValueError, match="task='image-feature-extraction' is for models of AutoModel"):
            task_for("image-feature-extraction", name)


def test_its_passes_are_estimated_as_they_are():
    model = skeleton(dinov2().config, Dinov2Model)
    found = cost_of_batch(model, find_targets(model), 4, 1, device=torch.device("cpu"))
    real = dinov2()
    (batch,) = with_embeddings(pixels(), real, seed=0)
    with Watch([*real.parameters(), *real.buffers(), *batch.values()]) as watch:
        summed_loss(real, batch)[0].backward()
    assert found.simulated
    assert found.flops == pytest.approx(watch.flops, rel=0.1)
