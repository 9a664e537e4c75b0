"""The model card: a template, and what the other files say; nothing that is not in the report."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.config.presets import METHOD
from gradprobe_hf.config.recovery import RecoveryConfig
from gradprobe_hf.report.card.files import size_of_files
from gradprobe_hf.report.card.matrices import block_rows, changed_outside, unreached
from gradprobe_hf.report.card.measured import chosen_by, eval_results, evaluation, metric_name, metric_row, rows_read
from gradprobe_hf.report.card.method import describe_method
from gradprobe_hf.report.card.recovery import recovery_paragraph
from gradprobe_hf.report.card.shapes import shape_tables
from gradprobe_hf.report.card.snippet import loading_snippet
from gradprobe_hf.report.card.summary import extent, kind_of_files, origins, short_name, summary
from gradprobe_hf.report.report import Report, without_examples
from gradprobe_hf.report.speed import measurements, protocol
from gradprobe_hf.structures.budgets import BUDGETS

# How the tasks are called whose models write no text.
_READS_ALONE = ("-classification", "-extraction", "-segmentation", "-answering", "-choice", "fill-mask")


def build_card(
    report: Report, config: GradProbeConfig, base: dict[str, Any], where: str, revision: str | None = None
) -> ModelCard:
    """The card of a pruned model.

    Args:
        report: everything that is said comes from here.
        config: how it was pruned.
        base: metadata of the base model, see `base_metadata`.
        where: what the loading snippet names: a repository, or the checkpoint's folder.
        revision: the branch there, if it is not the main one.
    """
    template = files("gradprobe_hf.model_cards").joinpath("template.md").read_text(encoding="utf-8")
    return ModelCard.from_template(
        _metadata(report, config, base, where),
        template_str=template,
        title=f"{short_name(report.model)}, {extent(report, config)}",
        summary=summary(report, config, base),
        method=_method(report, config),
        snippet=loading_snippet(report, where, revision),
        made_of=report.made_of,
        beside=report.beside,
        evaluation=evaluation(report),
        metric_name=metric_name(report),
        unreached=unreached(report),
        refinement=changed_outside(report),
        selection=chosen_by(report, config),
        task_metric=metric_row(report),
        recovery=recovery_paragraph(report),
        calibration=without_examples(report.calibration),
        is_default=report.is_calibrated_by_default,
        calibrated_on=rows_read(report.calibration) if report.calibration else "",
        structure=shape_tables(report, config),
        writes=not str(report.model["task"]).endswith(_READS_ALONE),
        files=size_of_files(report),
        speed=_speed(report),
        ended=_ended(report),
        config=as_yaml(set_options(config)),
        recovery_config="" if config.recovery_steps else recovery_options(report),  # else all of it is above
        sparsity=report.sparsity,
        dense_sparsity=_dense_sparsity(report),
        zeros=report.zeros,
        zeros_before=sum(row.zeros_before for row in report.matrices),
        weights=report.weights,
        matrices=len(report.matrices),
        blocks=block_rows(report),
        versions=", ".join(f"{name} {version}" for name, version in report.versions.items()),
        seconds=sum(report.timings.values()),
        peak=report.peak,
        warnings=report.warnings,
    )


def _ended(report: Report) -> str:
    has_been = report.recovery is not None and bool(report.recovery.get("earlier_steps"))
    return "pruned and recovered" if report.is_recovered or has_been else "pruned"


def build_recovered_card(report: Report, base: dict[str, Any], where: str, revision: str | None = None) -> ModelCard:
    """The card of a model that something else has pruned, and a recovery has trained. Args: as `build_card`."""
    template = files("gradprobe_hf.model_cards").joinpath("recovered.md").read_text(encoding="utf-8")
    metadata = ModelCardData(
        **_described(report, base, ["gradprobe", "pruning", "sparse"]),
        datasets=datasets_read(report),
        model_name=Path(where).name,
        eval_results=eval_results(report),
    )
    return ModelCard.from_template(
        metadata,
        template_str=template,
        title=short_name(report.model),
        sparsity=report.sparsity,
        zeros=report.zeros,
        matrices=len(report.matrices),
        kind_of_files=kind_of_files(report.model),
        # That it was pruned before is what the card says first.
        origins=origins({key: value for key, value in report.model.items() if key != "pruned_to"}),
        evaluation=evaluation(report),
        task_metric=metric_row(report),
        metric_name=metric_name(report),
        files=size_of_files(report),
        ended=_ended(report),
        is_recovered=report.is_recovered,
        recovery=recovery_paragraph(report),
        recovery_config=recovery_options(report),
        snippet=loading_snippet(report, where, revision),
        versions=", ".join(f"{name} {version}" for name, version in report.versions.items()),
        warnings=report.warnings,
    )


def _dense_sparsity(report: Report) -> str:
    """Zeros of the model that all is beside; those of another one than was pruned here were not counted."""
    return (
        "-" if report.recovered_towards else f"{sum(row.zeros_before for row in report.matrices) / report.weights:.2%}"
    )


def _speed(report: Report) -> dict[str, Any] | None:
    speed = None if report.recovered_towards else report.speed  # of what was pruned here, and not of that model
    return speed and {"rows": measurements(speed), "protocol": protocol(speed, report.made_of.whose)}


def _method(report: Report, config: GradProbeConfig) -> str:
    if report.selection is not None and report.selection["value"] is None:
        return "No sparsity that was tried kept the metric within its limit, so that nothing was pruned."
    return describe_method(_as_decided(report, config), report.made_of)


def _as_decided(report: Report, config: GradProbeConfig) -> GradProbeConfig:
    """With how many of each structure went: a budget chose them, and a share of channels is rounded."""
    if report.structure is None:
        return config
    return config.varied(structure=report.structure["removed"], **dict.fromkeys(BUDGETS))


def _metadata(report: Report, config: GradProbeConfig, base: dict[str, Any], where: str) -> ModelCardData:
    pattern = () if config.group is None else (f"sparsity-{config.pattern.replace(':', '-')}",)
    return ModelCardData(
        **_described(report, base, ["gradprobe", "pruning", *_kinds(report), *pattern]),
        datasets=datasets_read(report),
        model_name=Path(where).name,
        eval_results=eval_results(report),
    )


def datasets_read(report: Report) -> list[str] | None:
    """Those of the Hub that it was calibrated on, or trained on afterwards."""
    texts = (report.calibration, (report.recovery or {}).get("text"))
    known = [one for one in texts if one]
    named = [name for one in known for name in one.get("mixed_ids") or [one.get("dataset_id")] if name]
    return list(dict.fromkeys(named)) or None


def _described(report: Report, base: dict[str, Any], tags: list[str]) -> dict[str, Any]:
    """What the base's card says, with what it is used with and for where that does not."""
    use = {"library_name": "transformers", "pipeline_tag": report.model["task"]}
    return {**use, **base, "tags": list(dict.fromkeys([*base.get("tags", ()), *tags]))}


def _kinds(report: Report) -> list[str]:
    """What pruning left, in this run and before it, as the Hub's readers filter by."""
    smaller = report.structure is not None or "structure" in report.model
    return [*(["sparse"] if report.structure is None else []), *(["structured-pruning"] if smaller else [])]


def as_yaml(options: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(dict(options), sort_keys=False)).strip()


def recovery_options(report: Report) -> str:
    """What `recover_pretrained` was given, and how many steps, as YAML; empty where nothing was trained."""
    if report.recovery is None:
        return ""
    given, default = report.recovery["options"], RecoveryConfig().to_dict()
    changed = {name: value for name, value in given.items() if value not in (None, default.get(name))}
    return as_yaml({"steps": given["steps"]} | changed)


def set_options(config: GradProbeConfig) -> dict[str, Any]:
    """What is aimed at, and the options that are not what they are by default with that: they make it again.

    A method is told by all of its options where some would be those of another one.
    """
    aims = ("structure", *BUDGETS) if config.structure is not None else ("pattern",) if config.group else ("sparsity",)
    values = config.to_dict()
    aimed = {name: values[name] for name in aims if values[name] is not None}
    default = GradProbeConfig(**aimed).to_dict()
    found = aimed | {name: value for name, value in values.items() if value not in (None, default[name])}
    method = {name: values[name] for name in (*METHOD, "dense_target") if values[name] is not None}
    return found if _made_of(found) == config else found | method


def _made_of(options: Mapping[str, Any]) -> GradProbeConfig | None:
    try:
        return GradProbeConfig.from_dict(options)
    except ValueError:
        return None
