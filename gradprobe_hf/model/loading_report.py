"""The loading report: what transformers says it has read from a checkpoint, and what of it must not go unsaid."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_NAMED = 5  # of a list of weights


def check_complete(
    model: PreTrainedModel,
    name: str,
    loading: Mapping[str, Any],
    reinitialises: bool = False,
    brought: Collection[str] = (),
) -> None:
    """Raise ValueError where weights are not from the checkpoint: they would be pruned and saved as they were drawn.

    Args:
        loading: transformers' loading report.
        reinitialises: whether weights of other sizes were asked to be initialised anew.
        brought: modules whose weights come from elsewhere.
    """
    missing = [one for one in missing_weights(model, loading) if not set(brought) & set(one.split("."))]
    other_sizes = sorted(f"{one} {tuple(stored)} for {tuple(own)}" for one, stored, own in loading["mismatched_keys"])
    unused = sorted(loading["unexpected_keys"])
    what = f"the weights of {type(model).__name__} in {name!r}"
    remedy = (
        "Load what the checkpoint was saved as, or train the new weights first; allow_missing_weights=True "
        "(--allow-missing-weights) takes them as they are initialised."
    )
    if other_sizes and not reinitialises:
        raise ValueError(f"{what} have other sizes than config.json says: {_listed(other_sizes)}. {remedy}")
    if missing:
        others = f" It holds {len(unused)} others: {_listed(unused)}. Of another architecture?" if unused else ""
        raise ValueError(f"{what} are not all there, {len(missing)} are missing: {_listed(missing)}.{others} {remedy}")
    if unused:
        logger.warning(
            "%d weights in %s are none of %s, and will not be in the result: %s",
            len(unused),
            name,
            type(model).__name__,
            _listed(unused),
        )


def missing_weights(model: PreTrainedModel, loading: Mapping[str, Any]) -> list[str]:
    """Those that were not in the files. Args: loading: transformers' loading report."""
    # Tied weights are there under their other name, and buffers are no weights.
    weights = {one for one, _ in model.named_parameters(remove_duplicate=False)} - set(model.all_tied_weights_keys)
    return sorted(set(loading["missing_keys"]) & weights)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f", and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
