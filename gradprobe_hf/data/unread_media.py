"""Unread media: images, recordings, videos and places beside a text, of which the model would be given the text alone.

Gemma 4 sees and hears. Of a data set of recordings with transcripts no batches are made here, and calibrated on the
transcripts it would lose what nobody measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from gradprobe_hf.data.sources import Source
from gradprobe_hf.model.families import forward_arguments, place_argument
from gradprobe_hf.tasks.columns import Row, is_image, is_recording
from gradprobe_hf.tasks.conversation import is_chat
from gradprobe_hf.tasks.table import Task

# What `datasets` decodes, whatever its column is called.
_DECODED = {
    "audio": is_recording,
    "video": lambda value: hasattr(value, "get_frame_at"),
    "images": is_image,
}
_NAMED = {"audio": "audio", "audios": "audio", "video": "video", "videos": "video"}
_TYPES = {"audio": "audio", "video": "video", "image": "images"}  # of columns, in small letters


def check_all_read(opened: Source, first: Row, task: Task, model: PreTrainedModel) -> None:
    """Raise ValueError for what the model may take beside text, and of which no batches are made here.

    Args:
        first: the first row.
    """
    place = place_argument(model)
    if place is not None and "input_ids" not in first:
        raise ValueError(
            f"{opened.name} is text, and a {type(model).__name__} also reads where each token stands on its page, "
            "which is made of no column here: give rows or batches as its processor makes them, with 'input_ids', "
            f"{place!r} and labels."
        )
    if task.medium is None:
        return
    read = {kind.what for kind in task.inputs}
    found = media_in(first, getattr(opened.rows, "features", None))
    unread = {name: medium for name, medium in found.items() if medium not in read and _takes(model, medium)}
    if unread:
        raise ValueError(
            f"{opened.name} has {' and '.join(dict.fromkeys(unread.values()))} ({', '.join(map(repr, unread))}), from "
            f"which no batches are made here for {task.name}, though a {type(model).__name__} may take them: give "
            "batches as its processor makes them, or take them out of the data."
        )


def media_in(row: Row, features: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Columns that hold images, audio or video, and which of these.

    A column is known by its type in the data set, by a decoded value, or by a usual name. A chat may hold some, too.

    >>> media_in({"text": "a word", "voice": {"array": [0.1], "sampling_rate": 16000}})
    {'voice': 'audio'}

    Args:
        features: of the data set: its first row may have nothing there.
    """
    found = {name: _medium(name, value, (features or {}).get(name)) for name, value in row.items()}
    return {name: medium for name, medium in found.items() if medium is not None}


def _medium(name: str, value: Any, feature: Any) -> str | None:
    kind = type(getattr(feature, "feature", feature)).__name__.lower()  # one, or a list of such
    if kind in _TYPES:
        return _TYPES[kind]
    if is_chat(value):
        parts = [part for message in value for part in message.get("content") or () if isinstance(part, Mapping)]
        kinds = [str(part.get("type")) for part in parts]
        return next((medium for medium in ("audio", "video") if any(medium in one for one in kinds)), None)
    values = value if isinstance(value, list) and value else [value]
    decoded = next((medium for medium, holds in _DECODED.items() if all(map(holds, values))), None)
    return decoded or (_NAMED.get(name.lower()) if value is not None else None)


def _takes(model: PreTrainedModel, medium: str) -> bool:
    """Whether a model that reads text may be given this medium."""
    if medium == "video":
        return "pixel_values_videos" in forward_arguments(model)
    tower = {"images": "vision_config", "audio": "audio_config"}[medium]
    return getattr(model.config, tower, None) is not None
