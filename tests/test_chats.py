"""Chats: rendered by their template, and which of their tokens the assistant says."""

from __future__ import annotations

import json

import pytest
import torch

from gradprobe_hf.data.text.chat import ChatTemplate
from gradprobe_hf.tasks.conversation import Chat
from tests.chats import (
    CHAT,
    CHATML,
    FORGETFUL,
    INSTRUCT,
    LONG,
    MARKED,
    TURNS,
    UNPROMPTED,
    WITH_BOS,
    chatting,
    one_chat,
    said,
    written,
)
from tests.test_calibration import TOKENIZER, ids, load


@pytest.mark.parametrize("as_table", [lambda chat: chat, json.dumps], ids=["lists", "json"])
def test_messages_are_a_chat_whatever_their_column_is_called(as_table):
    options = {"samples": 1, "length": 200, "packing": False, "model": LONG, "tokenizer": chatting(CHATML)}
    rows = [{"id": "train-0-of-the-set", "model": "a name", "dialog": as_table(CHAT)}]
    found = load(rows, **options)
    assert torch.equal(found.items[0]["input_ids"], load([{"messages": CHAT}], **options).items[0]["input_ids"])
    assert "1 documents of the column 'dialog', a row each" in found.protocol
    two = [{"prompt": "a text", "chosen": as_table(CHAT), "rejected": as_table(CHAT)}]
    with pytest.raises(ValueError, match=r"its columns are 'prompt', 'chosen', 'rejected'. Name the one to use"):
        load(two, **options)


def test_the_day_is_no_part_of_a_chat():
    """A run that is resumed on the next day would be another."""
    template = "{{ strftime_now('%d %b %Y %S') }}" + CHATML
    found = ChatTemplate.of(chatting(template), "chats").render(Chat(CHAT), assistant_only=False)
    assert found.text.startswith("01 Jan 2025 00")


def test_the_first_chat_may_be_empty(tmp_path):
    chats = [{"messages": json.dumps(messages)} for messages in ([], CHAT, CHAT)]
    options = {"tokenizer": chatting(CHATML), "samples": 2, "length": 200, "packing": False, "model": LONG}
    found = load(written(tmp_path / "rows.jsonl", chats), **options)
    assert found.fingerprint == load([{"messages": CHAT}] * 2, **options).fingerprint


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (str(CHAT), r"row 1: the column 'messages' must hold a list of messages.*json\.dumps"),
        ("Hi.", "row 2: this is a chat"),
    ],
    ids=["not JSON", "text"],
)
def test_what_is_called_messages_and_is_none_is_refused(value, message, tmp_path):
    rows = [{"messages": value}, *({"messages": json.dumps(CHAT)} for _ in range(9))]
    with pytest.raises(ValueError, match=message):
        load(written(tmp_path / "rows.jsonl", rows), tokenizer=chatting(CHATML))


@pytest.mark.parametrize("template", [CHATML, WITH_BOS, MARKED, UNPROMPTED, INSTRUCT])
def test_a_chat_is_rendered_by_the_template_and_only_the_assistant_may_count(template):
    tokenizer = chatting(template, "<s> $A")
    whole = one_chat(tokenizer=tokenizer)
    assert TOKENIZER.decode(whole["input_ids"][0]) == tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert "labels" not in whole
    row = one_chat(tokenizer=tokenizer, assistant_only_loss=True)
    assert torch.equal(row["input_ids"], whole["input_ids"])
    assert said(row).replace("</s> ", "</s>").strip() == "It is 4.</s>It is 6.</s>"


def test_prompts_and_completions_are_a_chat():
    strings = {"prompt": "What is 2 + 2?", "completion": "It is 4."}
    lists = {"prompt": CHAT[:3], "completion": CHAT[3:]}
    tokenizer = chatting(CHATML)
    for row, wanted in ((strings, "It is 4.</s>"), (lists, "It is 4.</s>It is 6.</s>")):
        found = load(
            [row], samples=1, length=200, packing=False, model=LONG, tokenizer=tokenizer, assistant_only_loss=True
        )
        assert said(found.items[0]) == wanted


def test_completions_that_were_not_wanted_are_left_out():
    rows = [{"prompt": "What is 2 + 2?", "completion": answer, "label": answer == "4."} for answer in ("5.", "4.")]
    options = {"length": 200, "packing": False, "model": LONG, "tokenizer": chatting(CHATML)}
    found, wanted = (load(given, samples=1, **options) for given in (rows, rows[1:]))
    assert torch.equal(found.items[0]["input_ids"], wanted.items[0]["input_ids"])
    assert "but where 'label' is false" in found.protocol
    for label in (0, 1.0, "False"):  # of a table that knows no booleans, or of classes: nobody can tell
        with pytest.raises(ValueError, match=f"row 1: the column 'label' holds {label!r}"):
            load([{**rows[1], "label": label}], samples=1, **options)
    assert load([{**rows[1], "label": "arithmetic"}], samples=1, **options)


WITH_TOOLS = (
    "{% for t in tools or [] %}{{ 'tool ' + (t | tojson) + '\n' }}{% endfor %}{{ mood or '' }}"
    + CHATML.replace("m.content", "(m.content or (m.tool_calls | tojson))")
)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 3}}}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
TIME = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {"zone": {}}}}}
CALLING = [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}]


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_chats_that_a_table_has_as_json_are_chats(column):
    tokenizer = chatting(CHATML)
    options = {"samples": 1, "length": 200, "packing": False, "model": LONG, "tokenizer": tokenizer}
    found, wanted = (load([{column: value}], **options) for value in (json.dumps(CHAT), CHAT))
    assert torch.equal(found.items[0]["input_ids"], wanted.items[0]["input_ids"])
    # Text that is no list of messages is text, whatever its column is called.
    for text in ("[words] of somebody", "70"):
        assert tokenizer.decode(load([{column: text}], **options).items[0]["input_ids"][0]) == text
    with pytest.raises(ValueError, match="row 1: a message in the column"):
        load([{column: json.dumps([{"said": "what?"}])}], **options)


def test_arguments_of_a_call_that_are_json_are_not_encoded_again():
    """As in the files of OpenAI's API; what is no dict stays the text that it is."""
    tokenizer = chatting(WITH_TOOLS)
    options = {"samples": 1, "length": 200, "packing": False, "model": LONG, "tokenizer": tokenizer}
    shown = {}
    for arguments in ({"a": 3, "b": 3}, '{"a": 3, "b": 3}', "3, 3"):
        call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        found = load([{"messages": [CHAT[0], CALLING[1] | {"tool_calls": [call]}]}], **options)
        shown[str(arguments)] = tokenizer.decode(found.items[0]["input_ids"][0])
    assert '"arguments": {"a": 3, "b": 3}' in shown["{'a': 3, 'b': 3}"] == shown['{"a": 3, "b": 3}']
    assert '"arguments": "3, 3"' in shown["3, 3"]


@pytest.mark.parametrize("writes", ["{{ f.arguments }}", "{{ '<sep>' + f.arguments }}"])
def test_arguments_of_a_call_are_json_to_a_template_that_takes_them_for_text(writes):
    """It wrote {'city': 'Paris', 'now': True}, or failed, where transformers writes what the file holds."""
    calls = "{% for call in m.tool_calls %}{% set f = call.function %}{{ f.name }}" + writes + "{% endfor %}"
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.tool_calls %}" + calls + "{% endif %} {% endfor %}"
    )
    tokenizer, arguments = chatting(template), '{"city": "Paris", "now": true}'
    for given in (arguments, json.loads(arguments)):
        call = {"type": "function", "function": {"name": "weather", "arguments": given}}
        said = [CHAT[0], CALLING[1] | {"tool_calls": [call]}]
        options = {"samples": 1, "length": 250, "packing": False, "model": LONG, "tokenizer": tokenizer}
        found = load([{"messages": said}], **options)
        assert arguments in tokenizer.decode(found.items[0]["input_ids"][0])


@pytest.mark.parametrize(
    "writes",
    [
        "{{ f.arguments | tojson }}",
        "{{ f }}",
        "{% for key, value in f.arguments.items() %}{{ key }} is {{ value }}{% endfor %}",
    ],
)
def test_arguments_that_a_message_quotes_stay_what_they_are(writes):
    """A result that repeats them says nothing of what the template does with a dict."""
    calls = "{% for call in m.tool_calls %}{% set f = call.function %}" + writes + "{% endfor %}"
    template = "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}" + calls + "{% endif %} {% endfor %}"
    tokenizer, arguments = chatting(template), {"city": "Paris"}
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    chat = [CHAT[0], CALLING[1] | {"tool_calls": [call]}, {"role": "tool", "content": f"of {arguments}: 20 degrees"}]
    found = ChatTemplate.of(tokenizer, "chats").render(Chat(chat), assistant_only=False)
    assert found.text == tokenizer.apply_chat_template(chat, tokenize=False)


def test_what_an_assistant_says_first_counts_for_nothing():
    """No prompt is before it: ShareGPT's sets have such chats."""
    chat = [{"role": "assistant", "content": "Hello."}, *CHAT]
    found = load([{"messages": chat}], samples=1, length=250, packing=False, model=LONG, tokenizer=chatting(CHATML),
                 assistant_only_loss=True)  # fmt: skip
    assert said(found.items[0]) == "It is 4.</s>It is 6.</s>"


@pytest.mark.parametrize("written", [lambda tools: tools, json.dumps], ids=["lists", "json"])
@pytest.mark.parametrize("column", ["messages", "chat"])
def test_the_template_is_told_of_the_tools_and_options_of_a_row(tmp_path, written, column):
    """As the tokenizer renders it by itself, with no field that only another row has."""
    rows = [
        {column: CALLING, "tools": written([ADD]), "chat_template_kwargs": {"mood": "calm"}},
        {column: CALLING, "tools": written([TIME]), "chat_template_kwargs": {"mood": "keen"}},
        {column: CHAT[:2], "tools": written([]), "chat_template_kwargs": {}},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = chatting(WITH_TOOLS)
    named = {} if column == "messages" else {"text_column": column}
    found = load(path, samples=3, length=250, batch_size=1, packing=False, model=LONG, tokenizer=tokenizer, **named)
    wanted = [
        tokenizer.apply_chat_template(CALLING, tools=[ADD], mood="calm", tokenize=False),
        tokenizer.apply_chat_template(CALLING, tools=[TIME], mood="keen", tokenize=False),
        tokenizer.apply_chat_template(CHAT[:2], tokenize=False),
    ]
    assert all(part in wanted[0] for part in ("tool {", '"arguments"', "calm"))
    assert sorted(TOKENIZER.decode(batch["input_ids"][0]) for batch in found) == sorted(wanted)


def test_functions_are_tools():
    """As OpenAI called them at first; a column of that name may hold something else."""
    tokenizer = chatting(WITH_TOOLS)
    options = {"samples": 1, "length": 250, "packing": False, "model": LONG, "tokenizer": tokenizer}
    shown = []
    for beside in ({"tools": [ADD]}, {"functions": [ADD["function"]]}, {"functions": json.dumps([ADD["function"]])}):
        shown.append(tokenizer.decode(load([{"messages": CALLING, **beside}], **options).items[0]["input_ids"][0]))
    assert "tool {" in shown[0]
    assert shown == shown[:1] * 3
    for other in (["sin", "cos"], "sin and cos", 2):
        found = load([{"messages": CALLING, "functions": other}], **options).items[0]
        assert tokenizer.decode(found["input_ids"][0]) == tokenizer.apply_chat_template(CALLING, tokenize=False)


def test_a_null_that_is_written_as_json_is_meant():
    schema = {"type": "function", "function": {"name": "f", "parameters": {"a": {"default": None, "enum": [None, 1]}}}}
    row = {"tools": json.dumps([schema]), "chat_template_kwargs": json.dumps({"mood": None})}
    chat = Chat.of_row(CHAT, row)
    assert (chat.tools, chat.template_options) == ([schema], {"mood": None})
    assert "default" not in str(Chat.of_row(CHAT, {"tools": [schema]}).tools), "a table fills what a row has not"


def test_only_what_the_assistant_says_counts_where_there_are_tools():
    row = {"messages": CALLING, "tools": [ADD]}
    options = {"tokenizer": chatting(WITH_TOOLS), "assistant_only_loss": True, "packing": False, "model": LONG}
    found = load([row], samples=1, length=250, **options)
    assert said(found.items[0]) == json.dumps([CALL]) + "</s>"


def test_chats_of_sharegpt_are_read_in_the_names_of_the_template():
    speakers = {"user": "human", "assistant": "gpt"}
    row = {"conversations": [{"from": speakers[role], "value": content} for role, content in TURNS]}
    found = load([row], samples=1, length=200, packing=False, model=LONG, tokenizer=chatting(CHATML))
    assert torch.equal(found.items[0]["input_ids"], one_chat(tokenizer=chatting(CHATML))["input_ids"])


def test_a_system_prompt_beside_a_chat_is_its_first_message():
    tokenizer, said = chatting(CHATML), "Be brief."
    whole = [{"role": "system", "content": said}, *CHAT]
    wanted = one_chat(tokenizer=tokenizer, chat=whole)["input_ids"]
    for row in ({"conversations": CHAT, "system": said}, {"messages": whole, "system": "Another one."}):
        found = load([row], samples=1, length=200, packing=False, model=LONG, tokenizer=tokenizer)
        assert torch.equal(found.items[0]["input_ids"], wanted)
    rows = [{"messages": CHAT, "system": None}, {"messages": CHAT, "system": ""}]
    found = load(rows, samples=2, length=200, packing=False, model=LONG, tokenizer=tokenizer)
    assert "system" not in tokenizer.decode(found.items[0]["input_ids"].flatten())


def test_packed_chats_begin_once_and_keep_their_labels():
    tokenizer = chatting(WITH_BOS, "<s> $A")
    rows = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}!"}]}
        for i in range(30)
    ]
    found = load(rows, samples=8, length=32, tokenizer=tokenizer, assistant_only_loss=True)
    windows, labels = ids(found), torch.cat([batch["labels"] for batch in found])
    assert ((windows == 256).sum(1) == 1).all()  # the template has a BOS of its own in each chat
    assert (windows[:, 0] == 256).all()
    # The stream is the template's text without it: every counted token is behind [assistant] and before [user].
    for window, label in zip(windows, labels, strict=True):
        kept = label != -100
        assert torch.equal(window[kept], label[kept])
        assert set(TOKENIZER.decode(window[kept]).replace("</s>", "")) <= set("0123456789!")
    assert (labels != -100).any()
    assert "chats in the tokenizer's chat template; each begins with `<s>`" in found.protocol
    assert "the loss is over the assistant's tokens alone" in found.protocol
    assert found.example.startswith("<s>[user]\n")


BOT = [{"role": role.replace("assistant", "bot"), "content": content} for role, content in TURNS]


def weighted(weight, name="weight"):
    return [*CHAT[:1], {**CHAT[1], name: weight}, *CHAT[2:]]


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize("chat", [weighted(0), weighted(False, "train"), [{**CHAT[1], "weight": 0}, *CHAT[2:]]])
def test_what_is_marked_as_not_to_be_learnt_counts_for_nothing(template, chat):
    """OpenAI's files and Axolotl's mark messages so; they are context for what comes behind them all the same."""
    tokenizer = chatting(template)
    row = one_chat(tokenizer=tokenizer, chat=chat, assistant_only_loss=True)
    assert said(row) == "It is 6.</s>"
    assert torch.equal(row["input_ids"], one_chat(tokenizer=tokenizer, chat=chat)["input_ids"])
    learnt = one_chat(tokenizer=tokenizer, chat=weighted(1), assistant_only_loss=True)
    assert said(learnt) == "It is 4.</s>It is 6.</s>"


def test_weights_of_sharegpt_are_read():
    names = {"user": "human", "assistant": "gpt"}
    chat = [{"from": names[one["role"]], "value": one["content"]} for one in CHAT]
    chat[1]["weight"] = 0
    assert said(one_chat(tokenizer=chatting(CHATML), chat=chat, assistant_only_loss=True)) == "It is 6.</s>"


@pytest.mark.parametrize(
    ("template", "row", "options", "message"),
    [
        (None, {"messages": CHAT}, {}, "holds chats, and this .* has no chat template.*--text-template"),
        (FORGETFUL, {"messages": CHAT}, {"assistant_only_loss": True}, "renders earlier turns in another way"),
        (CHATML, {"text": "plain " * 40}, {"assistant_only_loss": True}, "is for chats.*holds texts"),
        (CHATML, {"messages": [{"from": "me", "value": "x"}]}, {}, "row 1: a message.*'role' and 'content'"),
        (CHATML, {"messages": CHAT[:1]}, {"assistant_only_loss": True}, "in which the assistant .* roles are 'user'"),
        (CHATML, {"messages": BOT}, {"assistant_only_loss": True}, "roles are 'user', 'bot': .* be called 'assistant'"),
        (CHATML, {"messages": BOT * 9}, {"assistant_only_loss": True, "packing": True}, "roles are 'user', 'bot'"),
        (CHATML, {"messages": weighted(0.5)}, {"assistant_only_loss": True}, r"'weight': 0.5, .* \(1, true\)"),
        (
            CHATML,
            {"messages": CHAT, "tools": "no json"},
            {},
            "row 1: the column 'tools' .* must hold a list, .*holds str 'no json'",
        ),
        (CHATML, {"messages": CHAT, "tools": [1], "chat_template_kwargs": ["x"]}, {}, "'chat_template_kwargs'.* dict"),
        (CHATML, {"messages": CHAT, "chat_template_kwargs": {"tokenize": True}}, {}, "'tokenize' is an argument of"),
    ],
)
def test_chats_that_cannot_be_read_are_refused(template, row, options, message):
    with pytest.raises(ValueError, match=message):
        load([row], **({"samples": 1, "packing": False, "tokenizer": chatting(template)} | options))


AS_JSON = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}{{ m.content | tojson }}"
    "{% endif %}</s>{% endfor %}"
)


@pytest.mark.parametrize("template", [CHATML, MARKED, AS_JSON])
def test_parts_of_a_content_are_joined_for_a_template_that_reads_text(template):
    """Rendered as they are they would be Python's form of a list, or an error of the template."""
    parts = [{"role": one["role"], "content": [{"type": "text", "text": one["content"]}]} for one in CHAT]
    found, plain = (one_chat(tokenizer=chatting(template), chat=chat) for chat in (parts, CHAT))
    assert torch.equal(found["input_ids"], plain["input_ids"])
    seen = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}, *parts[1:]]
    with pytest.raises(ValueError, match="a part of type 'image'"):
        one_chat(tokenizer=chatting(template), chat=seen)


def test_tools_are_rendered_by_the_template_of_their_own():
    tokenizer = chatting({"default": CHATML, "tool_use": "{{ tools | tojson }}" + CHATML})
    tools = [{"type": "function", "function": {"name": "weather"}}]
    for asked in (None, tools):
        rendered = ChatTemplate.of(tokenizer, "x").render(Chat(CHAT, asked), assistant_only=False).text
        assert rendered == tokenizer.apply_chat_template(CHAT, tools=asked, tokenize=False)
        assert ("weather" in rendered) == bool(asked)


def test_a_template_that_reads_parts_is_given_them():
    reads = "{% for m in messages %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endfor %}"
    parts = [{"role": one["role"], "content": [{"type": "text", "text": one["content"]}]} for one in CHAT]
    rendered = ChatTemplate.of(chatting(reads), "x").render(Chat(parts), assistant_only=False)
    assert rendered.text == "".join(f"<{one['content']}>" for one in CHAT)


def test_the_generation_marks_win_over_prefixes():
    """The template forgets earlier turns, but says itself what the assistant writes."""
    forgetful = MARKED.replace(
        "m.content + '</s>' }}{% endgeneration", "('4.' if loop.last else '..') }}{% endgeneration"
    )
    chat = ChatTemplate.of(chatting(forgetful), "x").render(Chat(CHAT), assistant_only=True)
    counted = [token for token, counts in zip(chat.ids, chat.counted, strict=True) if counts]
    assert TOKENIZER.decode(counted) == "..4."


def test_chats_whose_answer_is_cut_off_are_counted_and_the_example_is_what_is_read(caplog):
    """Those that are read are the short ones: that is said."""
    short = {"messages": CHAT}
    long = {"messages": [{"role": "user", "content": "a cat ran on " * 40}, *CHAT[1:]]}
    how = {"samples": 4, "length": 64, "batch_size": 1, "packing": False, "model": LONG, "tokenizer": chatting(CHATML)}
    found = load([short, long] * 4, assistant_only_loss=True, **how)
    assert "; 4 of 8 chats left out, in which the assistant does not speak within 64 tokens" in found.protocol
    assert "4 of 8 chats are left out" in caplog.text
    caplog.clear()
    assert "left out" not in load([short] * 8, assistant_only_loss=True, **how).protocol + caplog.text
    cut = load([long] * 8, **how)
    assert "left out" not in cut.protocol
    read = TOKENIZER.decode(cut.items[0]["input_ids"][0])
    assert cut.describe()["example"] == read
    assert len(read) < len(long["messages"][0]["content"])


@pytest.mark.parametrize("answer", ["T", "A", "s", ""])
def test_a_short_answer_that_is_in_the_role_s_name_too_begins_behind_it(answer):
    """Of multiple choice, say; an empty one, beside the call of a tool, is the end of the turn alone."""
    shouted = UNPROMPTED.replace("'[' + m.role + ']\n'", "m.role.upper() + ': '")
    chat = [CHAT[0], {"role": "assistant", "content": answer}]
    row = one_chat(chat, tokenizer=chatting(shouted), assistant_only_loss=True)
    assert TOKENIZER.decode(row["input_ids"][0]).endswith(f"ASSISTANT: {answer}</s>\n")
    assert said(row).strip() == f"{answer}</s>"


def test_windows_in_which_nothing_counts_are_told(caplog):
    """Long prompts with short answers: most of the windows hold none, and are run for nothing."""
    chat = [{"role": "user", "content": "a cat ran on and on " * 12}, {"role": "assistant", "content": "Yes"}]
    how = {"samples": 16, "length": 32, "tokenizer": chatting(CHATML)}
    found = load([{"messages": chat}] * 8, assistant_only_loss=True, **how)
    labels = torch.cat([batch["labels"] for batch in found])[:, 1:]
    silent = int((labels == -100).all(1).sum())
    assert 8 < silent < 16
    assert f"; in {silent} of 16 windows no token counts" in found.protocol
    count = int((labels != -100).sum())
    assert f"in {silent} of 16 windows no token counts in the loss, and in all together {count} do" in caplog.text
    caplog.clear()
    assert "no token counts" not in load([{"messages": CHAT}] * 30, **how).protocol + caplog.text


def test_what_a_later_row_of_a_list_has_is_read(tmp_path):
    """A table of the first row's columns alone lost tools and system prompts without a word."""
    rows = [{"messages": CHAT}, {"messages": CHAT, "system": "Be brief."}] * 4
    how = {"samples": 8, "length": 200, "packing": False, "model": LONG, "tokenizer": chatting(CHATML)}
    found, stored = load(rows, **how), load(written(tmp_path / "rows.jsonl", rows), **how)
    texts = [TOKENIZER.decode(row) for batch in found for row in batch["input_ids"]]
    assert sum("Be brief." in text for text in texts) == 4
    assert found.fingerprint == stored.fingerprint


def test_contents_of_a_list_of_rows_may_be_texts_here_and_parts_there(tmp_path):
    """As clients of an API write them. In a file they were read, and as a list of rows refused."""
    parts = [{"role": one["role"], "content": [{"type": "text", "text": one["content"]}]} for one in CHAT]
    rows = [{"messages": [*CHAT[:1], *parts[1:]]}, {"messages": CHAT}, {"messages": parts}]
    how = {"samples": 3, "length": 200, "packing": False, "model": LONG, "tokenizer": chatting(CHATML)}
    found, stored = load(rows, **how), load(written(tmp_path / "rows.jsonl", rows), **how)
    assert found.fingerprint == stored.fingerprint == load([{"messages": CHAT}] * 3, **how).fingerprint
