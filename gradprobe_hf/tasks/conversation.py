"""Chats: the messages of a row, and the tools beside them, in the forms that data sets have them -> `Chat`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeAlias

Message: TypeAlias = Mapping[str, Any]
Row: TypeAlias = Mapping[str, Any]

CHAT_COLUMNS = ("messages", "conversations")  # what columns of chats usually are called, in TRL and in ShareGPT
SYSTEM = "system"  # the column that ShareGPT has beside them, and the role of who says what is in it
TOOLS, TEMPLATE_OPTIONS = "tools", "chat_template_kwargs"  # the columns beside the messages, as TRL calls them
FUNCTIONS = "functions"  # what OpenAI called tools at first
# Who speaks, in ShareGPT's `{"from": ..., "value": ...}` -> in a chat template.
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
}
# Arguments of apply_chat_template that are no variables of the template.
_OWN_ARGUMENTS = {"conversation", "chat_template", "tools", "tokenize", "add_generation_prompt", "return_dict"}
_DAY = re.compile(r"""\bstrftime_now\(\s*(["'])(.*?)\1\s*\)""")
THAT_DAY = datetime(2025, 1, 1)  # what templates that ask for the day are told
_WEIGHTS = ("weight", "train")  # how OpenAI's files and Axolotl's say that a message is not to be learnt: 0, false


@dataclass(frozen=True)
class Chat:
    """A conversation, and what else the template is told of it.

    Attributes:
        messages: dicts with `role` and `content`.
        tools: the JSON schemas of the functions that the assistant may call.
        template_options: further variables of the template, `{"enable_thinking": False}` say.
    """

    messages: list[Message]
    tools: list[Any] | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_row(cls, messages: list[Message], row: Row) -> Chat:
        """Messages, with the tools and template options of the row that they are in.

        Its system prompt comes first, unless the messages begin with one of their own.

        Raises:
            ValueError: one of these columns holds something else.
        """
        system = row.get(SYSTEM)
        if system is not None and not isinstance(system, str):
            raise ValueError(
                f"the column {SYSTEM!r} beside the messages is their system prompt, and must hold a text: it holds "
                f"{shown(system)}. Leave out a column that is something else."
            )
        if system and messages and messages[0]["role"] != SYSTEM:
            messages = [{"role": SYSTEM, "content": system}, *messages]
        tools, options = _parsed(row, TOOLS, list) or _functions(row), _parsed(row, TEMPLATE_OPTIONS, dict)
        if taken := _OWN_ARGUMENTS.intersection(options or ()):
            raise ValueError(
                f"the column {TEMPLATE_OPTIONS!r} beside the messages holds variables of the chat template, and "
                f"{sorted(taken)[0]!r} is an argument of apply_chat_template, which is set here. Leave it out."
            )
        return cls(messages, tools or None, options or {})


def on_one_day(template: str) -> str:
    """A chat template that is told one and the same day: what is resumed on another day would be another run.

    >>> on_one_day("{{ strftime_now('%d %b %Y') }}")
    "{{ '01 Jan 2025' }}"
    """
    return _DAY.sub(lambda asked: repr(THAT_DAY.strftime(asked[2])), template)


def is_chat(value: Any) -> bool:
    """Whether a value is the messages of a chat, or these as JSON: its form tells, whatever its column is called.

    >>> is_chat([{"from": "human", "value": "Why?"}]), is_chat([{"name": "Ada"}]), is_chat("[words]")
    (True, False, False)
    """
    value = from_json(value)
    return isinstance(value, list) and bool(value) and all(map(_is_message, value))


def from_json(value: Any) -> Any:
    """The list that a text is as JSON; anything else as it is."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(json.JSONDecodeError):
            return json.loads(value)
    return value


def _is_message(value: Any) -> bool:
    names = set(value) if isinstance(value, Mapping) else set()
    return {"from", "value"} <= names or ("role" in names and not names.isdisjoint({"content", "tool_calls"}))


def messages_of(value: list[Any], column: str) -> list[Message]:
    """The messages of a chat, checked; those of ShareGPT in the names that templates know.

    Raises:
        ValueError: one is no message, or is said by somebody whom no template knows.
    """
    return [_message(one, column) for one in value]


def _message(value: Any, column: str) -> Message:
    if isinstance(value, Mapping):
        message = without_nulls(value)
        if "role" in message and ("content" in message or "tool_calls" in message):
            return _with_plain_arguments(message)
        if message.get("from") in _SHAREGPT_ROLES and "value" in message:
            weights = {name: message[name] for name in _WEIGHTS if name in message}
            return {"role": _SHAREGPT_ROLES[message["from"]], "content": message["value"], **weights}
    raise ValueError(
        f"a message in the column {column!r} must be a dict with 'role' and 'content', or with 'from' (one of "
        f"{', '.join(map(repr, _SHAREGPT_ROLES))}) and 'value', got {shown(value)}."
    )


def is_learnt(message: Message) -> bool:
    """Whether what the assistant says in a message may count: its `weight` or `train` can say that it does not.

    Raises:
        ValueError: it says something between.

    >>> is_learnt({"role": "assistant", "content": "No."}), is_learnt({"role": "assistant", "weight": 0})
    (True, False)
    """
    for name in _WEIGHTS:
        asked = message.get(name, 1)
        if asked not in (0, 1):
            raise ValueError(
                f"a message has {name!r}: {asked!r}, and what the assistant says counts (1, true) or does not (0, "
                f"false). Round them, or leave {name!r} out of the messages."
            )
        if not asked:
            return False
    return True


def _with_plain_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """The arguments of its calls as dicts: OpenAI's files have them as JSON, which templates would encode once more."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_plain_argument(call) for call in calls]}


def _with_plain_argument(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if isinstance(function, Mapping) and isinstance(arguments := function.get("arguments"), str):
        with suppress(json.JSONDecodeError):
            if isinstance(parsed := json.loads(arguments), dict):
                return {**call, "function": {**function, "arguments": parsed}}
    return call


def arguments_of(message: Message) -> list[dict[str, Any]]:
    """Those of its calls that are dicts, and not empty."""
    calls = message.get("tool_calls") or ()
    functions = [call.get("function") for call in calls if isinstance(call, Mapping)]
    found = [one.get("arguments") for one in functions if isinstance(one, Mapping)]
    return [one for one in found if isinstance(one, dict) and one]


def with_written_arguments(message: Message) -> Message:
    """The arguments of its calls as JSON."""
    if not arguments_of(message):
        return message
    return {**message, "tool_calls": [_with_written_argument(call) for call in message["tool_calls"]]}


def _with_written_argument(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(arguments := function.get("arguments"), dict):
        return call
    return {**call, "function": {**function, "arguments": as_written(arguments)}}


def as_written(arguments: dict[str, Any]) -> str:
    """Arguments of a call as OpenAI's API writes them."""
    return json.dumps(arguments, ensure_ascii=False)


def _functions(row: Row) -> list[dict[str, Any]]:
    """As tools; none of a column of that name that holds something else."""
    found = without_nulls(from_json(row.get(FUNCTIONS)))
    if not isinstance(found, list) or not all(isinstance(one, Mapping) and "name" in one for one in found):
        return []
    return [{"type": "function", "function": one} for one in found]


def _parsed(row: Row, column: str, kind: type) -> Any:
    """What a column holds, which may be written as JSON: rows with different schemas fit into no table otherwise."""
    value = without_nulls(row.get(column))
    if isinstance(value, str) and value:
        with suppress(json.JSONDecodeError):
            value = json.loads(value)  # no table fills what is written: a null in there is meant
    if value and not isinstance(value, kind):
        raise ValueError(
            f"the column {column!r} beside the messages is for the chat template, and must hold a {kind.__name__}, or "
            f"one as JSON: it holds {shown(value)}. Leave out a column that is something else."
        )
    return value


def without_nulls(value: Any) -> Any:
    """A value without the fields that are None: a table has all fields in each row, and None where a row has it not.

    >>> without_nulls([{"name": "get_time", "parameters": {"city": None, "zone": {"type": "string"}}}])
    [{'name': 'get_time', 'parameters': {'zone': {'type': 'string'}}}]
    """
    if isinstance(value, Mapping):
        return {name: without_nulls(one) for name, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def shown(value: Any) -> str:
    """A value for an error: its type, and its beginning."""
    if value is None:
        return "nothing (null)"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
