"""Media tokens: those of a text that stand for a piece of an image or a recording, and are no words to predict."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_NAMES = tuple(f"{kind}_token_{what}" for kind in ("image", "video", "audio") for what in ("id", "index"))


def media_token_ids(*known_by: Any) -> list[int]:
    """The tokens that stand for pieces of images, videos and recordings.

    Args:
        known_by: configurations, of which those within count too, and processors; none of them may know any.
    """
    within = [getattr(one, name, None) for one in known_by for name in getattr(one, "sub_configs", ())]
    found = [getattr(one, name, None) for one in (*known_by, *within) for name in _NAMES]
    return sorted({int(token) for token in found if token is not None})


def is_media(ids: Tensor, *known_by: Any) -> Tensor:
    """Which tokens are such ones, bool as the ids. Args: see `media_token_ids`."""
    return torch.isin(ids, torch.tensor(media_token_ids(*known_by), dtype=ids.dtype, device=ids.device))
