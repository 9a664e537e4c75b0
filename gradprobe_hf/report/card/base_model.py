"""What the card of the base model hands on to that of the pruned one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils._validators import validate_repo_id

from gradprobe_hf.runtime.paths import cached_repository

logger = logging.getLogger(__name__)

CARD = "README.md"
_HANDED_ON = ("license", "license_name", "license_link", "language")
_USED_WITH = ("library_name", "pipeline_tag", "tags")


def base_metadata(name: str, card: Path | None, keeps_use: bool = False) -> dict[str, Any]:
    """`base_model`, `license` and `language` of the model that was pruned, as far as can be told.

    A name is a repository, and so is its folder in the cache. Another folder has no name on the Hub: its card, if there
    is one, names what it derives from.

    Args:
        card: the file, if it has one.
        keeps_use: whether what it is used with, and for, still holds of the pruned one.
    """
    data = _metadata(card)
    kept = {key: data[key] for key in (*_HANDED_ON, *(_USED_WITH if keeps_use else ())) if data.get(key)}
    name = cached_repository(name) or name
    if name and Path(name).is_dir():
        # A path, of a card that was written by hand, is nobody else's, and reports are published.
        named = list(filter(_names_repository, names_in(data)))
        base = named if isinstance(data.get("base_model"), list) else next(iter(named), None)
    else:
        base = name if _names_repository(name) else None
    return {**kept, "base_model": base} if base else kept


def with_adapter(metadata: Mapping[str, Any], card: Path | None, name: str) -> dict[str, Any]:
    """The same of a model that an adapter was folded into: its weights are under both licences.

    Args:
        metadata: of its base.
        card: the adapter's, if it has one.
        name: the adapter's, for the warning.
    """
    adapter = _metadata(card)
    said = _licence_in(metadata), _licence_in(adapter)
    if said[1] is None or said[0] == said[1]:
        return dict(metadata)
    logger.warning(
        "the licence of %s is %r by its card, and that of its base %r: the weights are of both. Look at them, and at "
        "what the card of the result says, before you publish it",
        name,
        said[1],
        said[0],
    )
    kept = {key: value for key, value in metadata.items() if not key.startswith("license")}
    return kept if said[0] is None else kept | {"license": "other", "license_name": f"{said[0]}-and-{said[1]}"}


def _licence_in(metadata: Mapping[str, Any]) -> str | None:
    """The licence that metadata name; of one that is no usual one its own name."""
    found = metadata.get("license")
    if found == "other":
        found = metadata.get("license_name") or found
    return "-or-".join(map(str, found)) if isinstance(found, list) else found


def bases(card: Path | None) -> list[str]:
    """The repositories that a card names as what its model was made from."""
    return names_in(_metadata(card))


def names_in(metadata: Mapping[str, Any]) -> list[str]:
    """Those of `base_model`, which many cards have a list of; none of what is no name."""
    found = metadata.get("base_model")
    return [one for one in (found if isinstance(found, list) else [found]) if isinstance(one, str)]


def _metadata(card: Path | None) -> dict[str, Any]:
    if card is None:
        return {}
    try:
        data = ModelCard.load(card, ignore_metadata_errors=True).data.to_dict()
        return {**data, "language": languages(data.get("language"))}
    except Exception as error:  # a broken card of the base must not cost a finished result
        logger.debug("no metadata in %s: %s", card, error)
        return {}


def _names_repository(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return bool(name)


def languages(found: Any) -> Any:
    """The languages of a card, as they were meant: Norwegian's code without quotes is `False` to YAML 1.1."""
    if isinstance(found, list):
        return [languages(one) for one in found]
    return "no" if found is False else found
