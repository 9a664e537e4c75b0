"""The loading report: what transformers says it has read from a checkpoint, and what of it must not go unsaid."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
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


def about_unused(model: PreTrainedModel, name: str, loading: Mapping[str, Any]) -> tuple[str, ...]:
    """What to say of weights that are none of the model's, if there are any; logged, too.

    No error: a head that was only needed in training, or layers that predict further tokens, are left out on purpose.
    """
    unused = sorted(loading["unexpected_keys"])
    if not unused:
        return ()
    where = Path(name).name if Path(name).is_dir() else name  # reports are published
    what = "1 weight of {} is none" if len(unused) == 1 else f"{len(unused)} weights of {{}} are none"
    said = f"{what.format(where)} of {type(model).__name__}, and will not be in the result: {_listed(unused)}"
    logger.warning(said)
    return (f"{said}.",)


def missing_weights(model: PreTrainedModel, loading: Mapping[str, Any]) -> list[str]:
    """Those that were not in the files. Args: loading: transformers' loading report."""
    # Tied weights are there under their other name, and buffers are no weights.
    weights = {one for one, _ in model.named_parameters(remove_duplicate=False)} - set(model.all_tied_weights_keys)
    return sorted(set(loading["missing_keys"]) & weights)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f", and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
