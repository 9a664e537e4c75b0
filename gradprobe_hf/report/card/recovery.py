"""What a card says of a recovery: how the kept weights were trained, and what was measured before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gradprobe_hf.report.report import Report


def recovery_paragraph(report: Report) -> str:
    """One paragraph; empty where nothing was trained."""
    recovery = report.recovery
    if recovery is None:
        return ""
    options, held_out, text = recovery["options"], recovery["held_out"], recovery["text"]
    of_text = recovery["rows"] == "windows"
    where = f"{recovery['held_out_windows']} {recovery['rows']} of that {'text' if of_text else 'data'}"
    first, best = held_out["0"], held_out[str(recovery["best_step"])]
    unit = f"nats per {'token' if of_text else 'prediction'}"
    if report.is_recovered:
        vain, at = "", f"at step {recovery['best_step']}, whose state was kept"
        went = f"went from {first:.4f} to {best:.4f} {unit}, {at}{_as_left(report)}"
    else:
        vain, went = "No step of it helped: the weights are as they were. ", f"never fell below {first:.4f} {unit}"
    earlier = f" It had been trained so before, in {n} steps." if (n := recovery.get("earlier_steps")) else ""
    stayed = " Every zero stayed." if report.zeros and report.structure is None else ""
    said = [
        f"**Recovery.** {vain}After pruning, {_trained(options)} towards {_teacher(report)}, in "
        f"{recovery['steps']} steps ({recovery['tokens']:,} {recovery['unit']} of {text['source']}; "
        f"{text['protocol']}; fingerprint `{text['fingerprint'][:16]}`).{earlier}{stayed}",
        f"What was minimised is the mean KL divergence of {_predictions(recovery, report.beside.whose)}, with AdamW at "
        f"a learning rate of {options['learning_rate']:g}. On {where} that were never trained on it "
        f"{went}.",
    ]
    if report.is_recovered and recovery["before"] is not None and report.evaluation is not None:
        said.append(_before(recovery["before"], report.evaluation, "text" if of_text else "data"))
    return " ".join(said)


def _as_left(report: Report) -> str:
    """What the model has of it as it is stored. A report of before that was measured has none."""
    assert report.recovery is not None, "there was one"
    value = report.recovery.get("held_out_as_left")
    return "" if value is None else f"; as it is stored, in {report.model['dtype']}, the model has {value:.4f}"


def _teacher(report: Report) -> str:
    teacher = report.recovered_towards
    if teacher is None:
        return f"{report.made_of.whose} predictions"
    name = f"`{teacher['name']}`" if teacher["name"] else "the dense model"
    return (
        f"the predictions of {name} ({teacher['parameters']:,} parameters), which all that was measured "
        f"is beside; the model that was pruned here has {report.model['parameters']:,}"
    )


def _trained(options: dict[str, Any]) -> str:
    if options["lora_r"] is None:
        return "all weights that were not pruned were trained"
    return f"LoRA adapters of rank {options['lora_r']}, inside the mask, were trained and folded into the kept weights"


def _predictions(recovery: dict[str, Any], whose: str) -> str:
    if recovery["rows"] != "windows":
        return f"its predictions from {whose}, where the rows have labels (which played no other part)"
    k = recovery["options"]["teacher_top_k"]
    whole = f"its next-token predictions from {whose}"
    return whole if k is None else f"{whole}, of the {k} tokens most likely there and all others as one"


def _before(before: dict[str, Any], after: dict[str, Any], what: str) -> str:
    """What the evaluation says of the model as pruning had left it. Args: what: it was measured on."""
    values = [", ".join(_values(one)) for one in (before, after)]
    return f"On the separate evaluation {what} the pruned model had {values[0]} before, and {values[1]} after."


def _values(measured: dict[str, Any]) -> Iterator[str]:
    pruned = measured["pruned"]
    yield f"loss {pruned['loss']:,.4f}" if pruned["perplexity"] is None else f"perplexity {pruned['perplexity']:,.2f}"
    if measured["divergence"] is not None:
        yield f"KL {measured['divergence']['kl']:.4f}"
    if metric := measured["metric"]:
        yield f"{metric['title']} {metric['pruned']:.4f}"
