"""Chats: the messages of a conversation, and its tools -> token ids, through the tokenizer's own chat template.

The template renders the special tokens itself, a BOS among them, so that none are added when the text is tokenised.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gradprobe_hf.tasks.conversation import (
    Chat,
    Message,
    arguments_of,
    as_written,
    is_learnt,
    on_one_day,
    with_written_arguments,
)

ASSISTANT = "assistant"
# What parts of a content are called that no text is: those of transformers, and of OpenAI.
_MEDIA = {
    f"{before}{medium}{after}"
    for medium in ("image", "video", "audio")
    for before in ("", "input_")
    for after in ("", "_url")
}
_ANOTHER = "another-answer-9f2c"  # what no template writes by itself
_PART = re.compile(r"""["']type["']\s*:\s*["'](text|image|audio|video)""")  # of a content, written as data
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class RenderedChat:
    """A conversation in tokens.

    Attributes:
        text: as the template renders it.
        ids: its tokens.
        counted: of each token whether it is part of the loss.
    """

    text: str
    ids: list[int]
    counted: list[bool]


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer and its chat template.

    Attributes:
        with_tools: the one of chats with tools, where it has one of their own.
    """

    tokenizer: Any
    template: str
    with_tools: str | None = None

    @classmethod
    def of(cls, processing_class: Any, name: str) -> ChatTemplate:
        """That of a tokenizer, or of a processor.

        Raises:
            ValueError: there is none. `name` is of the data, for the error.
        """
        tokenizer = getattr(processing_class, "tokenizer", processing_class)
        found = [getattr(one, "chat_template", None) for one in (tokenizer, processing_class)]
        template = next((one for one in found if one), None)
        with_tools = None
        if isinstance(template, dict):  # several by name, of which transformers takes this one for tools
            with_tools, template = template.get("tool_use"), template.get("default")
        if template is None:
            raise ValueError(
                f"{name} holds chats, and this {type(tokenizer).__name__} has no chat template. Give a tokenizer that "
                "has one (processing_class=), or read the columns as plain text with a text_template "
                '(--text-template "{prompt} {completion}") or a text_column.'
            )
        return cls(tokenizer, template, with_tools)

    def render(self, chat: Chat, assistant_only: bool) -> RenderedChat:
        """The whole conversation.

        Args:
            assistant_only: count only what the assistant says, the token that ends its turn included, in messages that
                do not have `weight` 0 (or `train` false).

        Raises:
            ValueError: the template refuses the messages, or does not tell what the assistant says.
        """
        _check_text_alone(chat)
        chat = self._with_plain_contents(self._with_arguments_read(chat))
        text = self._text(chat)
        if not _is_said(chat, text):
            chat = self._with_contents_read(chat, text)
            text = self._text(chat)
        if not assistant_only:
            ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            return RenderedChat(text, list(ids), [True] * len(ids))
        said = [at for at, message in enumerate(chat.messages) if message["role"] == ASSISTANT]
        learnt = {at for at in said if is_learnt(chat.messages[at])}
        if not _GENERATION.search(self._of(chat)):
            # A first message answers nobody, and before it is nothing that a template could render.
            ids, counted = self._within(text, self._spans(chat, text, learnt - {0}))
            return RenderedChat(text, ids, counted)
        found = self.tokenizer.apply_chat_template(
            **self._asked(chat), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, counted = list(found["input_ids"]), [bool(one) for one in found["assistant_masks"]]
        if others := set(said) - learnt:  # the template marks them all
            _, left_out = self._within(text, self._spans(chat, text, others))
            counted = [one and not other for one, other in zip(counted, left_out, strict=True)]
        return RenderedChat(text, ids, counted)

    def _within(self, text: str, spans: list[tuple[int, int]]) -> tuple[list[int], list[bool]]:
        """The tokens of a rendered chat, and of each whether it begins inside one of the spans."""
        if not getattr(self.tokenizer, "is_fast", False):
            raise ValueError(
                f"assistant_only_loss needs a fast tokenizer, which tells where in the text a token is, and this "
                f"{type(self.tokenizer).__name__} is none. Count all tokens: assistant_only_loss=False."
            )
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        starts = [start for start, _ in found["offset_mapping"]]
        inside = [any(first <= start < last for first, last in spans) for start in starts]
        return list(found["input_ids"]), inside

    def _with_plain_contents(self, chat: Chat) -> Chat:
        """The parts of a content joined, `[{"type": "text", "text": ...}]`, where the template does not read them.

        Such a template writes the list into the text, in Python's form or as JSON, or fails at it.
        """
        parts = [one["content"] for one in chat.messages if isinstance(one.get("content"), list)]
        if not parts:
            return chat
        try:
            rendered = self._text(chat)
        except ValueError:
            rendered = None
        said = "".join(str(part.get("text", "")) for content in parts for part in content if isinstance(part, Mapping))
        if rendered is not None and len(_PART.findall(rendered)) <= len(_PART.findall(said)):
            return chat
        return replace(chat, messages=[_joined(message) for message in chat.messages])

    def _with_arguments_read(self, chat: Chat) -> Chat:
        """The arguments of calls as JSON, where a template takes them for text: it writes Python's form of a dict, or
        fails at it, and writes JSON as it is."""
        given = [arguments for message in chat.messages for arguments in arguments_of(message)]
        if not given:
            return chat
        # Without what else is said, which may quote them.
        bare = replace(chat, messages=[{**message, "content": ""} for message in chat.messages])
        as_dicts = self._text_or_none(bare)
        if as_dicts is not None and not any(repr(arguments) in as_dicts for arguments in given):
            return chat
        written = [with_written_arguments(message) for message in chat.messages]
        as_json = self._text_or_none(replace(bare, messages=[{**message, "content": ""} for message in written]))
        takes_text = as_json is not None and any(_stands_bare(as_written(arguments), as_json) for arguments in given)
        return replace(chat, messages=written) if takes_text else chat

    def _text_or_none(self, chat: Chat) -> str | None:
        try:
            return self._text(chat)
        except ValueError:
            return None

    def _with_contents_read(self, chat: Chat, text: str) -> Chat:
        """The contents as parts, where a template reads nothing else and renders texts as nothing (LLaVA, SmolVLM).

        Args:
            text: in which no content is found as it is: a template may write it in another way, too.

        Raises:
            ValueError: what the messages say makes no difference to the template.
        """
        if self._text(replace(chat, messages=[_saying(one, _ANOTHER) for one in chat.messages])) != text:
            return chat
        in_parts = [
            {**one, "content": [{"type": "text", "text": one["content"]}]} if _says(one) else one
            for one in chat.messages
        ]
        chat = replace(chat, messages=in_parts)
        if not _is_said(chat, self._text(chat)):
            raise ValueError(
                "the chat template renders nothing of what these messages say: give a tokenizer with a template that "
                "reads their contents (processing_class=), or name a column of plain text (text_column)."
            )
        return chat

    def _spans(self, chat: Chat, text: str, turns: Collection[int]) -> list[tuple[int, int]]:
        """Where in the rendered text the assistant has these turns: each is what it adds to the turns before it."""
        spans = []
        for at in turns:
            asked = replace(chat, messages=chat.messages[:at])
            before = self._text(asked, add_generation_prompt=True) if at else ""
            upto = self._text(replace(chat, messages=chat.messages[: at + 1]))
            if not (upto.startswith(before) and text.startswith(upto)):
                raise ValueError(
                    "the chat template renders earlier turns in another way once later ones follow, so that what the "
                    "assistant says cannot be told. Set assistant_only_loss=False (--assistant-only-loss off), or use "
                    "a template that marks it with {% generation %}."
                )
            first, said = len(before), chat.messages[at].get("content")
            if at and isinstance(said, str) and before == self._text(asked):
                # No prompt for an answer: what the template writes in front of one, the role say, is not the answer.
                # A space is, for tokens begin with it. Another answer tells where it begins: a short one may be in the
                # role's name, too.
                other = {**chat.messages[at], "content": _ANOTHER}
                shown = self._text(replace(chat, messages=[*chat.messages[:at], other]))
                front = shown[first:].partition(_ANOTHER)[0] if _ANOTHER in shown[first:] else ""
                first += len(front.rstrip(" ")) if upto[first:].startswith(front) else 0
            # The line break behind the token that ends a turn is not the assistant's.
            spans.append((first, len(upto.rstrip())))
        return spans

    def _text(self, chat: Chat, add_generation_prompt: bool = False) -> str:
        asked = self._asked(chat) | {"add_generation_prompt": add_generation_prompt}
        try:
            return str(self.tokenizer.apply_chat_template(**asked, tokenize=False))
        except Exception as error:  # templates raise what they like
            raise ValueError(f"the chat template cannot render these messages: {error}") from error

    def _of(self, chat: Chat) -> str:
        return on_one_day(self.with_tools if chat.tools and self.with_tools else self.template)

    def _asked(self, chat: Chat) -> dict[str, Any]:
        given = {"conversation": list(chat.messages), "chat_template": self._of(chat), "tools": chat.tools}
        return {**chat.template_options, **given}


def _check_text_alone(chat: Chat) -> None:
    """Raise ValueError for images and recordings inside of messages: no template puts more than a place there."""
    for message in chat.messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = str(part.get("type")) if isinstance(part, Mapping) else ""
            if kind in _MEDIA:
                raise ValueError(
                    f"a message holds a part of type {kind!r}, and chats in a column of messages are read as text: "
                    "give images in a column 'images' beside the messages, leave such chats out, or give batches as "
                    "the processor makes them."
                )


def _stands_bare(written: str, text: str) -> bool:
    """Whether JSON stands in a text as it is, and in no quotes."""
    at = text.find(written)
    return at >= 0 and text[max(0, at - 1) : at] not in ('"', "'")


def _says(message: Message) -> bool:
    """Whether its content is a text, and not blank."""
    return isinstance(content := message.get("content"), str) and bool(content.strip())


def _saying(message: Message, text: str) -> Message:
    return {**message, "content": text} if _says(message) else message


def _is_said(chat: Chat, text: str) -> bool:
    """Whether any content is in a rendered text as it is, or none has one."""
    contents = [content for message in chat.messages for content in _texts_of(message) if content.strip()]
    return not contents or any(content.strip() in text for content in contents)


def _texts_of(message: Message) -> list[str]:
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
    return [text for text in texts if isinstance(text, str)]


def _joined(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    if other := [part for part, text in zip(content, texts, strict=True) if not isinstance(text, str)]:
        kind = other[0].get("type") if isinstance(other[0], Mapping) else type(other[0]).__name__
        raise ValueError(
            f"a message holds a part of type {kind!r}, and this chat template reads text alone: leave such chats out, "
            "or prune the model that reads them with its processor."
        )
    return {**message, "content": "".join(map(str, texts))}
