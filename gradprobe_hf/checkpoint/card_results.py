"""Results that were measured after a checkpoint was written: into the metadata of its card, and nowhere else in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, metadata_load

from gradprobe_hf.report.card.base_model import languages
from gradprobe_hf.runtime.paths import expanded

# Of one pass over a text: a divergence stands beside the perplexity that was measured with it, or not at all.
_OF_ONE_PASS = {"perplexity", "kl_divergence", "top1_agreement"}


def check_card(folder: str | Path) -> None:
    """Raise ValueError, before anything is measured, where there is no card that results can be added to."""
    card = expanded(Path(folder)) / "README.md"
    if not card.is_file():
        raise ValueError(f"--write-card adds results to the card of a checkpoint folder, and there is no {card}.")
    try:
        ModelCard.load(card)
        models = (metadata_load(card) or {}).get("model-index") or []
    except ValueError as error:
        raise ValueError(f"{card}: its metadata cannot be read, so no results are added to it: {error}") from error
    if len(models) > 1:  # huggingface_hub would write all results as those of the last
        raise ValueError(f"{card}: its model-index is of {len(models)} models, so no results are added to it.")


def add_results(folder: str | Path, results: Sequence[EvalResult]) -> None:
    """Add results to the model-index of `README.md`.

    An earlier one of the same metric on the same data, read by the same protocol, is replaced; perplexity, divergence
    and agreement together. Every other result, the other metadata and the text stay.
    """
    path = expanded(Path(folder)) / "README.md"
    card = ModelCard.load(path)
    card.data.language = languages(card.data.language)
    known = card.data.eval_results or []
    kept = [one for one in known if not any(_same(one, other) for other in results)]
    card.data.eval_results = [*kept, *results]
    if card.data.model_name is None:
        card.data.model_name = Path(folder).absolute().name
    # Beside it first: on a disk that is full, the card would be lost.
    made = path.with_name(f".{path.name}.partial")
    try:
        card.save(made)
        made.replace(path)
    finally:
        made.unlink(missing_ok=True)


def _same(one: EvalResult, other: EvalResult) -> bool:
    if (one.unique_identifier, one.metric_args) != (other.unique_identifier, other.metric_args):
        return False
    if one.metric_args and {one.metric_type, other.metric_type} <= _OF_ONE_PASS:
        return True
    return (one.metric_type, one.metric_name) == (other.metric_type, other.metric_name)
