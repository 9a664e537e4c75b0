"""What a card says of a smaller model: its shape before and after, and the shapes that were tried."""

from __future__ import annotations

from typing import Any

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.report.report import Report
from gradprobe_hf.report.speed import times_as_fast
from gradprobe_hf.structures.table import shape_words


def shape_tables(report: Report, config: GradProbeConfig) -> dict[str, Any] | None:
    """The rows of the tables of shapes: before and after, and of those that were tried."""
    found = report.structure
    if found is None:
        return None
    parameters, before = report.sizes_beside
    shapes = [(name, _shape(before[name]) if before else "-", _shape(value)) for name, value in found["after"].items()]
    return {
        "parameters": [f"{count:,}" for count in (parameters, found["parameters"]["after"])],
        "saved": f"{saved(found):.1%}",
        "shapes": shapes,
        "blocks": ", ".join(f"`{block}`" for block in found["blocks"]),
        "candidates": _candidates(report),
        "loss": "loss, nats" if report.in_nats else "loss",
        "tried": sum(one["loss"] is not None for one in found["candidates"]),
        "allowed": len(found["candidates"]),
        "budget": config.shape_budget,
        "latency": _latency(found.get("latency"), report.made_of.whose),
    }


def _candidates(report: Report) -> list[tuple[str, str, str, str]]:
    """The dense model and the shapes that were tried: what goes, parameters, loss, and speed where it was measured."""
    found, speed = report.structure or {}, report.speed
    tried = [one for one in found["candidates"] if one["loss"] is not None]
    if not tried:
        return []
    faster = {row["model"]: f"{times_as_fast(speed, row):.2f} x" for row in speed["rows"]} if speed else {}
    dense = ("nothing", found["parameters"]["before"], found.get("dense_loss"), faster.get("dense", ""))
    words = ((shape_words(one["removed"]), one) for one in tried)
    rows = [(name, one["parameters"], one["loss"], faster.get(name, "")) for name, one in words]
    # A report of before has no loss of the dense model.
    return [
        (name, f"{count:,}", "-" if loss is None else f"{loss:.4f}", fast) for name, count, loss, fast in (dense, *rows)
    ]


def saved(structure: dict[str, Any]) -> float:
    """The share of the parameters that is gone."""
    return 1 - float(structure["parameters"]["after"]) / float(structure["parameters"]["before"])


def _shape(value: Any) -> str:
    """A value of the configuration, short: of a list its length."""
    return f"{len(value)} values" if isinstance(value, list) else "by default" if value is None else str(value)


def _latency(found: dict[str, Any] | None, whose: str) -> str:
    """What the shape takes of the time of the model that was pruned, as the table says and as it was measured."""
    if found is None:
        return ""
    written = f", and to write {found['new_tokens']} behind them" if found["new_tokens"] else ""
    read = "For one input" if found["prompt_length"] is None else f"To read {found['prompt_length']} tokens{written}"
    return (
        f"{read}, a model of this shape took {found['ratio']:.2f} of "
        f"{whose} time on the machine that pruned it: {found['smaller']:.3g} of {found['dense']:.3g} seconds "
        f"({found['device']}, {found['threads']} threads, medians of {found['rounds']} rounds in turns, random "
        f"weights). A table of its blocks said {found['table']:.2f}."
    )
