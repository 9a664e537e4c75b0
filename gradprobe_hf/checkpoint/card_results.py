"""Results that were measured after a checkpoint was written: into the metadata of its card, and nowhere else in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, RepoCard, metadata_load
from huggingface_hub.repocard_data import eval_results_to_model_index, model_index_to_eval_results

from gradprobe_hf.report.card.base_model import languages
from gradprobe_hf.runtime.paths import expanded, folder_name

# Of one pass over a text: a divergence stands beside the perplexity that was measured with it, or not at all.
_OF_ONE_PASS = {"perplexity", "kl_divergence", "top1_agreement"}
_OF_ONE_DATA = ("unique_identifier", "dataset_args", "source_url")
# Arguments of a metric that say of the text what the model knows of it.
_NOTES = ("calibrated_on", "chosen_on", "trained_on")


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
    card = RepoCard.load(path)  # a ModelCard has one entry of all results on a data set, whoever measured them and how
    if (language := card.data.get("language")) is not None:
        card.data["language"] = languages(language)
    models = card.data.get("model-index") or [{"name": folder_name(expanded(folder)), "results": []}]
    known = [left for one in models[0]["results"] if (left := _without(one, results)) is not None]
    for made in eval_results_to_model_index("", list(results))[0]["results"]:
        of_same = next((one for one in known if _but_metrics(one) == _but_metrics(made)), None)
        if of_same is None:
            known.append(made)
        else:
            of_same["metrics"] += made["metrics"]
    card.data["model-index"] = [{**models[0], "results": known}]
    # Beside it first: on a disk that is full, the card would be lost.
    made = path.with_name(f".{path.name}.partial")
    try:
        card.save(made)
        made.replace(path)
    finally:
        made.unlink(missing_ok=True)


def _without(entry: dict[str, Any], results: Sequence[EvalResult]) -> dict[str, Any] | None:
    """An entry of a model-index without what is measured anew; None: that is all of it."""
    _, known = model_index_to_eval_results([{"name": "", "results": [entry]}])
    kept = [
        metric
        for metric, one in zip(entry["metrics"], known, strict=True)
        if not any(_same(one, other) for other in results)
    ]
    return {**entry, "metrics": kept} if kept or not known else None


def _but_metrics(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != "metrics"}


def _same(one: EvalResult, other: EvalResult) -> bool:
    if any(getattr(one, name) != getattr(other, name) for name in _OF_ONE_DATA) or _read(one) != _read(other):
        return False
    if one.metric_args and {one.metric_type, other.metric_type} <= _OF_ONE_PASS:
        return True
    return (one.metric_type, one.metric_name) == (other.metric_type, other.metric_name)


def _read(result: EvalResult) -> dict[str, Any]:
    """How the data was read."""
    return {name: value for name, value in (result.metric_args or {}).items() if name not in _NOTES}
