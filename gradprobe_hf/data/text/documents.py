"""Documents: the rows of a source -> texts or chats, from the columns that the options name or that are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import NoneType
from typing import Any, TypeAlias

from gradprobe_hf.data.sources import Source, class_names
from gradprobe_hf.data.text.text_options import TextOptions, template_columns
from gradprobe_hf.tasks.columns import filled, has_column, is_beside, named_classes, value_of
from gradprobe_hf.tasks.conversation import CHAT_COLUMNS, Chat, Message, Row, from_json, is_chat, messages_of, shown

# A text, or a chat.
Document: TypeAlias = "str | Chat"

PROMPT, COMPLETION = "prompt", "completion"
_PERHAPS_WANTED = frozenset(("0", "1", "0.0", "1.0", "true", "false"))  # of which nobody can tell, in another type
_PREFERRED = ("chosen", "rejected")  # two answers to one prompt
_WANTED = "label"  # of a completion: false where people did not want it (TRL's unpaired preferences)
_TEXTS = ("string", "large_string")  # the types of columns
_KINDS = {str: "a text", Chat: "a chat"}


def documents(opened: Source, options: TextOptions, order: Iterable[int] | None = None) -> Iterator[Document]:
    """The documents of a source; empty texts are left out.

    Args:
        order: the numbers of rows; by default all rows, one after the other.

    Raises:
        ValueError: no column that can be read, or a row in which it is not what it should be.
    """
    if opened.is_plain:
        texts = (row if isinstance(row, str) else row["text"] for _, row in _rows(opened, order))
        return (_readable(opened, text) for text in texts if text)
    return _read(opened, options, order)


def _readable(opened: Source, text: str) -> str:
    """The text, or ValueError for bytes that are none, though they can be decoded as such."""
    if "\0" in text:
        raise ValueError(f"{opened.name} holds NUL characters: it is no text, or one in UTF-16. Save it as UTF-8.")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:  # half of a pair of UTF-16, which no tokenizer takes
            raise ValueError(f"{opened.name} holds what is no text: {error}.") from error
    return text


def named_columns(opened: Source, options: TextOptions) -> str:
    """Which columns the documents are read from, for a protocol; "": plain text has none, and a template shows its own.

    Raises:
        ValueError: none that can be read.
    """
    if opened.is_plain or options.text_template is not None:
        return ""
    first = _first_row(opened)
    if (column := _column(opened, options, first)) is not None:
        return f" of the column {column!r}"
    where = f", but where {_WANTED!r} is false" if isinstance(first.get(_WANTED, ""), (bool, NoneType)) else ""
    return f" of the columns {PROMPT!r} and {COMPLETION!r}{where}"


def holds_chats(opened: Source, options: TextOptions) -> bool:
    """Whether the documents are chats; the first row with anything in it tells."""
    return not opened.is_plain and isinstance(_first_document(opened, _reader(opened, options)), Chat)


def _read(opened: Source, options: TextOptions, order: Iterable[int] | None) -> Iterator[Document]:
    read = _reader(opened, options)
    kind = type(_first_document(opened, read))
    for number, row in _rows(opened, order):
        if document := _document(opened, read, number, row):
            if not isinstance(document, kind):
                raise ValueError(
                    f"{opened.name}, row {number + 1}: this is {_KINDS[type(document)]}, and the first row is "
                    f"{_KINDS[kind]}. Give rows of one kind, two sources say."
                )
            yield document


def _first_document(opened: Source, read: Callable[[Row], Document]) -> Document:
    """That of the first row with anything in it; an empty text where there is none."""
    rows = _rows(replace(opened, rows=opened.beginning))
    return next((document for number, row in rows if (document := _document(opened, read, number, row))), "")


def _document(opened: Source, read: Callable[[Row], Document], number: int, row: Row) -> Document:
    try:
        document = read(row)
        # It ends documents where they are joined: one that is in a text would do so, too.
        if isinstance(document, str) and "\0" in document:
            raise ValueError("its text holds a NUL character. Take it out, or leave such rows out (dataset.filter).")
    except ValueError as error:
        raise ValueError(f"{opened.name}, row {number + 1}: {error}") from error
    return document


def _rows(opened: Source, order: Iterable[int] | None = None) -> Iterator[tuple[int, Any]]:
    """Rows and their numbers from 0."""
    rows: Any = opened.rows
    try:
        yield from enumerate(rows) if order is None else ((number, rows[number]) for number in order)
    except UnicodeDecodeError as error:
        raise ValueError(f"{opened.name} cannot be read as text: {error}. Save it as UTF-8.") from error


def _first_row(opened: Source) -> Row:
    if opened.first_row is None:
        raise ValueError(f"{opened.name} is empty: it holds no rows.")
    first: Row = opened.first_row
    return first


def _reader(opened: Source, options: TextOptions) -> Callable[[Row], Document]:
    """What makes a document of a row."""
    first = _first_row(opened)
    if (template := options.text_template) is not None:
        for name in template_columns(template):
            if not has_column(first, name):
                raise ValueError(
                    f"text_template={template!r} (--text-template) names the column {name!r}, which "
                    f"{opened.name} does not have; its columns are {', '.join(map(repr, first))}."
                )
        names = {name: class_names(opened.rows, name) for name in template_columns(template)}
        return lambda row: filled(named_classes(row, names), template)
    column = _column(opened, options, first)
    if column is None:
        return _prompt_and_completion
    is_chats = options.text_column is None and column in CHAT_COLUMNS
    return partial(_chat_column if is_chats or is_chat(value_of(first, column)) else _one_column, column=column)


def _column(opened: Source, options: TextOptions, first: Row) -> str | None:
    """The column to read; None: that of prompts and that of completions.

    Raises:
        ValueError: it is not there, or more than one may be meant.
    """
    columns = ", ".join(map(repr, first))
    if options.text_column is not None:
        if not has_column(first, options.text_column):
            raise ValueError(
                f"text_column={options.text_column!r} (--text-column): {opened.name} has no such column; its columns "
                f"are {columns}."
            )
        return options.text_column
    if chat := next((name for name in CHAT_COLUMNS if name in first), None):
        return chat
    if PROMPT in first and COMPLETION in first:
        return None
    if "text" in first:
        return "text"
    texts = _may_be_texts(opened, first)
    found = [name for name, value in first.items() if is_chat(value)] or texts
    if len(found) == 1:
        return found[0]
    several = r"\n".join(f"{{{name}}}" for name in texts or list(first))
    raise ValueError(
        f"{opened.name} has no 'text' column; its columns are {columns}. Name the one to use with text_column "
        f'(--text-column), or several with a text_template (--text-template "{several}").'
    )


def _may_be_texts(opened: Source, first: Row) -> list[str]:
    """Columns of texts, and those of which a first row says too little: it may hold nothing there, or a list.

    Not those that only say which text a row has: a model would be calibrated on the numbers of its rows.
    """
    types = {name: getattr(feature, "dtype", None) for name, feature in (_features(opened) or {}).items()}

    def may_be(name: str, value: Any) -> bool:
        is_text = isinstance(value, str) if value is not None else types.get(name, _TEXTS[0]) in _TEXTS
        return is_text or _is_list_of(str, value)

    return [name for name, value in first.items() if may_be(name, value) and not is_beside(name)]


def _features(opened: Source) -> Mapping[str, Any] | None:
    rows: Any = opened.rows
    return getattr(rows, "features", None)  # a stream that was mapped does not know them


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, kind) for one in value)


def _chat_column(row: Row, column: str) -> Document:
    """What a column of chats holds: as JSON too, as tables without lists have it."""
    value = from_json(value_of(row, column))
    if isinstance(value, str) and value.lstrip().startswith(("[{", "{")):
        raise ValueError(
            f"the column {column!r} must hold a list of messages, or one as JSON, and holds {shown(value)}, which "
            "is neither: write it with json.dumps."
        )
    if isinstance(value, list) and not value:
        return ""  # as an empty text: it is left out
    return _one_column({**row, column: value}, column)


def _one_column(row: Row, column: str) -> Document:
    value = value_of(row, column)
    if isinstance(value, str):
        return value
    if _is_list_of(Mapping, value):
        turns = messages_of(value, column)
        if column in _PREFERRED and turns[0]["role"] == "assistant":  # what it answers first
            turns = [*_turns(row.get(PROMPT), PROMPT, "user"), *turns]
        return Chat.of_row(turns, row)
    remedy = f" Leave such rows out: dataset.filter(lambda row: row[{column!r}])." if value is None else ""
    raise ValueError(
        f"the column {column!r} must hold a text, or a list of messages, and holds {shown(value)}.{remedy}"
    )


def _prompt_and_completion(row: Row) -> Document:
    """A chat: a prompt of text is the user's message, a completion of text the assistant's.

    One that was not wanted is left out: a model is not to be kept as good at it.
    """
    wanted = row.get(_WANTED)
    if not isinstance(wanted, bool) and str(wanted).lower() in _PERHAPS_WANTED:
        raise ValueError(
            f"the column {_WANTED!r} holds {wanted!r}: it says of a completion whether it was wanted, as true or "
            f"false. Write it so (dataset.map), or take the column out if it says something else."
        )
    if wanted is False:
        return ""
    turns: list[Message] = []
    for column, role in ((PROMPT, "user"), (COMPLETION, "assistant")):
        if not isinstance(value := row[column], (str, list)):
            raise ValueError(f"the column {column!r} must hold a text, or a list of messages, holds {shown(value)}.")
        turns += _turns(value, column, role)
    return Chat.of_row(turns, row)


def _turns(value: Any, column: str, role: str) -> list[Message]:
    """A text as what somebody says, or messages; none of anything else."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return messages_of(value, column) if isinstance(value, list) else []
