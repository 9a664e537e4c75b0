"""Languages: what a decoder that knows several is told in front of a text, in calibration as when it writes."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


def told_of_speech(tokenizer: Any, generation: Any) -> tuple[int, ...]:
    """Tokens of the language and of what to do, which Whisper's `generate` puts in front, and this tokenizer does not.

    Empty where the tokenizer writes them, and of a model of one language. Where neither it nor the generation
    configuration names a language, `generate` lets the model hear which it is; a calibration does without, and warns.

    Args:
        generation: the model's generation configuration; None: it has none.

    Raises:
        ValueError: a language that is none of the model's.
    """
    languages = getattr(generation, "lang_to_id", None)
    if not languages or getattr(tokenizer, "language", None) is not None:
        return ()
    language = getattr(generation, "language", None)
    if language is None:
        logger.warning(
            "the model writes several languages, and neither its tokenizer nor its generation configuration names one: "
            "it is calibrated without the token of a language that it sees when it transcribes. Set it, "
            "processor.tokenizer.set_prefix_tokens(language='english', task='transcribe') or "
            "model.generation_config.language = 'english', and give the model and processing_class=processor, or save "
            "them in the model's folder"
        )
        return ()
    tasks = getattr(generation, "task_to_id", None) or {}
    task = tasks.get(getattr(generation, "task", None) or "transcribe")
    return (_language_id(language, languages), *(() if task is None else (task,)))


def _language_id(language: str, languages: dict[str, int]) -> int:
    """The token of a language that is called "english", "en" or "<|en|>"."""
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    name = language.lower()
    token = name if name in languages else f"<|{TO_LANGUAGE_CODE.get(name, name)}|>"
    if token not in languages:
        raise ValueError(
            f"generation_config.language={language!r} is none of the model's: choose one of "
            f"{', '.join(sorted(one.strip('<|>') for one in languages))}."
        )
    return languages[token]


def check_written(tokenizer: Any) -> None:
    """Raise ValueError where a tokenizer of several languages would mark what is to be written as the source's.

    NLLB's, mBART's and their like do so where no `tgt_lang` was set.
    """
    if getattr(tokenizer, "tgt_lang", "") is None:
        source = getattr(tokenizer, "src_lang", None)
        raise ValueError(
            f"{type(tokenizer).__name__} knows no target language (tgt_lang), and would mark the texts to write as "
            f"{source!r}: load it with both, AutoTokenizer.from_pretrained(..., src_lang={source!r}, tgt_lang=...), "
            "and pass processing_class=, or save it in the model's folder."
        )


def begun_in(tokenizer: Any, generation: Any) -> dict[str, int]:
    """What `generate` is called with besides, so that it writes the tokenizer's target language.

    NLLB's and M2M100's checkpoints name none: a translator is told one in every call.
    """
    language = getattr(tokenizer, "tgt_lang", None)
    if language is None or getattr(generation, "forced_bos_token_id", None) is not None:
        return {}
    token = getattr(tokenizer, "get_lang_id", tokenizer.convert_tokens_to_ids)(language)
    return {} if token in (None, tokenizer.unk_token_id) else {"forced_bos_token_id": token}
