"""`"pydoc"`: the Python manual's topics that ship with CPython. Real English prose, always there, no network."""

from __future__ import annotations

from typing import Literal

Part = Literal["calibration", "evaluation"]

# Fraction of the text for evaluation. It holds the default 20 windows of 512 tokens, and the rest the default 128, for
# tokenizers with up to 4.8 characters a token (CPython 3.11; later versions have more text).
EVALUATION_SHARE = 0.15


def manual_text(part: Part) -> str:
    """The paragraphs of one part, joined by blank lines; no paragraph is in both parts."""
    from pydoc_data.topics import topics  # slow to import, and needed only here

    seen: set[str] = set()
    parts: dict[Part, list[str]] = {"calibration": [], "evaluation": []}
    size = {"calibration": 0, "evaluation": 0}
    for name in sorted(topics):
        # Topics quote each other. A paragraph belongs to the first topic that has it, and topics are never split:
        # evaluation is on text that calibration has not seen, not on the other half of its pages.
        own = [p for p in dict.fromkeys(q.strip() for q in topics[name].split("\n\n")) if p and p not in seen]
        seen.update(own)
        length = sum(map(len, own))
        fits = size["evaluation"] + length <= EVALUATION_SHARE * (size["evaluation"] + size["calibration"] + length)
        chosen: Part = "evaluation" if fits else "calibration"
        parts[chosen] += own
        size[chosen] += length
    return "\n\n".join(parts[part])
