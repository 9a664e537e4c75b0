"""What a card says of the measurements, and of what they chose."""

from __future__ import annotations

from typing import Any

from huggingface_hub import EvalResult

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.report.eval_results import text_results
from gradprobe_hf.report.plots import has_perplexities
from gradprobe_hf.report.report import Report
from gradprobe_hf.tasks.metrics import METRICS


def evaluation(report: Report) -> dict[str, Any] | None:
    measured = report.evaluation
    if measured is None:
        return None
    key = _key(report)
    causal = key == "perplexity"
    digits = 2 if causal else 4  # a loss in nats is small
    mean = "the mean loss, in nats," if report.in_nats else "the mean loss"
    return {
        **measured,
        "dense_text": f"{measured['dense'][key]:,.{digits}f}",
        "pruned_text": f"{measured['pruned'][key]:,.{digits}f}",
        "terms": measured["dense"]["terms"],
        "unit": measured["term"],
        "definition": "exp of the mean next-token loss inside the windows" if causal else mean,
        "dtype": report.model["dtype"],
        "plot": has_perplexities(report),
        "windows": measured["samples"],
    }


def metric_row(report: Report) -> dict[str, str] | None:
    """The task's metric before and after, as it is shown."""
    metric = (report.evaluation or {}).get("metric")
    if not metric:
        return None
    row = METRICS[metric["name"]]
    values = {name: f"{metric[name]:.4f}" for name in ("dense", "pruned")}
    return {"title": row.title, "sentence": row.sentence, **values}


def metric_name(report: Report) -> str:
    return _key(report) if report.evaluation else "perplexity"


def _key(report: Report) -> str:
    assert report.evaluation is not None
    return "loss" if report.evaluation["dense"]["perplexity"] is None else "perplexity"


def eval_results(report: Report) -> list[EvalResult] | None:
    measured, task = report.evaluation, report.model["task"]
    if measured is None or task is None:
        return None
    return text_results(measured, task, {**measured["pruned"], **measured}, report.beside.name) or None


def rows_read(data: dict[str, Any]) -> str:
    """How much data it is: tokens, or images, or examples."""
    if data["tokens"] != data["samples"]:
        return f"{data['tokens']:,} tokens"
    return f"{data['samples']:,} {data['rows']}"


def chosen_by(report: Report, config: GradProbeConfig) -> str:
    """How the sparsity was chosen, and that what is reported was measured apart from it, or was not."""
    selection = report.selection
    if selection is None:
        return ""
    value = "of no sparsity that was tried" if selection["value"] is None else f"{selection['value']:,.4g}"
    limit = f"limit {selection['limit']:,.4g}: {config.max_metric_drop} from {report.made_of.whose}"
    if selection["source"] is None:
        return (
            f"**Chosen by the same measurement.** A metric of the user's own chose the sparsity: {value} ({limit}). "
            "The number that chose is the number that is reported, so expect less of it on data that it has not seen."
        )
    return (
        f"**Chosen apart.** The sparsity was chosen by the {selection['metric']} on {selection['source']}, "
        f"{selection['protocol']}: {value} there ({limit}). What is reported was measured on rows that did not choose."
    )
