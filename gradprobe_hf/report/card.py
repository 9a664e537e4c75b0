"""The model card: the template and the report's data, and nothing that is not in the report."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils._validators import validate_repo_id

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.config.values import GradientThreshold
from gradprobe_hf.model.families import stack_of
from gradprobe_hf.report.eval_results import text_results
from gradprobe_hf.report.plots import has_perplexities
from gradprobe_hf.report.recovered import recovery_paragraph
from gradprobe_hf.report.report import Report
from gradprobe_hf.scores.fisher import FISHER_ESTIMATES
from gradprobe_hf.structures.budgets import BUDGETS
from gradprobe_hf.structures.table import STRUCTURES
from gradprobe_hf.tasks.metrics import METRICS
from gradprobe_hf.tasks.table import TASKS

logger = logging.getLogger(__name__)

UNITS = {"global": "the whole model", "block": "each block", "tensor": "each matrix", "row": "each row"}


def build_card(report: Report, config: GradProbeConfig, base: dict[str, Any], where: str) -> ModelCard:
    """The card of a pruned model.

    Args:
        report: everything that is said comes from here.
        config: how it was pruned.
        base: metadata of the base model, see `base_metadata`.
        where: what the loading snippet names: a repository, or the checkpoint's folder.
    """
    template = files("gradprobe_hf.model_cards").joinpath("template.md").read_text(encoding="utf-8")
    return ModelCard.from_template(
        _metadata(report, config, base, where),
        template_str=template,
        title=f"{_short_name(report.model)}, {_extent(report, config)}",
        summary=_summary(report, config, base),
        method=describe_method(_as_decided(report, config)),
        snippet=_snippet(report, where),
        evaluation=_evaluation(report),
        metric_name=_metric(report),
        unreached=_unreached(report),
        refinement=_refinement(report),
        selection=_chosen_by(report.selection, config),
        task_metric=_metric_row(report),
        recovery=recovery_paragraph(report),
        calibration=report.calibration,
        calibrated_on=_rows(report.calibration) if report.calibration else "",
        structure=_smaller(report, config),
        files=_files(report),
        config=yaml.safe_dump(_set_options(config), sort_keys=False).strip(),
        sparsity=report.sparsity,
        dense_sparsity=sum(row.zeros_before for row in report.matrices) / report.weights,
        zeros=report.zeros,
        zeros_before=sum(row.zeros_before for row in report.matrices),
        weights=report.weights,
        matrices=len(report.matrices),
        blocks=report.by("block"),
        versions=", ".join(f"{name} {version}" for name, version in report.versions.items()),
        seconds=sum(report.timings.values()),
        peak_gb=report.memory["peak_resident_bytes"] / 1e9,
        warnings=report.warnings,
    )


def build_recovered_card(report: Report, base: dict[str, Any], where: str) -> ModelCard:
    """The card of a model that something else has pruned, and a recovery has trained. Args: as `build_card`."""
    template = files("gradprobe_hf.model_cards").joinpath("recovered.md").read_text(encoding="utf-8")
    metadata = ModelCardData(
        **base,
        library_name="transformers",
        pipeline_tag=report.model["task"],
        tags=["gradprobe", "pruning", "sparse"],
        model_name=Path(where).name,
        eval_results=_eval_results(report),
    )
    return ModelCard.from_template(
        metadata,
        template_str=template,
        title=_short_name(report.model),
        sparsity=report.sparsity,
        zeros=report.zeros,
        matrices=len(report.matrices),
        evaluation=report.evaluation,
        files=_files(report),
        recovery=recovery_paragraph(report),
        snippet=_snippet(report, where),
        versions=", ".join(f"{name} {version}" for name, version in report.versions.items()),
    )


def _as_decided(report: Report, config: GradProbeConfig) -> GradProbeConfig:
    """With the shape that was chosen, where a budget was given."""
    if config.shape_budget is None or report.structure is None:
        return config
    return config.varied(structure=report.structure["removed"], **dict.fromkeys(BUDGETS))


def _extent(report: Report, config: GradProbeConfig) -> str:
    if report.structure is not None:
        return f"{_saved(report.structure):.0%} smaller"
    return f"pruned to {config.pattern}" if config.group else f"{report.sparsity:.0%} pruned"


def _saved(structure: dict[str, Any]) -> float:
    """The share of the parameters that is gone."""
    return 1 - float(structure["parameters"]["after"]) / float(structure["parameters"]["before"])


def _files(report: Report) -> dict[str, str] | None:
    """Megabytes of the weights on the disk, and under zstd where that was measured."""
    if report.files is None:
        return None
    shown = {name: None if size is None else f"{size / 1e6:,.1f}" for name, size in report.files.items()}
    stored = f"{shown['bytes']}" + (f" ({shown['zstd']} under zstd)" if shown["zstd"] else "")
    return {"dense": f"{shown['dense']}", "stored": stored}


def _smaller(report: Report, config: GradProbeConfig) -> dict[str, Any] | None:
    """The rows of the tables of shapes: before and after, and of those that were tried."""
    found = report.structure
    if found is None:
        return None
    shapes = [(name, _shape(found["before"][name]), _shape(value)) for name, value in found["after"].items()]
    return {
        "parameters": [f"{found['parameters'][when]:,}" for when in ("before", "after")],
        "saved": f"{_saved(found):.1%}",
        "shapes": shapes,
        "blocks": ", ".join(f"`{block}`" for block in found["blocks"]),
        "candidates": [
            (shape_words(one["removed"]), f"{one['parameters']:,}", f"{one['loss']:.4f}")
            for one in found["candidates"]
            if one["loss"] is not None
        ],
        "allowed": len(found["candidates"]),
        "budget": config.shape_budget,
        "latency": _latency(found.get("latency")),
    }


def _latency(found: dict[str, Any] | None) -> str:
    """What the shape takes of the dense model's time, as the table says and as it was measured."""
    if found is None:
        return ""
    written = f", and to write {found['new_tokens']} behind them" if found["new_tokens"] else ""
    return (
        f"To read {found['prompt_length']} tokens{written}, a model of this shape took {found['ratio']:.2f} of the "
        f"dense model's time on the machine that pruned it: {found['smaller']:.3g} of {found['dense']:.3g} seconds "
        f"({found['device']}, {found['threads']} threads, medians of {found['rounds']} rounds in turns, random "
        f"weights). A table of its blocks said {found['table']:.2f}."
    )


def shape_words(going: Mapping[str, int]) -> str:
    """What goes in a shape: `256 FFN channels of every block, 2 blocks`."""
    return ", ".join(
        f"{count} {row.units if count > 1 else row.unit}{'' if row.takes == 'blocks' else ' of every block'}"
        for name, count in going.items()
        for row in [STRUCTURES[name]]
    )


def _shape(value: Any) -> str:
    """A value of the configuration, short: of a list its length."""
    return f"{len(value)} values" if isinstance(value, list) else "by default" if value is None else str(value)


def base_metadata(name: str) -> dict[str, Any]:
    """`base_model`, `license` and `language` of the model that was pruned, as far as can be told.

    A name is a repository. A folder has no name on the Hub: its card, if there is one, names what it derives from.
    """
    folder = Path(name) if name and Path(name).is_dir() else None
    try:
        card = ModelCard.load(folder / "README.md" if folder else name, ignore_metadata_errors=True)
        data = card.data.to_dict()
    except Exception as error:  # a missing, broken or unreachable card of the base must not cost a finished result
        logger.debug("no card of the base model %s: %s", name, error)
        data = {}
    kept = {key: data[key] for key in ("license", "license_name", "license_link", "language") if data.get(key)}
    base = data.get("base_model") if folder else (name if _names_repository(name) else None)
    return {**kept, "base_model": base} if base else kept


def _names_repository(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return bool(name)


def describe_method(config: GradProbeConfig) -> str:
    """One paragraph that says what decided, and in which steps."""
    return " ".join([_decision(config), *_schedule(config)])


def _schedule(config: GradProbeConfig) -> list[str]:
    said = []
    if config.order == "sequential":
        said.append(
            f"This was done for {config.blocks_per_step} blocks at a time, in {config.block_order} order, each step "
            "probed on the model as pruned so far."
        )
    if config.rounds:
        rounds = ", ".join(f"{sparsity:.0%}" for sparsity in config.rounds)
        said.append(f"This was done in rounds ({rounds}), each probed on the model as the one before would prune it.")
    if config.max_metric_drop is not None:
        said.append(
            f"The sparsity is the largest that was found whose metric is within {config.max_metric_drop} of the dense "
            f"model's, up to {config.final_sparsity:.0%}."
        )
    if config.updates and config.dense_target:
        said.append(
            f"The outputs to keep were taken {config.dense_target:.0%} of the way from the model as pruned so far to "
            "the dense model."
        )
    if config.refines:
        said.append(config.refinement_row.sentence)
    if config.bounds is not None:
        low, high = config.bounds
        said.append(f"Of every matrix at least {low:.0%} and at most {high:.0%} went.")
    return said


def _decision(config: GradProbeConfig) -> str:
    """The sentences of the method's rows, with what the configuration sets in them."""
    if config.structure is not None:
        return f"{_structures(config)} {config.update_row.sentence}{_damping(config)}"
    unit = UNITS[config.budget_scope]
    if config.order == "sequential" and config.budget_scope == "global":
        unit = "the blocks of each step"
    if config.group:
        unit = f"every group of {config.group[1]} inputs, of which {config.group[0]} are kept"
    fisher = FISHER_ESTIMATES[config.fisher].sentence
    updated = config.update_row.sentence.format(unit=unit) + _damping(config)
    if config.score_row is None:
        return updated
    decided = config.decision_row.sentence.format(
        score=config.score_row.sentence.format(fisher=fisher),
        score_name=config.score,
        fisher=fisher,
        unit=unit,
        candidate_unit=UNITS[config.candidate_scope],
        threshold=_threshold(config.gradient_threshold),
        limit=_limit(config),
        reduction_factor=f"{config.reduction_factor:g}",
    )
    return f"{decided} {updated}"


def _damping(config: GradProbeConfig) -> str:
    """Where it was chosen and not given."""
    chosen = " How near they stay to what they were was chosen for each matrix on batches that were held out."
    return chosen * config.holds_out


def _structures(config: GradProbeConfig) -> str:
    """What went whole, and why that."""
    amounts = config.amounts
    named = [
        STRUCTURES[name].sentence.format(count=f"{amount:.0%} of the" if isinstance(amount, float) else amount)
        for name, amount in amounts.items()
    ]
    said = [f"Whole structures were removed: {'; '.join(named)}."]
    if config.drops_blocks:
        said.append("Blocks went one after the other, each time the one without which the calibration loss was lowest.")
    if config.drops_experts:
        said.append(
            "Inside a block those experts went whose gate, a factor on what an expert hands on, had the lowest Fisher "
            "information on the calibration text."
        )
    if config.weighs_units:
        said.append(config.unit_score.sentence)
    return " ".join(said)


def _limit(config: GradProbeConfig) -> str:
    if not config.spike_limit:
        return ""
    return (
        "In the second measurement a sequence's gradient was scaled down wherever its energy exceeded "
        f"{config.spike_limit:g} times that of the first. "
    )


def _threshold(threshold: GradientThreshold) -> str:
    if isinstance(threshold, (int, float)):
        return f"a factor of {1 + threshold:g}"
    if threshold == "adaptive":
        return "a factor of one and the square root of its matrix's size in mean matrices"
    parts = ", ".join(f"{1 + value:g} (`{pattern}`)" for pattern, value in dict(threshold).items())
    return f"a factor that depends on the matrix: {parts}"


def _metadata(report: Report, config: GradProbeConfig, base: dict[str, Any], where: str) -> ModelCardData:
    pattern = () if config.group is None else (f"sparsity-{config.pattern.replace(':', '-')}",)
    dataset_id = (report.calibration or {}).get("dataset_id")
    return ModelCardData(
        **base,
        library_name="transformers",
        pipeline_tag=report.model["task"],
        tags=["gradprobe", "pruning", "sparse" if report.structure is None else "structured-pruning", *pattern],
        datasets=[dataset_id] if dataset_id else None,
        model_name=Path(where).name,
        eval_results=_eval_results(report),
    )


def _eval_results(report: Report) -> list[EvalResult] | None:
    measured, task = report.evaluation, report.model["task"]
    if measured is None or task is None:
        return None
    return text_results(measured, task, {**measured["pruned"], **measured}) or None


def _evaluation(report: Report) -> dict[str, Any] | None:
    measured = report.evaluation
    if measured is None:
        return None
    key = _key(report)
    causal = key == "perplexity"
    digits = 2 if causal else 4  # a loss in nats is small
    return {
        **measured,
        "dense_text": f"{measured['dense'][key]:,.{digits}f}",
        "pruned_text": f"{measured['pruned'][key]:,.{digits}f}",
        "terms": measured["dense"]["terms"],
        "unit": measured["term"],
        "definition": "exp of the mean next-token loss inside the windows" if causal else "the mean loss, in nats,",
        "dtype": report.model["dtype"],
        "plot": has_perplexities(report),
        "windows": measured["samples"],
    }


def _refinement(report: Report) -> str:
    """What was changed outside of the pruned matrices, and what training their blocks gained."""
    found = report.refinement.values()
    if not found:
        return ""
    before, after = (sum(block[when] for block in found) / len(found) for when in ("before", "after"))
    return (
        "Outside of these matrices only gains of norms and biases in the same blocks were changed. On the calibration "
        f"windows that were held out, training took the relative squared error of a block's output from {before:.2e} "
        f"to {after:.2e} (mean over {len(found)} blocks)."
    )


def _unreached(report: Report) -> str:
    """What was left out of the budget: each place in the model once, with its number of matrices."""
    if not report.unreached:
        return ""
    places: dict[str, int] = {}
    for one in report.unreached:
        place = stack_of(one.block) if one.block else one.name
        places[place] = places.get(place, 0) + 1
    where = ", ".join(f"{count} in `{place}`" for place, count in places.items())
    return (
        f"{len(report.unreached)} further matrices ({where}; {sum(one.weights for one in report.unreached):,} weights) "
        "are as they were, and not part of the budget: the calibration data does not reach them."
    )


def _chosen_by(selection: dict[str, Any] | None, config: GradProbeConfig) -> str:
    """How the sparsity was chosen, and that what is reported was measured apart from it, or was not."""
    if selection is None:
        return ""
    value = "of no sparsity that was tried" if selection["value"] is None else f"{selection['value']:,.4g}"
    limit = f"limit {selection['limit']:,.4g}: {config.max_metric_drop} from the dense model's"
    if selection["source"] is None:
        return (
            f"**Chosen by the same measurement.** A metric of the user's own chose the sparsity: {value} ({limit}). "
            "The number that chose is the number that is reported, so expect less of it on data that it has not seen."
        )
    return (
        f"**Chosen apart.** The sparsity was chosen by the {selection['metric']} on {selection['source']}, "
        f"{selection['protocol']}: {value} there ({limit}). What is reported was measured on rows that did not choose."
    )


def _rows(data: dict[str, Any]) -> str:
    """How much data it is: tokens, or images, or examples."""
    if data["tokens"] != data["samples"]:
        return f"{data['tokens']:,} tokens"
    return f"{data['samples']:,} {data['rows']}"


def _metric_row(report: Report) -> dict[str, str] | None:
    """The task's metric before and after, as it is shown."""
    metric = (report.evaluation or {}).get("metric")
    if not metric:
        return None
    row = METRICS[metric["name"]]
    values = {name: f"{metric[name]:.4f}" for name in ("dense", "pruned")}
    return {"title": row.title, "sentence": row.sentence, **values}


def _key(report: Report) -> str:
    assert report.evaluation is not None
    return "loss" if report.evaluation["dense"]["perplexity"] is None else "perplexity"


def _metric(report: Report) -> str:
    return _key(report) if report.evaluation else "perplexity"


def _summary(report: Report, config: GradProbeConfig, base: dict[str, Any]) -> str:
    origin, name = base.get("base_model"), _short_name(report.model)
    linked = f"[{origin}](https://huggingface.co/{origin})" if isinstance(origin, str) else name
    derived = linked if origin is None or origin == report.model["name"] else f"`{name}` (derived from {linked})"
    kind = f"in a {config.pattern} pattern" if config.group else "unstructured"
    how = ", using gradients of its loss" if config.needs.probes else ""
    origins = "".join(f" {sentence}" for sentence in _origin(report.model))
    if report.structure is not None:
        sizes = report.structure["parameters"]
        return (
            f"{derived} with {_saved(report.structure):.1%} of its parameters removed in whole structures: "
            f"{sizes['before']:,} are {sizes['after']:,} now. **It is smaller wherever it is loaded**: a plain "
            f"transformers checkpoint of smaller shapes, made with gradprobe_hf and loaded without it.{origins}"
        )
    return (
        f"{derived} with {report.sparsity:.1%} of the weights in {len(report.matrices)} of its matrices set to zero "
        f"({kind}; {report.zeros:,} weights, {report.zeros / report.model['parameters']:.1%} of all parameters){how}. "
        "**The zeros are stored densely: the model is no smaller and no faster by itself.** It "
        "is a plain transformers checkpoint, made with gradprobe_hf and loaded without it." + origins
    )


def _origin(model: dict[str, Any]) -> list[str]:
    """What the weights went through before they were pruned."""
    said = []
    if "adapter" in model:
        said.append(f"Before, the adapter `{model['adapter']}` was folded into the weights of its base.")
    if "stored_as" in model:
        said.append(f"Its weights were dequantised from {model['stored_as']}, and have that rounding in them.")
    return said


def _set_options(config: GradProbeConfig) -> dict[str, Any]:
    """The options that differ from a default configuration's; what is unset follows from the others."""
    default, values = GradProbeConfig().to_dict(), config.to_dict()
    differing = {name: value for name, value in values.items() if value not in (None, default[name])}
    return differing or {"sparsity": 0.5}


def _short_name(model: dict[str, Any]) -> str:
    """The model's name without its owner."""
    return str(model["name"]).rstrip("/").split("/")[-1] or str(model["class"])


def _snippet(report: Report, where: str) -> str:
    task = report.model["task"]
    snippet = ""
    if task:
        is_chat = report.model.get("has_chat_template", False)  # not in reports of before
        row = TASKS[task][0]
        snippet = (is_chat and row.chat_snippet) or row.snippet
    if snippet and report.model["processing_class"] != "NoneType":
        return snippet.replace("{where}", where)
    name = report.model["class"]
    return f'from transformers import {name}\n\nmodel = {name}.from_pretrained("{where}")'
