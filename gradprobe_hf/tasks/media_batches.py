"""Batches of images and speech: what the model's own processor makes of them, with labels."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gradprobe_hf.tasks.columns import IGNORED, Row, stacked, text_of, value_of
from gradprobe_hf.tasks.image_texts import text_with_images
from gradprobe_hf.tasks.row_reader import RowReader
from gradprobe_hf.tasks.text_batches import class_labels, target_ids

if TYPE_CHECKING:
    from PIL.Image import Image


def classified_images(rows: Sequence[Row], reader: RowReader) -> dict[str, Tensor]:
    """Pixels `[rows, channels, height, width]` with a label `[rows]` each."""
    images = [as_image(reader.input(row)) for row in rows]
    return _tensors(reader.image_processor(images=images, return_tensors="pt"), reader) | {
        "labels": class_labels(rows, reader)
    }


def transcribed_speech(rows: Sequence[Row], reader: RowReader) -> dict[str, Tensor]:
    """Speech, and as labels `[rows, tokens]` those of what is said."""
    extractor = reader.feature_extractor
    rate = extractor.sampling_rate
    waves = [as_wave(reader.input(row), rate) for row in rows]
    # Whisper pads to 30 seconds whatever it is given; others pad to the longest of the batch.
    whole = {} if reader.config.is_encoder_decoder else {"padding": True}
    inputs = _tensors(extractor(waves, sampling_rate=rate, return_tensors="pt", **whole), reader)
    return inputs | {"labels": stacked([target_ids(_said(row, reader), reader) for row in rows], IGNORED)}


def images_with_text(rows: Sequence[Row], reader: RowReader) -> dict[str, Any]:
    """Images with a text each, or with a chat; every token of the text is a label, and none of an image's."""
    processor, (image, text) = reader.processing_class, reader.inputs
    images = [_images(value_of(row, image)) for row in rows]
    texts = [
        text_with_images(processor, row, text, _answer(row, reader), len(own))
        for row, own in zip(rows, images, strict=True)
    ]
    options: dict[str, Any] = {"padding": True} if len(rows) > 1 else {}
    begin = getattr(reader.tokenizer, "bos_token", None)
    if begin and all(one.startswith(begin) for one in texts):  # the template has written it
        options["add_special_tokens"] = False
    batch = dict(processor(images=images, text=texts, return_tensors="pt", **options))
    ids = batch["input_ids"]
    # Images are long runs of one token; what marks them is special too, and an end of text is not.
    image_ids = torch.tensor(sorted(_image_token_ids(processor, reader.config)), dtype=ids.dtype)
    counts = batch.get("attention_mask", torch.ones_like(ids)).bool() & ~torch.isin(ids, image_ids)
    return {name: value for name, value in batch.items() if name in reader.accepts} | {
        "labels": ids.masked_fill(~counts, IGNORED)
    }


def _images(value: Any) -> list[Image]:
    return [as_image(one) for one in value] if isinstance(value, list) else [as_image(value)]


def as_image(value: Any) -> Image:
    """An image in RGB: a PIL image, an array `[height, width, channels]`, a path, or encoded bytes.

    Raises:
        ValueError: none of these, or a file that is no image.
    """
    from PIL import Image

    if isinstance(value, Mapping):  # as `datasets` stores what is not decoded
        value = io.BytesIO(value["bytes"]) if value.get("bytes") else value.get("path")
    if isinstance(value, (np.ndarray, Tensor)):
        value = Image.fromarray(np.asarray(value, dtype=np.uint8))
    try:
        image = value if isinstance(value, Image.Image) else Image.open(value)
        return image.convert("RGB")
    except (OSError, AttributeError, TypeError) as error:
        raise ValueError(f"{value!r} is no image: {error}.") from error


def as_wave(value: Any, rate: int) -> Any:
    """Samples `[time]` in float32 at this rate: of what `datasets` decodes, or plain numbers at it already.

    Raises:
        ValueError: another rate, or no samples.
    """
    if hasattr(value, "get_all_samples"):  # torchcodec's decoder
        decoded = value.get_all_samples()
        value = {"array": decoded.data.mean(0).numpy(), "sampling_rate": decoded.sample_rate}
    if isinstance(value, Mapping) and "array" in value:
        if value.get("sampling_rate", rate) != rate:
            raise ValueError(
                f"audio was sampled at {value['sampling_rate']} Hz, and the model takes {rate} Hz: cast the column, "
                f"dataset.cast_column('audio', datasets.Audio(sampling_rate={rate}))."
            )
        value = value["array"]
    try:
        wave = np.asarray(value, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"audio must be samples, or what `datasets` decodes with its audio extra (pip install torchcodec), got "
            f"{type(value).__name__}."
        ) from error
    if wave.ndim != 1 or not len(wave):
        raise ValueError(f"audio must be samples [time] of one channel, got an array of shape {list(wave.shape)}.")
    return wave


def _said(row: Row, reader: RowReader) -> str:
    text = reader.raw_label(row)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"a row has {text!r} where the text of what is said is needed ({reader.label}).")
    return text


def _answer(row: Row, reader: RowReader) -> str | None:
    return None if reader.label is None else text_of(row, reader.label, "label_column")


def _image_token_ids(processor: Any, config: Any) -> set[int]:
    known = [getattr(one, "image_token_id", None) for one in (processor, config)]
    return {int(token) for token in (*known, getattr(config, "image_token_index", None)) if token is not None}


def _tensors(made: Mapping[str, Any], reader: RowReader) -> dict[str, Tensor]:
    return {name: torch.as_tensor(value) for name, value in made.items() if name in reader.accepts}
