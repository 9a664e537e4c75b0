"""RowReader: what rows of a data set are read with: columns, tokenizer, labels, and the generator of what is drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gradprobe_hf.tasks.columns import LabelNames, Row, filled, label_ids, stacked, value_of
from gradprobe_hf.tasks.languages import told_of_speech


@dataclass(frozen=True, kw_only=True)
class RowReader:
    """What rows are read with.

    Attributes:
        config: the model's.
        processing_class: tokenizer, image processor or feature extractor, or a processor that has them.
        accepts: the names of what `model(**batch)` takes.
        inputs: the columns of what goes in.
        label: the column of labels; None: there is none.
        text_template: what makes one text of several columns; None: they are one input each.
        length: tokens at most.
        stored_names: what the data set calls its labels, if it numbers them.
        generator: draws what is drawn, such as the tokens to mask.
        generation: the model's generation configuration; None: it has none.
    """

    config: Any
    processing_class: Any
    accepts: frozenset[str]
    inputs: tuple[str, ...]
    label: str | None
    text_template: str | None
    length: int
    stored_names: tuple[str, ...]
    generator: torch.Generator
    generation: Any = None

    @property
    def tokenizer(self) -> Any:
        return self._part("tokenizer", "a tokenizer", lambda one: callable(getattr(one, "convert_ids_to_tokens", None)))

    @property
    def image_processor(self) -> Any:
        return self._part("image_processor", "an image processor", lambda one: hasattr(one, "image_mean"))

    @property
    def feature_extractor(self) -> Any:
        return self._part("feature_extractor", "a feature extractor", lambda one: hasattr(one, "sampling_rate"))

    def _part(self, name: str, what: str, is_one: Callable[[Any], bool]) -> Any:
        """A part of the processor, or the processing class itself if it is one.

        Raises:
            ValueError: there is none.
        """
        found = getattr(self.processing_class, name, self.processing_class)
        if found is None or not is_one(found):
            raise ValueError(
                f"these rows need {what}, and none was found beside the model: pass processing_class=, or save one in "
                "the model's folder."
            )
        return found

    @cached_property
    def told(self) -> tuple[int, ...]:
        """What a decoder of speech is told in front of a text, that the tokenizer does not write."""
        return told_of_speech(self.tokenizer, self.generation)

    @cached_property
    def label_names(self) -> LabelNames:
        return LabelNames(label_ids(self.config), self.config.num_labels, self.stored_names)

    @property
    def is_regression(self) -> bool:
        """Whether a label is a measure, not a class: of a model with one label."""
        return is_regression(self.config)

    @property
    def is_multi_label(self) -> bool:
        """Whether a row may have several labels, of which each is or is not its own."""
        return getattr(self.config, "problem_type", None) == "multi_label_classification"

    def input(self, row: Row) -> Any:
        """What goes in: of several columns the values, in their order."""
        if self.text_template is not None:
            return filled(row, self.text_template)
        values = tuple(value_of(row, column) for column in self.inputs)
        return values[0] if len(values) == 1 else values

    def raw_label(self, row: Row) -> Any:
        assert self.label is not None, "a column of labels was found"
        return value_of(row, self.label)

    def padded(self, encoded: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """What a tokenizer made of each row, as a batch: padded on the right, and masked."""
        names = [name for name in encoded[0] if name in self.accepts]
        fill = {"input_ids": self.pad_token_id}
        return {name: stacked([one[name] for one in encoded], fill.get(name, 0)) for name in names}

    @property
    def pad_token_id(self) -> int:
        """The model's own, by which a decoder that classifies finds the last token; else any will do: it is masked."""
        known = self.config.get_text_config().pad_token_id
        return known if known is not None else getattr(self.tokenizer, "pad_token_id", None) or 0


def is_regression(config: Any) -> bool:
    """Whether a label is a measure, not a class, to a model with one label a row."""
    kind = getattr(config, "problem_type", None)
    return kind == "regression" or (kind is None and config.num_labels == 1)
