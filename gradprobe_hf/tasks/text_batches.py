"""Batches of texts: classified, with classified words, with masked tokens, and with a text to write.

Everywhere `[rows, tokens]`, padded on the right; labels that count nowhere are -100.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradprobe_hf.tasks.columns import IGNORED, Row, stacked
from gradprobe_hf.tasks.languages import check_written
from gradprobe_hf.tasks.row_reader import RowReader

MASKED_SHARE = 0.15  # of the tokens, as BERT was trained (Devlin et al. 2018, section 3.1)
MASKED_BY_TOKEN, MASKED_BY_RANDOM = 0.8, 0.1  # of these; the rest stay as they are


def classified_texts(rows: Sequence[Row], reader: RowReader) -> dict[str, Tensor]:
    """Texts, or pairs of them, with a label `[rows]` each."""
    if len(rows) > 1 and reader.config.get_text_config().pad_token_id is None:
        raise ValueError(
            "the model's configuration has no pad_token_id, by which it would find the last token of each text: set "
            "model.config.pad_token_id to the tokenizer's, or batch_size=1 (--batch-size 1)."
        )
    encoded = []
    for number, row in enumerate(rows):
        texts = _texts(reader.input(row), f"row {number + 1} of a batch")
        encoded.append(dict(reader.tokenizer(*texts, truncation=True, max_length=reader.length)))
    return reader.padded(encoded) | {"labels": class_labels(rows, reader)}


def classified_words(rows: Sequence[Row], reader: RowReader) -> dict[str, Tensor]:
    """Lists of words with a label for each: the first token of a word has it, and no other counts."""
    encoded, labels = [], []
    for row in rows:
        words, given = reader.input(row), reader.raw_label(row)
        if isinstance(words, str) or not isinstance(given, Sequence) or len(words) != len(given):
            raise ValueError(
                f"a row needs a list of words and a label for each, got {_short(words)} with labels {_short(given)}."
            )
        one = reader.tokenizer(list(words), is_split_into_words=True, truncation=True, max_length=reader.length)
        numbers = [_word_label(label, word, reader) for label, word in zip(given, words, strict=True)]
        labels.append(first_tokens(_word_ids(one), numbers))
        encoded.append(dict(one))
    return reader.padded(encoded) | {"labels": stacked(labels, IGNORED)}


def glues_words(tokenizer: Any) -> bool:
    """Whether a list of words loses the blanks between them, as with RoBERTa's tokenizer but for `add_prefix_space`."""
    words, text = tokenizer(["a", "a"], is_split_into_words=True), tokenizer("a a")
    return bool(words["input_ids"][-2:] != text["input_ids"][-2:])


def first_tokens(words: Sequence[int | None], labels: Sequence[int]) -> list[int]:
    """The label of each word at the first of its tokens, -100 at the others and at special tokens.

    >>> first_tokens([None, 0, 0, 1, None], [7, 8])
    [-100, 7, -100, 8, -100]
    """
    before = [None, *words[:-1]]
    return [IGNORED if word is None or word == last else labels[word] for last, word in zip(before, words, strict=True)]


def texts_to_write(rows: Sequence[Row], reader: RowReader) -> dict[str, Tensor]:
    """Source texts, and as labels `[rows, tokens]` those of the target texts."""
    check_written(reader.tokenizer)
    encoded, labels = [], []
    for number, row in enumerate(rows):
        where = f"row {number + 1} of a batch"
        (source,) = _texts(reader.input(row), where)
        (target,) = _texts(reader.raw_label(row), where)
        encoded.append(dict(reader.tokenizer(source, truncation=True, max_length=reader.length)))
        labels.append(target_ids(target, reader))
    return reader.padded(encoded) | {"labels": stacked(labels, IGNORED)}


def target_ids(text: str, reader: RowReader, told: tuple[int, ...] = ()) -> list[int]:
    """The tokens of a text that a model is to write, without the one that its decoder begins with anyway.

    A model without a decoder hears or sees all of its input, so that all of the text is its label.

    Args:
        told: what it is told between these two.
    """
    tokenizer, cut = reader.tokenizer, {"truncation": True, "max_length": reader.length - len(told)}
    limits = cut if reader.config.is_encoder_decoder else {"verbose": False}
    ids = list(tokenizer(text_target=text, **limits)["input_ids"])
    start = getattr(reader.config, "decoder_start_token_id", None)
    # Whisper's tokenizer puts it in front, and the model shifts its labels by one all the same.
    begins = len(ids) > 1 and ids[0] == start != tokenizer.eos_token_id
    return [*told, *(ids[1:] if begins else ids)]


def masked_tokens(batch: Mapping[str, Any], reader: RowReader) -> dict[str, Any]:
    """The batch with 15% of its tokens hidden, and these as labels, as BERT was trained.

    At least one token of each row is hidden: a row without any would have no loss.

    Raises:
        ValueError: a tokenizer without a mask token.
    """
    ids, tokenizer = batch["input_ids"], reader.tokenizer
    if tokenizer.mask_token_id is None:
        raise ValueError(
            f"{type(tokenizer).__name__} has no mask token, and a masked language model is calibrated on masked text: "
            "give batches with 'labels'."
        )
    special = torch.isin(ids, torch.tensor(tokenizer.all_special_ids))
    there = batch.get("attention_mask", torch.ones_like(ids)).bool()
    pairs = zip(ids, there, strict=True)
    drawn, how, random = (torch.stack(one) for one in zip(*(_drawn(*pair, reader) for pair in pairs), strict=True))
    ordinary = ~special & there
    lowest = drawn.masked_fill(~ordinary, 2).argmin(1, keepdim=True)
    hidden = ((drawn < MASKED_SHARE) | torch.zeros_like(ordinary).scatter_(1, lowest, True)) & ordinary
    shown = ids.masked_fill(hidden & (how < MASKED_BY_TOKEN), tokenizer.mask_token_id)
    replaced = hidden & (how >= MASKED_BY_TOKEN) & (how < MASKED_BY_TOKEN + MASKED_BY_RANDOM)
    return {**batch, "input_ids": torch.where(replaced, random, shown), "labels": ids.masked_fill(~hidden, IGNORED)}


def _drawn(row: Tensor, there: Tensor, reader: RowReader) -> tuple[Tensor, Tensor, Tensor]:
    """For each token of a row two numbers in [0, 1) and a token, the same however rows are batched.

    Args:
        there: which are no padding: how much of that a row has, the others of its batch decide.
    """
    tokens, count = reader.config.get_text_config().vocab_size, int(there.sum())
    numbers, random = torch.zeros(2, len(row)), torch.zeros_like(row)
    numbers[:, there] = torch.rand(2, count, generator=reader.generator)
    random[there] = torch.randint(tokens, (count,), generator=reader.generator)
    return numbers[0], numbers[1], random


def class_labels(rows: Sequence[Row], reader: RowReader) -> Tensor:
    """`[rows]`: the number of each row's class, or its measure where the model has one label.

    `[rows, labels]`, 1 or 0, where a row may have several, and measures where the model predicts as many.

    Raises:
        ValueError: a label that is none of the model's.
    """
    values = [reader.raw_label(row) for row in rows]
    if reader.is_multi_label:
        return torch.stack([multi_hot(value, reader) for value in values])
    if not reader.is_regression:
        named = reader.label_names
        return torch.tensor(
            [named.number(value, f"a row ({_short(row)})") for value, row in zip(values, rows, strict=True)]
        )
    count = reader.config.num_labels
    predicted = "one label predicts a number" if count == 1 else f"{count} labels predicts as many numbers"
    for value, row in zip(values, rows, strict=True):
        numbers = value if count > 1 else [value]
        if not isinstance(numbers, (list, tuple)) or len(numbers) != count or not all(map(_is_measure, numbers)):
            raise ValueError(f"a model with {predicted}, and a row ({_short(row)}) has the label {value!r}.")
    return torch.tensor(values, dtype=torch.float32)


def _is_measure(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def multi_hot(value: Any, reader: RowReader) -> Tensor:
    """`[labels]`, of each whether it is one of the row's: in float32, which the loss of such models takes.

    A data set that names its classes (a list of `ClassLabel`) may have the numbers of a row's, however many.

    Raises:
        ValueError: not one number for each label, nor numbers of classes that have names; or it may be either.
    """
    count, names = reader.config.num_labels, reader.label_names
    if reader.stored_names and _are_classes(value, count):
        found = torch.zeros(count)
        found[[names.number(one, "a row") for one in value]] = 1
        return found
    try:
        found = torch.as_tensor(value, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError):
        found = torch.empty(0)
    if found.shape != (count,) or not bool(((found >= 0) & (found <= 1)).all()):
        raise ValueError(
            f"a row has the labels {_short(value)}, and a model with several labels a row (problem_type in its "
            f"config.json) needs {count} numbers: for each label 1 where it is the row's, else 0."
        )
    if names.renumbered:  # the data set has them in an order of its own
        order = torch.tensor([names.number(one, "a row") for one in range(len(names.stored))])
        return torch.zeros(count).index_copy_(0, order, found)
    return found


def _are_classes(value: Any, count: int) -> bool:
    """Whether a list has the numbers of a row's classes, each once, and not a 1 or 0 for each label.

    Raises:
        ValueError: it may be either.
    """
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, int) for one in value):
        return False
    if len(value) != count or max(value, default=0) > 1:
        return len(set(value)) == len(value)
    if len(value) == len(set(value)) == 2:
        raise ValueError(
            f"a row has the labels {list(value)}: whether both are the row's, or one of two, is not to be told from "
            "that. Make them numbers without names, for each label 1 where it is the row's, else 0: "
            "dataset.cast_column(..., List(Value('float32')))."
        )
    return False


def _word_label(label: Any, word: str, reader: RowReader) -> int:
    return IGNORED if label == IGNORED else reader.label_names.number(label, f"the word {word!r}")


def _word_ids(encoded: Any) -> list[int | None]:
    try:
        return list(encoded.word_ids())
    except ValueError as error:
        raise ValueError(
            "labels of words are aligned by the tokenizer's word_ids, which slow tokenizers do not have: load it with "
            "use_fast=True, or give tokenised rows with 'labels'."
        ) from error


def _texts(value: Any, where: str) -> tuple[str, ...]:
    """One text, or several.

    Raises:
        ValueError: something else.
    """
    texts = value if isinstance(value, tuple) else (value,)
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"{where} has {text!r} where a text is needed.")
    return texts


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
