"""Batches of images and speech: what the model's own processor makes of them, with labels."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gradprobe_hf.tasks.columns import IGNORED, Row, filled, stacked, text_of, value_of
from gradprobe_hf.tasks.conversation import shown
from gradprobe_hf.tasks.image_texts import prefix_and_suffix, sees_prefix_whole, text_with_images
from gradprobe_hf.tasks.media_tokens import words_of
from gradprobe_hf.tasks.row_reader import RowReader
from gradprobe_hf.tasks.text_batches import class_labels, target_ids

if TYPE_CHECKING:
    from PIL.Image import Image

LOUDEST = 32.0  # of samples that are not whole numbers: from -1 to 1, or of the variance 1, and not of 8 or 16 bits


def classified_images(rows: Sequence[Row], reader: RowReader) -> dict[str, Tensor]:
    """Pixels `[rows, channels, height, width]` with a label `[rows]` each."""
    return images_alone(rows, reader) | {"labels": class_labels(rows, reader)}


def images_alone(rows: Sequence[Row], reader: RowReader) -> dict[str, Tensor]:
    """Pixels `[rows, channels, height, width]`."""
    images = [as_image(reader.input(row), _mode(reader.config)) for row in rows]
    return _tensors(reader.image_processor(images=images, return_tensors="pt"), reader)


def images_with_captions(rows: Sequence[Row], reader: RowReader) -> dict[str, Tensor]:
    """Pixels, and the tokens `[rows, tokens]` of one text for each image, padded as the model saw them in training."""
    image, text = reader.inputs
    captions = [_caption(row, text, reader) for row in rows]
    images = [as_image(value_of(row, image), _mode(reader.config)) for row in rows]
    tokens = reader.tokenizer(captions, max_length=reader.length, truncation=True)
    tokens = reader.tokenizer.pad(tokens, return_tensors="pt", **_padding(reader.config))
    pixels = reader.image_processor(images=images, return_tensors="pt")
    return _tensors({**tokens, **pixels}, reader)


def transcribed_speech(rows: Sequence[Row], reader: RowReader) -> dict[str, Tensor]:
    """Speech, and as labels `[rows, tokens]` those of what is said."""
    waves = _waves(rows, reader)
    _check_heard(max(map(len, waves)), reader.feature_extractor, reader.inputs[0])
    texts = [target_ids(_said(row, reader), reader, reader.told) for row in rows]
    return _heard(waves, reader) | {"labels": stacked(texts, IGNORED)}


def classified_recordings(rows: Sequence[Row], reader: RowReader) -> dict[str, Tensor]:
    """Recordings with a label `[rows]` each. What is longer than the extractor hears it cuts, as a pipeline's does."""
    return _heard(_waves(rows, reader), reader) | {"labels": class_labels(rows, reader)}


def hears_padding(rows: Sequence[Row], reader: RowReader) -> bool:
    """Whether recordings of unequal lengths get no mask, so that what they are padded with is heard as silence."""
    extractor = reader.feature_extractor
    if _makes_one_length(extractor) or getattr(extractor, "return_attention_mask", False):
        return False
    return len(set(map(len, _waves(rows, reader)))) > 1


def _waves(rows: Sequence[Row], reader: RowReader) -> list[Any]:
    rate = reader.feature_extractor.sampling_rate
    return [as_wave(reader.input(row), rate) for row in rows]


def _heard(waves: Sequence[Any], reader: RowReader) -> dict[str, Tensor]:
    """What the extractor makes of recordings; it pads to the longest of them, if it is told to."""
    extractor = reader.feature_extractor
    whole = {} if _makes_one_length(extractor) else {"padding": True}
    return _tensors(extractor(waves, sampling_rate=extractor.sampling_rate, return_tensors="pt", **whole), reader)


def _makes_one_length(extractor: Any) -> bool:
    """Whether it fills and cuts recordings to one length by itself: Whisper's to 30 seconds, AST's to 1,024 frames."""
    return hasattr(extractor, "n_samples") or getattr(extractor, "max_length", None) is not None


def images_with_text(rows: Sequence[Row], reader: RowReader) -> dict[str, Any]:
    """Images with a text each, or with a chat; every token of the text is a label, and none of an image's.

    A row may be a text alone. Of a model that sees what is asked as a whole (PaliGemma) what is answered is a label, or
    the text where nothing is asked.
    """
    processor, (image, text) = reader.processing_class, reader.inputs
    if reader.text_template is not None:
        rows = [{**row, text: filled(row, reader.text_template)} for row in rows]
    images = [_images(value_of(row, image), _mode(reader.config)) for row in rows]
    texts, suffixes = _texts(rows, [len(own) for own in images], reader)
    options: dict[str, Any] = ({"padding": True} if len(rows) > 1 else {}) | ({"suffix": suffixes} if suffixes else {})
    begin = getattr(reader.tokenizer, "bos_token", None)
    if begin and all(one.startswith(begin) for one in texts):  # the template has written it
        options["add_special_tokens"] = False
    if any(images):  # to a processor a batch of texts alone has no images, not some lists without any
        options["images"] = images
    batch = dict(processor(text=texts, return_tensors="pt", **options))
    if (ids := batch.get("input_ids")) is None:  # of an encoder-decoder, TrOCR's say
        raise ValueError(
            f"a {type(processor).__name__} makes {', '.join(batch)} of images with texts, and no 'input_ids' that the "
            "text could be predicted from: give batches with 'pixel_values' and 'labels'."
        )
    # Images are long runs of one token; what marks them is special too, and an end of text is not.
    mask = batch.get("attention_mask", torch.ones_like(ids)).bool()
    counts = mask & (words_of(ids, processor, reader.config) != IGNORED)
    if suffixes:
        counts &= batch["token_type_ids"] == 1
    counts[:, 1:] &= mask[:, :-1]  # with left padding, the last pad would predict the first token
    return {name: value for name, value in batch.items() if name in reader.accepts} | {
        "labels": ids.masked_fill(~counts, IGNORED)
    }


def _texts(rows: Sequence[Row], images: Sequence[int], reader: RowReader) -> tuple[list[str], list[str]]:
    """The text of each row, and what follows on it, where a model wants that apart."""
    make = prefix_and_suffix if sees_prefix_whole(reader.config) else text_with_images
    made = [
        make(reader.processing_class, row, reader.inputs[1], _answer(row, reader), count)
        for row, count in zip(rows, images, strict=True)
    ]
    pairs = [(one, "") if isinstance(one, str) else one for one in made]
    return [text for text, _ in pairs], [suffix for _, suffix in pairs if suffix]


def _padding(config: Any) -> dict[str, Any]:
    """How a tokenizer pads texts that stand beside an image each."""
    if not pads_to_one_length(config):
        return {"padding": True}
    return {"padding": "max_length", "max_length": config.text_config.max_position_embeddings}


def pads_to_one_length(config: Any) -> bool:
    """Whether all texts have as many tokens, padding among them.

    SigLIP's text encoder is told of none: it was trained so, and the last token's place is where an embedding is.
    """
    return "siglip" in config.model_type


def _caption(row: Row, column: str, reader: RowReader) -> str:
    """The text of an image.

    Raises:
        ValueError: there is none, or there are several.
    """
    found = filled(row, reader.text_template) if reader.text_template is not None else value_of(row, column)
    if not isinstance(found, str) or not found.strip():
        raise ValueError(f"a row has {shown(found)} where one text of its image is needed ({column}).")
    return found


def _images(value: Any, mode: str) -> list[Image]:
    """One image or several; none of a text that has none."""
    if value is None:
        return []
    are_several = isinstance(value, (list, np.ndarray, Tensor)) and _dimensions(value) not in (2, 3)
    return [as_image(one, mode) for one in (value if are_several else [value])]


def _dimensions(value: Any) -> int:
    """Those of an array, or of the lists in lists that a table has one as."""
    if isinstance(value, list):
        return 1 + (_dimensions(value[0]) if value and isinstance(value[0], list) else 0)
    return int(value.ndim)


def _mode(config: Any) -> str:
    """In what colors a model sees, in PIL's words."""
    return "L" if getattr(getattr(config, "vision_config", config), "num_channels", 3) == 1 else "RGB"


def as_image(value: Any, mode: str = "RGB") -> Image:
    """An image in these colors: a PIL image, an array with or without channels, a path, or encoded bytes.

    Raises:
        ValueError: none of these, a file that is no image, or an array with other values than those of one.
    """
    from PIL import Image, ImageOps

    if isinstance(value, Mapping):  # as `datasets` stores what is not decoded
        value = io.BytesIO(value["bytes"]) if value.get("bytes") else value.get("path")
    if isinstance(value, (bytes, bytearray)):  # as a table of Parquet may have them
        value = io.BytesIO(value)
    if isinstance(value, (list, np.ndarray, Tensor)):  # lists are how a table has arrays
        value = Image.fromarray(_pixels(np.asarray(value)))
    try:
        # Upright where a camera has noted how it was held, as in pipelines of transformers and in `datasets`.
        image = ImageOps.exif_transpose(value if isinstance(value, Image.Image) else Image.open(value))
        if image.mode.startswith("I") or image.mode == "F":  # PIL cuts off what is beyond 255: all of it is white
            raise ValueError(
                f"{shown(value)} has {'fractions' if image.mode == 'F' else 'more than 8 bits a pixel'} (mode "
                f"{image.mode!r}): make 8 bits of them in the way that the model was trained with."
            )
        return image.convert(mode)
    except (OSError, AttributeError, TypeError) as error:
        raise ValueError(f"{shown(value)} is no image: {error}.") from error


def _pixels(array: np.ndarray) -> np.ndarray:
    """Whole numbers `[height, width, 3]` or `[height, width]`, 0 to 255, of those, of fractions, or channels first.

    Raises:
        ValueError: other values, or another shape.
    """
    if array.ndim == 3 and array.shape[0] in (1, 3, 4) and array.shape[-1] not in (1, 3, 4):  # as torch has them
        array = array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[-1] == 1:
        array = array[..., 0]
    if not array.size or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[-1] not in (3, 4)):
        raise ValueError(
            f"an image must be [height, width], or have 1, 3 or 4 channels, got an array of shape {list(array.shape)}."
        )
    fractions = array.dtype.kind in "fb"
    highest = 1 if fractions else 255
    if not (array.min() >= 0 and array.max() <= highest):
        raise ValueError(
            f"an image has {array.dtype} values from {array.min():g} to {array.max():g}: give whole numbers from 0 to "
            "255, or floats from 0 to 1; of what a processor has made already make a column 'pixel_values'."
        )
    return np.ascontiguousarray((array * 255.0).round() if fractions else array).astype(np.uint8)


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
        wave = np.asarray(value)
        whole = wave.dtype.kind in "iu"
        wave = wave.astype(np.float32)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"audio must be samples, or what `datasets` decodes with its audio extra (pip install torchcodec), got "
            f"{type(value).__name__}."
        ) from error
    if wave.ndim != 1 or not len(wave):
        raise ValueError(f"audio must be samples [time] of one channel, got an array of shape {list(wave.shape)}.")
    if not np.isfinite(wave).all():
        raise ValueError("a recording holds samples that are no numbers (NaN or infinite): leave it out.")
    loudest = float(np.abs(wave).max())
    if loudest > LOUDEST or (whole and loudest > 1):
        raise ValueError(
            f"audio must be samples from -1 to 1, got some of {loudest:g}: divide those of 16 bits by 32768, "
            "(samples / 32768).astype('float32')."
        )
    return wave


def _check_heard(longest: int, extractor: Any, column: str) -> None:
    """Raise ValueError for speech that an extractor cuts: all that is said is a label, and the end would not be heard.

    Whisper's hears 30 seconds; others have no limit.
    """
    limit = getattr(extractor, "n_samples", None)
    if limit is not None and longest > limit:
        rate = extractor.sampling_rate
        raise ValueError(
            f"a recording lasts {longest / rate:.1f} seconds, and the model hears {limit / rate:g} of them, though its "
            "labels are all that is said. Cut it into shorter ones with a text each, or leave it out: "
            f"dataset.filter(lambda row: len(row[{column!r}]['array']) <= {limit}), of plain arrays "
            f"len(row[{column!r}])."
        )


def _said(row: Row, reader: RowReader) -> str:
    text = reader.raw_label(row)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"a row has {text!r} where the text of what is said is needed ({reader.label}).")
    return text


def _answer(row: Row, reader: RowReader) -> str | None:
    return None if reader.label is None else text_of(row, reader.label, "label_column")


def _tensors(made: Mapping[str, Any], reader: RowReader) -> dict[str, Tensor]:
    return {name: torch.as_tensor(value) for name, value in made.items() if name in reader.accepts}
