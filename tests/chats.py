"""Chats, templates and tokenizers with them, for tests."""

from __future__ import annotations

import json

from tests import cases
from tests.test_calibration import TOKENIZER, load

# As SmolLM2's, Llama's and, in the last one, with the marks that say what the assistant writes.
CHATML = (
    "{% for m in messages %}{{ '[' + m.role + ']\n' + m.content + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]\n' }}{% endif %}"
)
WITH_BOS = "{{ '<s>' }}" + CHATML
MARKED = (
    "{% for m in messages %}{{ '[' + m.role + ']\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '</s>' }}{% endgeneration %}{% else %}{{ m.content + '</s>' }}{% endif %}{{ '\n' }}{% endfor %}"
)
UNPROMPTED = CHATML.partition("{% if")[0]  # add_generation_prompt changes nothing
INSTRUCT = (  # as Llama 2's and Mistral's
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[ask] ' + m.content + ' [/ask]' }}"
    "{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}{% endfor %}"
)
FORGETFUL = "{% for m in messages %}{{ m.content if loop.last else '(' + m.role + ')' }}{% endfor %}"  # as Qwen3's
TURNS = [("user", "What is 2 + 2?"), ("assistant", "It is 4."), ("user", "And 3 + 3?"), ("assistant", "It is 6.")]
CHAT = [{"role": role, "content": content} for role, content in TURNS]


def chatting(template, begins="$A"):
    tokenizer = cases.tokenizer(begins)
    tokenizer.chat_template = template
    return tokenizer


def said(row):
    """The text that a row of a batch counts in the loss."""
    return TOKENIZER.decode(row["input_ids"][0][row["labels"][0] != -100])


def long_model():
    model = cases.build("llama")
    model.config.max_position_embeddings = 256  # rotary: computed, whatever their number
    return model


LONG = long_model()


def one_chat(chat=CHAT, **options):
    """Its only row."""
    how = {"samples": 1, "length": 200, "batch_size": 1, "packing": False, "model": LONG, **options}
    return load([{"messages": chat}], **how).items[0]


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
