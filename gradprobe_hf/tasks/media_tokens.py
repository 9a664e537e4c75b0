"""Media tokens: those of a text that stand for a piece of an image or a recording, and are no words to predict."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gradprobe_hf.tasks.columns import IGNORED

_NAMES = tuple(f"{kind}_token_{what}" for kind in ("image", "video", "audio") for what in ("id", "index"))


def words_of(ids: Tensor, *known_by: Any) -> Tensor:
    """The ids, -100 in place of those that stand for pieces of images, videos and recordings.

    Args:
        known_by: configurations, of which those within count too, and processors; none of them may know any.
    """
    within = [getattr(one, name, None) for one in known_by for name in getattr(one, "sub_configs", ())]
    found = {getattr(one, name, None) for one in (*known_by, *within) for name in _NAMES}
    tokens = {int(token) for token in found if token is not None}
    for token in tokens:  # few, and none of a model of text: a tensor of them would have to go to the device
        ids = ids.masked_fill(ids == token, IGNORED)
    return ids
