"""Pieces: parts of a text that is too large to be read or tokenised whole, and the windows that they begin with.

What stands together stays together: a window lies inside one piece, and a piece goes on over the borders of documents.
Whole documents in a random order would do where they are long; of a data set with a paragraph in each row they would
be text that nobody writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

# A tokenizer takes seconds and 150 MB for a million characters. Of more than these, and than 16 times what the windows
# can take, pieces are drawn.
LARGEST_TEXT, LARGEST_SHARE = 2**23, 16
ENDED = "\0"  # where a document ends, if a token says so: no text has this character


def is_large(characters: int, needed: int) -> bool:
    """Whether pieces of a text are drawn.

    Args:
        needed: characters that the windows take at most.
    """
    return characters > max(LARGEST_TEXT, LARGEST_SHARE * needed)


def read_of_stream(needed: int) -> int:
    """Characters of a stream that are read, to draw pieces of, where it has more."""
    return max(min(LARGEST_TEXT, LARGEST_SHARE * needed), 2 * needed)


@dataclass(frozen=True)
class Pieces:
    """Parts of a text, in an order that a seed draws."""

    parts: list[str]

    @classmethod
    def of(cls, text: str, least: int, seed: int) -> Pieces:
        """Pieces of at least so many characters."""
        parts = list(_pieces(text, least))
        order = torch.randperm(len(parts), generator=torch.Generator().manual_seed(seed))
        return cls([parts[number] for number in order.tolist()])

    @property
    def words(self) -> str:
        """What windows are, in the words of a protocol."""
        return f"each the beginning of one of {len(self.parts):,} pieces of the text"

    def beginnings(self, own: int, count: int, tokens_of: Callable[[str], list[int]]) -> list[int]:
        """The tokens of `count` windows of `own`, or fewer, one after the other; pieces that are shorter are left out.

        Args:
            tokens_of: tokenises a piece.
        """
        ids: list[int] = []
        for part in self.parts:
            tokens = tokens_of(part)
            ids += tokens[:own] if len(tokens) >= own else []
            if len(ids) >= count * own:
                break
        return ids


def _pieces(text: str, least: int) -> Iterator[str]:
    """A text in parts, cut between lines, or between words where a line is longer.

    >>> list(_pieces("one two\\nthree four\\nfive six", 6))
    ['one two', 'three four', 'five six']
    """
    begin = 0
    while begin < len(text):
        ends = (text.find(border, begin + least, begin + 2 * least) for border in "\n ")
        end = next((end for end in ends if end >= 0), begin + 2 * least)
        yield text[begin:end].strip("\n")
        begin = end
