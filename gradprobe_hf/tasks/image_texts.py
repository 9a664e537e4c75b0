"""Image texts: a row of images with a text, or with the messages of a chat -> the one text that a processor reads.

A chat template puts images where the model had them in training; a processor without one has its image token in front.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gradprobe_hf.tasks.columns import Row, text_of, value_of
from gradprobe_hf.tasks.conversation import Chat, from_json, is_chat, messages_of, on_one_day

PLACE = "<image>"  # where an image goes, in the data that LLaVA was trained on
# Types of configuration of which each token of a prefix sees all of it, `token_type_ids` being 0: what is predicted has
# to be a suffix.
_PREFIXED = ("paligemma",)


def sees_prefix_whole(config: Any) -> bool:
    """Whether a model sees what comes first, an image and what is asked about it, in both directions."""
    return getattr(config, "model_type", None) in _PREFIXED


def prefix_and_suffix(processor: Any, row: Row, column: str, answer: str | None, images: int) -> tuple[str, str]:
    """What a model sees whole, and what it predicts: the answer, or the text itself where there is none.

    Raises as `text_with_images`.
    """
    token = str(getattr(processor, "image_token", PLACE))
    text = text_with_images(processor, row, column, None, images).replace(token, "").strip("\n")
    return (token * images, text) if answer is None else (f"{token * images}{text}", answer)


def text_with_images(processor: Any, row: Row, column: str, answer: str | None, images: int) -> str:
    """The text of a row, with a place for each of its images.

    Args:
        column: of a text, or of messages.
        answer: what the assistant says to the text; None: nothing.

    Raises:
        ValueError: other places than images, a chat without a template, or one that the template refuses.
    """
    value, token = value_of(row, column), str(getattr(processor, "image_token", PLACE))
    if is_chat(value):
        chat = Chat.of_row(messages_of(from_json(value), column), row)
        if not getattr(processor, "chat_template", None):
            raise ValueError(
                f"the column {column!r} holds chats, and this {type(processor).__name__} has no chat template: pass a "
                "processor that has one (processing_class=), or name a column of texts (text_column=, --text-column), "
                f"with {token} where the image goes."
            )
        if answer is not None:
            raise ValueError(
                f"the column {column!r} holds chats, which have their answers: leave label_column unset, or name a "
                "column of texts (text_column=, --text-column)."
            )
    else:
        text = text_of(row, column, "the data set")
        if not getattr(processor, "chat_template", None):
            whole = text if answer is None else f"{text}\n{answer}"
            _check_places(whole.count(token), images)
            return whole if token in whole or not images else f"{token * images}\n{whole}"
        answered = [] if answer is None else [{"role": "assistant", "content": answer}]
        chat = Chat([{"role": "user", "content": text}, *answered])
    return _rendered(processor, chat, images, re.compile(f"{PLACE}|{re.escape(token)}"))


def _rendered(processor: Any, chat: Chat, images: int, place: re.Pattern[str]) -> str:
    messages = [{**one, "content": _parts(one.get("content"), place)} for one in chat.messages]
    places = sum(part.get("type") == "image" for one in messages for part in one["content"])
    _check_places(places, images)
    asked = next((one for one in messages if one["role"] == "user"), None)
    if not places and asked is not None:
        asked["content"] = [*[{"type": "image"}] * images, *asked["content"]]
    told: dict[str, Any] = {"tools": chat.tools} if chat.tools else {}
    if isinstance(template := processor.chat_template, str):  # of several by name the processor chooses
        told["chat_template"] = on_one_day(template)
    try:
        return str(processor.apply_chat_template(messages, **{**chat.template_options, **told}))
    except Exception as error:  # templates raise what they like
        raise ValueError(f"the chat template cannot render these messages: {error}") from error


def _check_places(places: int, images: int) -> None:
    if places not in (0, images):
        raise ValueError(
            f"a row has {images} images, and its text has places for {places} ({PLACE}, or parts of the type 'image'): "
            "give one for each, or none, and they go in front."
        )


def _parts(content: Any, place: re.Pattern[str]) -> list[Mapping[str, Any]]:
    """What a message says as parts, images and texts, which templates of such models go through."""
    if not isinstance(content, str):
        return list(content or [])
    parts: list[Mapping[str, Any]] = []
    for number, text in enumerate(place.split(content)):
        parts += [{"type": "image"}] if number else []
        # The line break between an image and its text is LLaVA's; templates have one of their own where it belongs.
        parts += [{"type": "text", "text": text.strip("\n")}] if text.strip() else []
    return parts
