"""Text options: how rows become texts, and texts windows. The configurations have options of the same names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from string import Formatter
from types import NoneType
from typing import Any

BLANK_LINE = "\n\n"
EOS = "eos"
# Texts that are named like a file, and are none: the Python manual, and what the model writes itself.
PYDOC, SELF = "pydoc", "self"
OWN_TEXT = "the model's own text"  # what reports call it
DEFAULT_LENGTH = 512  # tokens in a window


@dataclass(frozen=True)
class TextOptions:
    """How a data set is read and cut.

    Attributes:
        text_column: the column with the text, or with the messages of a chat; None: `messages`,
            `conversations`, `prompt` and `completion`, `text`, or the only column of chats or else of texts,
            without those that say which text it is (`id`, `url`, `source`).
        text_template: several columns as one text, `"{instruction}\\n{output}"` say.
        assistant_only_loss: whether only what the assistant says in a chat counts.
        packing: whether windows are cut from all documents joined; otherwise a document is a window, and padded.
        document_separator: what is between packed documents, or `"eos"`; None: a blank line, and nothing between chats.
        add_special_tokens: whether each window begins as the tokenizer begins a text.

    Raises:
        ValueError: a value of another type, a template without columns, or two options that both say what the text is.
    """

    text_column: str | None = None
    text_template: str | None = None
    assistant_only_loss: bool = False
    packing: bool = True
    document_separator: str | None = None
    add_special_tokens: bool = True

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(one.default, bool) and not isinstance(value, bool):
                raise ValueError(f"{one.name} must be True or False, got {value!r}.")
            if one.default is None and not isinstance(value, (str, NoneType)):
                raise ValueError(f"{one.name} must be a text, got {value!r}.")
        if self.text_column is not None and self.text_template is not None:
            raise ValueError(
                f"text_column={self.text_column!r} and text_template={self.text_template!r} both say what the text is; "
                "leave one of them unset."
            )
        if self.text_template is not None and not template_columns(self.text_template):
            raise ValueError(
                "text_template must name columns in braces, like '{instruction} {output}', got "
                f"{self.text_template!r}."
            )

    @property
    def names_text(self) -> bool:
        """Whether it says where the text is: it is read then, though token ids stand beside it."""
        return self.text_column is not None or self.text_template is not None

    @classmethod
    def of(cls, config: object) -> TextOptions:
        """Those of a configuration, which has them among others."""
        return cls(**{name: getattr(config, name) for name in TEXT_OPTIONS})


def is_written(source: Any) -> bool:
    """Whether the model writes some of a text, or of a mixture, itself."""
    names = source if isinstance(source, Mapping) else [source]
    return any(isinstance(name, str) and name == SELF for name in names)


TEXT_OPTIONS = tuple(one.name for one in fields(TextOptions))


def template_columns(template: str) -> list[str]:
    """The columns that a template names, in its order.

    >>> template_columns("{instruction}\\n{output}")
    ['instruction', 'output']

    Raises:
        ValueError: a brace that is not closed, or one without a name.
    """
    try:
        parts = [part for part in Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise ValueError(f"text_template={template!r} (--text-template) is no template: {error}.") from error
    if formatted := next((name for _, name, how, turned in parts if how or turned), None):
        raise ValueError(
            f"text_template={template!r} (--text-template) says how {formatted!r} is to be written, and columns are "
            "written as they are: leave out what stands behind its name."
        )
    named = [str(name) for _, name, _, _ in parts]
    if not all(name.strip() for name in named):
        raise ValueError(f"text_template={template!r} (--text-template) has braces without a column's name in them.")
    return named
