"""The head of a card: its title, and what the model is."""

from __future__ import annotations

from typing import Any

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.report.card.base_model import names_in
from gradprobe_hf.report.card.shapes import saved
from gradprobe_hf.report.percent import percent
from gradprobe_hf.report.report import Report
from gradprobe_hf.structures.table import shape_words


def summary(report: Report, config: GradProbeConfig, base: dict[str, Any]) -> str:
    name, named = short_name(report.model), names_in(base)
    linked = " and ".join(f"[{one}](https://huggingface.co/{one})" for one in named) or name
    derived = linked if named in ([], [report.model["name"]]) else f"`{name}` (derived from {linked})"
    kind = f"in a {config.pattern} pattern" if config.group else "unstructured"
    how = ", using gradients of its loss" if config.needs.probes else ""
    after = "".join(f" {sentence}" for sentence in origins(report.model))
    if report.structure is not None:
        sizes = report.structure["parameters"]
        return (
            f"{derived} with {percent(saved(report.structure), 1)} of its parameters removed in whole structures: "
            f"{sizes['before']:,} are {sizes['after']:,} now. **It is smaller wherever it is loaded**: a "
            f"{kind_of_files(report.model)} of smaller shapes, made with gradprobe_hf and loaded without it.{after}"
        )
    of_all = percent(report.zeros / report.model["parameters"], 1)
    return (
        f"{derived} with {percent(report.sparsity, 1)} of the weights in {len(report.matrices)} of its matrices set to "
        f"zero ({kind}; {report.zeros:,} weights, {of_all} of all parameters){how}. "
        "**The zeros are stored densely: they make it no smaller and no faster by themselves.** It "
        f"is a {kind_of_files(report.model)}, made with gradprobe_hf and loaded without it.{after}"
    )


def kind_of_files(model: dict[str, Any]) -> str:
    return "checkpoint" if "own_code" in model else "plain transformers checkpoint"


def origins(model: dict[str, Any]) -> list[str]:
    """What is to be known of the model, and what its weights went through before they were pruned."""
    said = []
    if "revision" in model:
        commit = f" (commit {model['commit']})" if model.get("commit", model["revision"]) != model["revision"] else ""
        said.append(f"The weights are those of its revision `{model['revision']}`{commit}.")
    if "own_code" in model:
        said.append("The repository runs code of its own, which `trust_remote_code=True` allows: read it first.")
    if "adapter" in model:
        said.append(f"Before, the adapter `{model['adapter']}` was folded into the weights of its base.")
    if "pruned_to" in model:
        said.append(f"The model it was made of had been pruned already, to a sparsity of {model['pruned_to']:.1%}.")
    if "once_pruned_to" in model:
        said.append(
            f"It had once been pruned, to a sparsity of {model['once_pruned_to']:.1%}, and was trained without keeping "
            "its zeros since: it was dense again."
        )
    if "structure" in model:
        said.append(f"It had been made smaller before: without {shape_words(model['structure'])}.")
    if "converted_from" in model:
        said.append(f"Its weights were converted from {model['converted_from']} to {model['dtype']} before.")
    if "stored_as" in model:
        said.append(f"Its weights were dequantised from {model['stored_as']}, and have that rounding in them.")
    return said


def extent(report: Report, config: GradProbeConfig) -> str:
    if report.structure is not None:
        return f"{percent(saved(report.structure))} smaller"
    return f"pruned to {config.pattern}" if config.group else f"{percent(report.sparsity)} pruned"


def short_name(model: dict[str, Any]) -> str:
    """The model's name without its owner."""
    return str(model["name"]).rstrip("/").split("/")[-1] or str(model["class"])
