"""The loading report: what transformers says it has read from a checkpoint, and what of it must not go unsaid."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from gradprobe_hf.model.loading.checks import MODULES
from gradprobe_hf.model.loading.pooling import is_for_embeddings
from gradprobe_hf.model.pooler import take_off_pooler
from gradprobe_hf.runtime.paths import published_as

logger = logging.getLogger(__name__)

_NAMED = 5  # of a list of weights
_ADJUST = "_adjust_missing_and_unexpected_keys"
_WEIGHTS = (".weight", "_proj")  # fused experts have no `.weight`


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
        if is_for_embeddings(model):
            others += f" Its {MODULES} says that it makes embeddings: load it with task='feature-extraction'."
        raise ValueError(f"{what} are not all there, {len(missing)} are missing: {_listed(missing)}.{others} {remedy}")


@contextmanager
def ignored_names() -> Iterator[set[str]]:
    """Names of a checkpoint that have no place in the model that the body of the `with` loads.

    The loading report has those without which a class is told to ignore, among them the whole layers by which Qwen3.5
    and DeepSeek-V3 predict further tokens (`mtp.*`, `model.layers.61.*`).
    """
    found: set[str] = set()
    # transformers' own step, in which names are taken out of the report. Without it they are left out in silence again.
    adjust = getattr(PreTrainedModel, _ADJUST, None)
    if adjust is None:
        yield found
        return

    def keeping(model: PreTrainedModel, info: Any) -> None:
        found.update(info.unexpected_keys)
        adjust(model, info)

    setattr(PreTrainedModel, _ADJUST, keeping)
    try:
        yield found
    finally:
        setattr(PreTrainedModel, _ADJUST, adjust)


def about_unused(
    model: PreTrainedModel, name: str, loading: Mapping[str, Any], ignored: Collection[str] = ()
) -> tuple[str, ...]:
    """What to say of weights that are none of the model's, if there are any; logged, too.

    No error: a head that was only needed in training, or layers that predict further tokens, are left out on purpose.

    Args:
        ignored: names that the report may not have. What is told of them are parts that the model has not, and not
            what older versions of its code kept in a part that it has: masks, a table of positions.
    """
    modules = {path for path, _ in model.named_modules()}
    parts = {one for one in ignored if one.endswith(_WEIGHTS) and one.rsplit(".", 2)[0] not in modules}
    unused = sorted({*loading["unexpected_keys"], *parts})
    if not unused:
        return ()
    where = published_as(name)
    what = "1 weight of {} is none" if len(unused) == 1 else f"{len(unused)} weights of {{}} are none"
    said = f"{what.format(where)} of {type(model).__name__}, and will not be in the result: {_listed(unused)}"
    logger.warning(said)
    return (f"{said}.",)


def about_pooler(model: PreTrainedModel, name: str, loading: Mapping[str, Any]) -> tuple[str, ...]:
    """What to say where the class has a pooler that the checkpoint has not: it is taken off, and that is logged."""
    if not take_off_pooler(model, loading["missing_keys"]):
        return ()
    where = published_as(name)
    said = f"{where} has no weights of the pooler of {type(model).__name__}, which is left off"
    logger.warning(said)
    return (f"{said}.",)


def about_dtype(model: PreTrainedModel, name: str, stored: torch.dtype | None) -> tuple[str, ...]:
    """What to say where config.json names another type than its weights have, and nobody asked for one.

    Args:
        stored: the type that they have; None: nobody knows.
    """
    if stored in (None, model.dtype):
        return ()
    where = published_as(name)
    files, loaded = (str(one).removeprefix("torch.") for one in (stored, model.dtype))
    said = (
        f"the weights of {where} are stored in {files}, and were loaded in {loaded}, as its config.json says; "
        f"dtype={files!r} (--dtype {files}) keeps them"
    )
    logger.warning(said)
    return (f"{said[0].upper()}{said[1:]}.",)


def missing_weights(model: PreTrainedModel, loading: Mapping[str, Any]) -> list[str]:
    """Those that were not in the files. Args: loading: transformers' loading report."""
    # Tied weights are there under their other name, and buffers are no weights.
    weights = {one for one, _ in model.named_parameters(remove_duplicate=False)} - set(model.all_tied_weights_keys)
    return sorted(set(loading["missing_keys"]) & weights)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f", and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
