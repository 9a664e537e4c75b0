"""Rows with images or recordings: what of them a model sees and hears, in whatever form they come."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Audio, ClassLabel, Dataset, Features, Value
from PIL import Image
from transformers import ASTConfig, ASTFeatureExtractor, ASTForAudioClassification, Wav2Vec2ForPreTraining
from transformers.image_utils import load_image
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from gradprobe_hf.model.passes.loss import summed_loss
from gradprobe_hf.tasks.media_batches import as_image, as_wave
from tests import labelled
from tests.labelled import CASES, batches


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


def test_a_loss_that_is_a_sum_over_its_batch_is_one_already():
    """That of wav2vec 2.0's training without labels was multiplied by the rows."""
    torch.manual_seed(0)
    model = Wav2Vec2ForPreTraining(labelled.build("wav2vec2").config).eval()
    frames = int(model._get_feat_extract_output_lengths(2000))
    chosen = torch.zeros(4, frames, dtype=torch.bool)
    chosen[:, ::2] = True
    negatives = torch.randint(4 * frames, (4, frames, 5))
    batch = {"input_values": torch.randn(4, 2000), "mask_time_indices": chosen, "sampled_negative_indices": negatives}
    with torch.no_grad():
        total, rows = summed_loss(model, batch)
        assert (float(total), int(rows)) == (pytest.approx(float(model(**batch).loss)), 4)


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


def test_a_photograph_is_upright_as_pipelines_see_it(tmp_path):
    turned = Image.Exif()
    turned[274] = 6  # a camera that was held upright
    Image.fromarray(PICTURE).save(tmp_path / "photo.png", exif=turned)
    seen = load_image(str(tmp_path / "photo.png"))
    assert seen.size == (PICTURE.shape[0], PICTURE.shape[1])
    data = (tmp_path / "photo.png").read_bytes()
    for given in (str(tmp_path / "photo.png"), {"bytes": data}, data, Image.open(tmp_path / "photo.png"), seen):
        assert np.array_equal(np.asarray(as_image(given)), np.asarray(seen))


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


def test_all_that_is_said_is_a_label_where_all_is_heard():
    """CTC aligns the labels with the whole recording."""
    rows = Dataset.from_dict({"audio": CASES["wav2vec2"].rows()["audio"][:2], "text": ["ab cd " * 9, "abc"]})
    (batch,) = batches("wav2vec2", rows, samples=2, length=8)
    assert sorted((batch["labels"] != -100).sum(1).tolist()) == [3, 54]


def test_recordings_of_unequal_lengths_are_padded_by_encoder_decoders_too():
    """Whisper's extractor makes 30 seconds of everything; Moonshine's pads as it is told."""
    case = CASES["whisper"]
    processor = replace(case.processor(), feature_extractor=CASES["wav2vec2"].processor().feature_extractor)
    waves = [[0.1] * 400, [0.1] * 300]
    rows = Dataset.from_dict({"audio": waves, "text": ["a", "b"]})
    (batch,) = batches("whisper", rows, samples=2, processor=processor)
    assert batch["labels"].shape[0] == 2


@pytest.mark.parametrize(("scale", "dtype"), [(32_767, "int16"), (32_767, "float32"), (127, "float32")])
def test_samples_of_another_scale_are_refused(scale, dtype):
    """As `scipy.io.wavfile` reads them, say: Whisper's features of such samples are no features of speech."""
    tone = np.sin(np.linspace(0, 400, 16_000)).astype("float32")
    assert np.array_equal(as_wave(tone, 16_000), tone)
    given = (tone * scale).astype(dtype)
    with pytest.raises(ValueError, match=r"audio must be samples from -1 to 1, .*divide those of 16 bits by 32768"):
        as_wave(given, 16_000)
    assert as_wave(np.zeros(8, dtype="int16"), 16_000).dtype == np.float32  # silence
    with pytest.raises(ValueError, match="samples that are no numbers"):
        as_wave(np.where(tone > 0, tone, np.nan), 16_000)
