"""Special tokens: what a tokenizer puts before and after a text, and windows that begin and end in the same way.

A model whose tokenizer begins every text with a token has never worked without it: windows that lack it would calibrate
and measure the model in a state that no user of it ever sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gradprobe_hf.model.families import is_causal

_PLAIN = "a"  # a text of which nearly every tokenizer makes plain tokens
_TRIED = 1000  # of a vocabulary, to find another


@dataclass(frozen=True)
class SpecialTokens:
    """Token ids around a text, and their names for a protocol.

    Attributes:
        unpredicted: how many tokens at the beginning of a window are no part of the loss.

    >>> SpecialTokens((1,), (), "each begins with `<s>`").around(torch.tensor([[5, 6], [7, 8]]))
    tensor([[1, 5, 6],
            [1, 7, 8]])
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    described: str = "no special tokens"
    unpredicted: int = 0

    def __len__(self) -> int:
        return len(self.before) + len(self.after)

    def around(self, windows: Tensor) -> Tensor:
        """Windows `[samples, tokens]` with these around each: `[samples, tokens + len(self)]`."""
        columns = [torch.tensor(ids).expand(len(windows), -1).to(windows) for ids in (self.before, self.after)]
        return torch.cat([columns[0], windows, columns[1]], dim=1)

    def begin(self, windows: Tensor) -> bool:
        """Whether each window `[samples, tokens]` begins with them already."""
        return bool((windows[:, : len(self.before)] == torch.tensor(self.before).to(windows)).all())


def special_tokens(processing_class: Any, model: PreTrainedModel, wanted: bool = True) -> SpecialTokens:
    """What the tokenizer puts around a window of text: its own template decides.

    A window of a causal language model is cut out of a text that goes on, so it begins as a text does and does not end
    as one. Any other model has never seen text that does not end as the tokenizer ends it, however it was truncated.

    Args:
        processing_class: a tokenizer, or a processor with one.
        wanted: False: none, whatever the tokenizer does.

    Raises:
        ValueError: the tokenizer makes another text of it with its special tokens.
    """
    tokenizer = tokenizer_of(processing_class)
    if not wanted:
        return SpecialTokens()
    tried = ((text, tokenizer(text, add_special_tokens=False)["input_ids"]) for text in _texts(tokenizer))
    text, plain = next(((text, ids) for text, ids in tried if ids), (_PLAIN, []))
    whole = tokenizer(text, add_special_tokens=True)["input_ids"]
    starts = [at for at in range(len(whole) - len(plain) + 1) if plain and whole[at : at + len(plain)] == plain]
    if not starts:
        raise ValueError(
            f"{type(tokenizer).__name__} makes {whole} of {text!r}, and {plain} without special tokens: what it puts "
            "before and after a text cannot be told. Set add_special_tokens=False (--add-special-tokens off)."
        )
    before = tuple(whole[: starts[0]])
    after = () if is_causal(model) else tuple(whole[starts[0] + len(plain) :])
    named = ["".join(tokenizer.convert_ids_to_tokens(list(ids))) for ids in (before, after)]
    # In backticks: a card is Markdown, and <s> strikes through what is behind it.
    parts = [f"begins with `{named[0]}`" if before else "", f"ends with `{named[1]}`" if after else ""]
    described = " and ".join(filter(None, parts))
    if not described:
        return SpecialTokens()
    return SpecialTokens(before, after, f"each {described}", len(before) if is_causal(model) else 0)


def _texts(tokenizer: Any) -> Iterator[str]:
    """What may be told by: for another alphabet, of DNA say, texts in its own, which are looked up only if they have to
    be."""
    yield _PLAIN
    yield from (text for text in islice(getattr(tokenizer, "get_vocab", dict)(), _TRIED) if text.isalnum())


def is_tokenizer(processing_class: Any) -> bool:
    """Whether it turns text into tokens: an image processor and a feature extractor do not."""
    return callable(getattr(processing_class, "convert_ids_to_tokens", None))


def tokenizer_of(processing_class: Any) -> Any:
    """A tokenizer as it is, and that of a processor."""
    return getattr(processing_class, "tokenizer", processing_class)
