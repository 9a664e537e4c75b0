"""The processing class of a model: the tokenizer or processor stored beside it, if it knows anything."""

from __future__ import annotations

import logging
from typing import Any

from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import FEATURE_EXTRACTOR_NAME, PROCESSOR_NAME, VIDEO_PROCESSOR_NAME

from gradprobe_hf.model.loading.load import SOURCE_KWARGS
from gradprobe_hf.model.loading.stored_files import stored_file
from gradprobe_hf.runtime.paths import published_as

logger = logging.getLogger(__name__)

# Of what reads images, sound and video: the processor, and each of its parts.
PROCESSOR_FILES = (PROCESSOR_NAME, FEATURE_EXTRACTOR_NAME, VIDEO_PROCESSOR_NAME)


def load_processing_class(model: PreTrainedModel, name: str | None = None, **from_pretrained_kwargs: Any) -> Any:
    """The tokenizer (or processor) stored beside the model, or None.

    Args:
        name: where it is, if not beside the model.
    """
    name = name or model.name_or_path
    if not name:
        return None
    source = {key: value for key, value in from_pretrained_kwargs.items() if key in SOURCE_KWARGS}
    reason = ""
    # A processor holds the tokenizer of a model that has both. A GGUF file has none, and takes seconds to say so.
    for auto in (AutoTokenizer,) if "gguf_file" in source else (AutoProcessor, AutoTokenizer):
        try:
            found = auto.from_pretrained(name, **source)
        except Exception as error:  # tokenizers raises plain Exception; a model without a tokenizer can still be pruned
            reason = " ".join(str(error).split())
            continue
        if not is_empty(found):
            if isinstance(found, PreTrainedTokenizerBase):
                _warn_of_unread(model, reason or "transformers knows no processor for it", source)
            return found
        reason = "no file has its vocabulary"
        if (part := _without_tokenizer(found)) is not None:
            logger.warning("no tokenizer was found for %s: %s. Its %s is taken.", name, reason, type(part).__name__)
            return part
    if "gguf_file" not in source and (part := _part_alone(name, source)) is not None:
        logger.info("no tokenizer was found for %s; its %s is taken", name, type(part).__name__)
        return part
    logger.warning("no tokenizer or processor was found for %s: %s", name, reason)
    return None


def about_missing_processing(model: PreTrainedModel, processing_class: Any) -> list[str]:
    """What a report says where a model that came from somewhere brings nothing to read its inputs with."""
    name = model.name_or_path
    if processing_class is not None or not name:
        return []
    where = published_as(name)
    return [
        f"No tokenizer or processor was found for {where}, and a checkpoint that is written "
        "has none: put its files beside the model, or give a processing_class."
    ]


def _part_alone(name: str, source: dict[str, Any]) -> Any:
    """What reads sound or images where no tokenizer is: its model's processor would need one. None of a text model."""
    for auto in (AutoFeatureExtractor, AutoImageProcessor):
        try:
            return auto.from_pretrained(name, **source)
        except Exception as error:  # as above
            logger.debug("no %s of %s: %s", auto.__name__, name, error)
    return None


def _warn_of_unread(model: PreTrainedModel, reason: str, source: dict[str, Any]) -> None:
    """Say that the tokenizer is not all that the model has. Args: reason: why it is all that was loaded."""
    if "gguf_file" in source:  # of which no processor was looked for
        return
    if files := [file for file in PROCESSOR_FILES if stored_file(model, file)]:
        named = ", ".join(files)
        logger.warning(
            "%s of %s cannot be used: %s. Its tokenizer alone is loaded.", named, model.name_or_path, reason.rstrip(".")
        )


def is_empty(processing_class: Any) -> bool:
    """Whether a tokenizer, or that of a processor, knows no text: every word is unknown to it, or nothing at all.

    transformers makes one of special tokens alone where the files with the vocabulary are missing, without a word.
    """
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    try:
        known = set(tokenizer.get_vocab())
        special = {*tokenizer.all_special_tokens, *map(str, tokenizer.added_tokens_decoder.values())}
    except (AttributeError, NotImplementedError):  # no tokenizer, or one of the user's
        return False
    return len(known - special) <= 1  # SentencePiece's are left with the mark of a word's beginning


def _without_tokenizer(processor: Any) -> Any:
    """The part of a processor that reads images or sound; None of a tokenizer."""
    parts = [getattr(processor, part, None) for part in ("feature_extractor", "image_processor")]
    return next((part for part in parts if part is not None), None)
