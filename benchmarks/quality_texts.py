"""The texts of `quality.py`: which text a word on the command line names, and how it is cut.

    [paper:]SOURCE[=WINDOWS]

SOURCE is what `--data` takes elsewhere, or a part of a file of plain text: `c4.txt[70%:]` begins behind 70% of its
characters. WINDOWS are drawn from it; `paper:` takes all of it, in consecutive windows of the model's context.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAPER = "paper:"
_PART = re.compile(r"(?P<file>.+)\[(?:(?P<first>\d+)%)?:(?:(?P<last>\d+)%)?\]")


@dataclass(frozen=True)
class TextSpec:
    """A text. Attributes: `windows`: how many are drawn; None: the default."""

    source: str
    windows: int | None = None
    whole: bool = False

    @classmethod
    def parse(cls, spec: str) -> TextSpec:
        """
        >>> TextSpec.parse("pydoc=26")
        TextSpec(source='pydoc', windows=26, whole=False)
        >>> TextSpec.parse("paper:wikitext-2/evaluation.txt").name
        'WikiText-2, paper protocol'
        >>> TextSpec.parse("stories.txt[:70%]").name
        'stories'
        """
        source, _, windows = spec.removeprefix(PAPER).partition("=")
        return cls(source, int(windows) if windows else None, spec.startswith(PAPER))

    @property
    def name(self) -> str:
        known = {"wikitext": "WikiText-2", "c4": "C4"}
        words = re.split(r"\W+", self.source.lower())
        found = next((title for word, title in known.items() if word in words), Path(self._file).stem)
        return f"{found}, paper protocol" if self.whole else found

    @property
    def _file(self) -> str:
        part = _PART.fullmatch(self.source)
        return part["file"] if part else self.source

    def read(self) -> Any:
        """The source as the package takes it: as it is, or the text of a part."""
        part = _PART.fullmatch(self.source)
        if part is None:
            return self.source
        text = Path(part["file"]).read_text(encoding="utf-8")
        first, last = int(part["first"] or 0), int(part["last"] or 100)
        return [text[int(len(text) * first / 100) : int(len(text) * last / 100)]]
