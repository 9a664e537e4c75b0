"""Columns: which of a data set's hold what a task needs, and what stands in them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from string import Formatter
from typing import Any

import torch
from torch import Tensor

from gradprobe_hf.tasks.conversation import CHAT_COLUMNS, is_chat

Row = Mapping[str, Any]

IGNORED = -100  # a label that counts nowhere, in every loss of transformers


@dataclass(frozen=True)
class ColumnKind:
    """What a column may hold.

    Attributes:
        names: that such columns usually have, in order of preference.
        holds: whether a value is of this kind.
        what: in words.
    """

    names: tuple[str, ...]
    holds: Callable[[Any], bool]
    what: str

    def is_in(self, row: Row) -> bool:
        """Whether a row has such a column: of a usual name, whatever is in it, or one that holds such a value.

        The first row may hold nothing there, the name of a file, or an array, which no value by itself tells from
        other numbers.
        """
        return any(name in row for name in self.names) or any(map(self.holds, row.values()))


def _is_words(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(one, str) for one in value)


def is_image(value: Any) -> bool:
    """Whether this is an image, or several: decoded, or as `datasets` stores one."""
    if isinstance(value, list) and value:
        return all(map(is_image, value))
    return hasattr(value, "convert") or (isinstance(value, Mapping) and "bytes" in value and "path" in value)


def _is_audio(value: Any) -> bool:
    numbers = isinstance(value, Sequence) and not isinstance(value, str) and value and isinstance(value[0], float)
    return bool(numbers) or is_recording(value)


def is_recording(value: Any) -> bool:
    """Whether `datasets` has decoded this from a recording."""
    return (isinstance(value, Mapping) and "array" in value) or hasattr(value, "get_all_samples")


TEXT = ColumnKind(
    ("text", "sentence", "document", "article", "dialogue", "review", "content"),
    lambda value: isinstance(value, str),
    "text",
)
WORDS = ColumnKind(("tokens", "words"), _is_words, "words")
IMAGE = ColumnKind(("image", "img", "images"), is_image, "images")
AUDIO = ColumnKind(("audio", "speech"), _is_audio, "audio")
# Columns that a pair of sentences usually has.
PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("text", "text_pair"),
)
# What says which text a row has, or where it is from, and is none itself.
_BESIDE = re.compile(r"(.*_)?(id|idx|uuid|guid|url)|source", re.IGNORECASE)


def value_of(row: Row, column: str) -> Any:
    """The value of a column; `a.b` is a field of a column that holds fields.

    >>> value_of({"translation": {"en": "a cat", "de": "eine Katze"}}, "translation.de")
    'eine Katze'
    """
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        value = value[part]
    return value


def filled(row: Row, template: str) -> str:
    """A template with the columns that it names, as one text.

    >>> filled({"a.b": "one", "c": 2}, "{a.b} and {c}")
    'one and 2'

    Raises:
        ValueError: a column that holds nothing.
    """
    # Not `str.format`, which would take a column "a.b" for an attribute, and nothing for the word None.
    return "".join(
        text + ("" if name is None else text_of(row, name, "the template"))
        for text, name, _, _ in Formatter().parse(template)
    )


def named_classes(row: Row, names: Mapping[str, Sequence[str]]) -> Row:
    """A row in which classes have their names: in a text their numbers say nothing.

    >>> named_classes({"label": 1, "text": "it barks"}, {"label": ("cat", "dog")})
    {'label': 'dog', 'text': 'it barks'}

    Args:
        names: of the classes of each column; of a column without classes none.

    Raises:
        ValueError: a row has no class, which is -1 in splits of the Hub that are to be predicted.
    """
    named = {}
    for column, known in names.items():
        if known and isinstance(value := row.get(column), Integral):
            if not 0 <= (number := int(value)) < len(known):
                raise ValueError(
                    f"a row has class {number} in {column!r}, of which the data set names 0 to {len(known) - 1}: leave "
                    f"such rows out, dataset.filter(lambda row: row[{column!r}] >= 0)."
                )
            named[column] = known[number]
    return {**row, **named}


def text_of(row: Row, column: str, named_by: str) -> str:
    """The value of a column as text.

    Raises:
        ValueError: it holds nothing, or several values, which nothing says how to write.
    """
    value = value_of(row, column)
    if value is None:
        raise ValueError(f"the column {column!r}, which {named_by} names, holds nothing (null).")
    if isinstance(value, Mapping):
        fields = ", ".join(f"{column}.{name}" for name in value)
        raise ValueError(f"the column {column!r}, which {named_by} names, holds fields: name one of them, {fields}.")
    if isinstance(value, list | tuple):
        raise ValueError(
            f"the column {column!r}, which {named_by} names, holds a list, {str(value)[:60]}: make one text of it "
            "first (data.map(...))."
        )
    return str(value)


def has_column(row: Row, column: str) -> bool:
    try:
        value_of(row, column)
    except (KeyError, TypeError, IndexError):
        return False
    return True


def find_column(row: Row, kind: ColumnKind, given: str | None = None, apart: Sequence[str] = ()) -> str:
    """The column of a kind: the one that is given, one of a usual name, or the only one that holds such values.

    Of usual names the first is taken whatever else there is, and any other where it is the only one.

    Args:
        row: the first of the data set.
        apart: columns that are something else.

    Raises:
        ValueError: there is none, or more than one may be meant.
    """
    if given is not None:
        return checked_column(row, given, "text_column")
    names = kind.names
    if kind is TEXT and isinstance(row.get("target"), str):
        names = (*names, "source")  # alone it says where a row is from; beside a target it is what to translate
    usual = [name for name in names if name in row and name not in apart]
    alike = [name for name, value in row.items() if name not in apart and kind.holds(value)]
    if kind is TEXT:
        alike = [name for name in alike if not is_beside(name)]
    found = usual[:1] if usual[:1] == [names[0]] else usual or alike
    if len(found) != 1:
        several = f"{' and '.join(map(repr, found))} may be it" if found else "there is none"
        named = "Name it with text_column= (--text-column), or rename" if kind in (TEXT, WORDS) else "Rename"
        raise ValueError(
            f"the data needs a column of {kind.what}, and {several}: its columns are {', '.join(map(repr, row))}. "
            f"{named} it {kind.names[0]!r}."
        )
    return found[0]


def find_pair(row: Row, given: str | None) -> tuple[str, str] | None:
    """The two columns of a pair of texts: as given, with a comma between them, or by usual names; None: no pair.

    Raises:
        ValueError: there is no such column.
    """
    if given is not None:
        first, comma, second = given.partition(",")
        if not comma or has_column(row, given):
            return None
        return checked_column(row, first.strip(), "text_column"), checked_column(row, second.strip(), "text_column")
    return next((pair for pair in PAIRS if set(pair) <= set(row)), None)


def find_chat(row: Row) -> str | None:
    """The column with the messages of a chat: one of a usual name, or the only one that holds some; None: no such."""
    named = [name for name in CHAT_COLUMNS if name in row]
    found = named[:1] or [name for name, value in row.items() if is_chat(value)]
    return found[0] if len(found) == 1 else None


def is_beside(column: str) -> bool:
    """Whether a column is called like what says which text a row has: none is taken for the text unless it is named.

    >>> [name for name in ("id", "image_id", "source", "body", "idea") if is_beside(name)]
    ['id', 'image_id', 'source']
    """
    return _BESIDE.fullmatch(column) is not None


def checked_column(row: Row, column: str, option: str) -> str:
    """Raise ValueError unless the row has this column."""
    if not has_column(row, column):
        raise ValueError(f"{option}={column!r}: there is no such column; the data has {', '.join(row)}.")
    return column


def find_label(row: Row, names: Sequence[str], given: str | None) -> str:
    """The column of labels: the one that is given, or one of a usual name.

    Raises:
        ValueError: there is none.
    """
    if given is not None:
        return checked_column(row, given, "label_column")
    found = next((name for name in names if name in row), None)
    if found is None:
        raise ValueError(
            f"the data has no column of labels: its columns are {', '.join(row)}, and none is called "
            f"{' or '.join(map(repr, names))}. Name it with label_column= (--label-column)."
        )
    return found


@dataclass(frozen=True)
class LabelNames:
    """Labels as a data set has them -> the model's.

    Attributes:
        ids: of the model: name -> number.
        count: of the model's labels.
        stored: the names that the data set gives its own numbers, if it does.

    Raises:
        ValueError: both have names, and these are not the same.
    """

    ids: Mapping[str, int]
    count: int
    stored: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.renumbered or _are_numbers(self.ids) or (_are_numbers(self.stored) and not self.sorted_as_text):
            return
        raise ValueError(
            f"the data set calls its labels {_shown(self.stored)}, and the model {_shown(list(self.ids))} (id2label in "
            "its config.json): which is which is not to be told from that. Rename those of the data set "
            "(dataset.cast_column with a ClassLabel); or, where the numbers are the same, make them plain numbers "
            "(a Value('int64'))."
        )

    @property
    def has_numbers(self) -> bool:
        """Whether the model calls its labels by numbers alone: LABEL_0, LABEL_1."""
        return _are_numbers(self.ids)

    @cached_property
    def renumbered(self) -> bool:
        """Whether numbers go through names: the data set numbers the same labels in its own order."""
        return bool(self.stored) and len(set(self.matched)) == len(self.stored)

    @cached_property
    def matched(self) -> tuple[str, ...]:
        """The model's name of each that the data set has: the same; its number; one of several words for it; or one of
        which the other is the beginning, where both have as many labels and each has one such partner. Of more labels
        `cat` is the beginning of `catamaran`, too.

        >>> LabelNames({"NEGATIVE": 0, "POSITIVE": 1}, 2, ("pos", "neg")).matched
        ('POSITIVE', 'NEGATIVE')
        """
        # Letters may be classes of their own, A and a.
        found = {name: name for name in self.stored if name in self.ids}
        known = {**self._parts, **self._counted, **{one.lower(): one for one in self.ids}}
        found |= {name: known[name.lower()] for name in self.stored if name not in found and name.lower() in known}
        left = [one for one in self.ids if one not in found.values()]
        if len(self.stored) == self.count:
            partners = {
                name: [one for one in left if _begins(one.lower(), name.lower())]
                for name in self.stored
                if name not in found
            }
            found |= {name: alike[0] for name, alike in partners.items() if len(alike) == 1}
        return tuple(found[name] for name in self.stored if name in found)

    @cached_property
    def in_other_words(self) -> dict[str, str]:
        """Of the labels that were matched: the data set's -> the model's, where they differ by more than capitals."""
        if not self.renumbered:
            return {}
        pairs = zip(self.stored, self.matched, strict=True)
        return {name: own for name, own in pairs if name.lower() != own.lower()}

    @property
    def sorted_as_text(self) -> bool:
        """Whether the data set's names are numbers in the order of text, 1, 10, 2: a label's number is not its name."""
        if not _are_numbers(self.stored):
            return False
        numbers = [int(re.sub(r"\D", "", name)) for name in self.stored]
        return numbers != sorted(numbers)

    @cached_property
    def _parts(self) -> dict[str, str]:
        """Of the model's names that are lists of words, as ImageNet's are, "tench, Tinca tinca": word -> name."""
        return _of_one((part.strip(), name) for name in self.ids for part in name.lower().split(","))

    @cached_property
    def _counted(self) -> dict[str, str]:
        """Of the model's names that begin with a number, "1 star": number -> name."""
        return _of_one((found[0], name) for name in self.ids if (found := re.match(r"\d+(?=\D)", name)))

    def number(self, value: Any, where: str) -> int:
        """The model's number of a label.

        Args:
            where: the row, for errors.

        Raises:
            ValueError: no label, or none of the model's.
        """
        if isinstance(value, Tensor) and value.ndim == 0:
            value = value.item()
        if isinstance(value, bool):
            return self._of_truth(value, where)
        if isinstance(value, Integral) and self.renumbered and 0 <= int(value) < len(self.stored):
            value = self.matched[int(value)]
        if isinstance(value, str):
            return self._named(value, where)
        if isinstance(value, Integral):
            if not 0 <= int(value) < self.count:
                raise ValueError(
                    f"{where} has label {int(value)}, and the model has {self.count} labels, 0 to {self.count - 1}. "
                    f"{self._known()}"
                )
            return int(value)
        if value is None:
            raise ValueError(f"{where} has no label.")
        several = isinstance(value, (Sequence, Tensor))
        raise ValueError(
            f"{where} has the label {value!r}: a label is a whole number or a name, got {type(value).__name__}."
            + " Where a row has several, the model's config must say so: problem_type='multi_label_classification'."
            * several
        )

    def _of_truth(self, value: bool, where: str) -> int:
        """Of a column of true and false: by these names, or by the number where the model's labels have no names."""
        folded = {name.lower(): number for name, number in self.ids.items()}
        if {"true", "false"} <= set(folded):
            return folded[str(value).lower()]
        if _are_numbers(self.ids) and self.count == 2:
            return int(value)
        raise ValueError(
            f"{where} has the label {value}, and the model calls its labels {_shown(list(self.ids))}: which of them is "
            "true is not told. Write their names, or numbers."
        )

    def check_numbers(self, values: Sequence[Any], source: str) -> None:
        """Raise ValueError for plain numbers that are names of the model's labels, too, and of other ones.

        Of labels "1 star" to "5 stars" numbered 1 to 5 each would be the next one; a 0 among them is no name.
        """
        named = self._counted | {name: name for name in self.ids if name.isdigit()}
        plain = [value for value in values if isinstance(value, Integral) and not isinstance(value, bool)]
        if self.stored or not plain or any(str(value) not in named for value in plain):
            return
        other = next((value for value in plain if self.ids[named[str(value)]] != value), None)
        if other is not None:
            raise ValueError(
                f"{source}: the label {other} may be the model's label {named[str(other)]!r}, whose number is "
                f"{self.ids[named[str(other)]]}, or the one whose number is {other}: write names, or give the column a "
                "ClassLabel."
            )

    def _named(self, value: str, where: str) -> int:
        folded = {name.lower(): number for name, number in self.ids.items()}
        if value in self.ids:
            return self.ids[value]
        if value.lower() in folded:
            return folded[value.lower()]
        if value.strip() in self._counted:  # "1" where the model's are "1 star", "2 stars", ...
            return self.ids[self._counted[value.strip()]]
        if value.strip().isdigit():
            return LabelNames(self.ids, self.count).number(int(value), where)
        raise ValueError(f"{where} has label {value!r}, which is none of the model's. {self._known()}")

    def _known(self) -> str:
        shown = [f"{name!r} ({number})" for name, number in list(self.ids.items())[:8]]
        return f"They are {', '.join(shown)}{', ...' if len(self.ids) > 8 else ''} (id2label in its config.json)."


def label_ids(config: Any) -> dict[str, int]:
    """What a model calls its labels: name -> number, of both tables of its configuration.

    `id2label` is what a pipeline shows. Who gives that alone leaves `label2id` as transformers makes it up, or empty.

    Raises:
        ValueError: they give one name two numbers.
    """
    shown = {str(name): int(number) for number, name in (getattr(config, "id2label", None) or {}).items()}
    back = {str(name): int(number) for name, number in (getattr(config, "label2id", None) or {}).items()}
    found: dict[str, int] = {}
    for table in [one for one in (shown, back) if not _are_numbers(one)] or [shown or back]:
        for name, number in table.items():
            if found.setdefault(name, number) != number:
                raise ValueError(
                    f"the model's config.json calls label {found[name]} {name!r} in id2label, and label {number} in "
                    "label2id: mend the one that is wrong."
                )
    return found


def check_one_numbering(config: Any, other: Any, names: tuple[str, str]) -> None:
    """Raise ValueError for two models that number the same labels each in its own order.

    Args:
        names: of the two models, for the error.
    """
    ids, others = label_ids(config), label_ids(other)
    if ids != others and {*ids} == {*others} and not _are_numbers(ids):
        apart = next(name for name in ids if ids[name] != others[name])
        raise ValueError(
            f"{names[0]} and {names[1]} number their labels differently ({apart!r} is {ids[apart]} and "
            f"{others[apart]}, id2label in config.json): one's predictions cannot be compared with the other's. Give "
            "the model that the first was pruned from."
        )


def _are_numbers(names: Iterable[str]) -> bool:
    """Whether names say no more than numbers, as those do that transformers makes up."""
    return all(re.fullmatch(r"(label_?)?\d+", name.lower()) for name in names)


def _of_one(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """What belongs to one name alone -> that name."""
    pairs = list(pairs)
    how_often = Counter(what for what, _ in pairs)
    return {what: name for what, name in pairs if how_often[what] == 1}


def _begins(name: str, other: str) -> bool:
    """Whether one of both begins with the other."""
    return name.startswith(other) or other.startswith(name)


def _shown(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:8])) + ", ..." * (len(names) > 8)


def stacked(rows: Sequence[Sequence[int]], fill: int) -> Tensor:
    """`[rows, longest]`: whole numbers of unequal lengths, filled on the right."""
    tensors = [torch.as_tensor(row, dtype=torch.long) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=fill)
