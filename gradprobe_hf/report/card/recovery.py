"""What a card says of a recovery: how the kept weights were trained, and what was measured before."""

from __future__ import annotations

from typing import Any

from gradprobe_hf.report.report import Report


def recovery_paragraph(report: Report) -> str:
    """One paragraph; empty where nothing was trained."""
    recovery = report.recovery
    if recovery is None:
        return ""
    options, held_out, text = recovery["options"], recovery["held_out"], recovery["text"]
    first, best = held_out["0"], held_out[str(recovery["best_step"])]
    earlier = f" It had been trained so before, in {n} steps." if (n := recovery.get("earlier_steps")) else ""
    stayed = " Every zero stayed." if report.zeros and report.structure is None else ""
    said = [
        f"**Recovery.** After pruning, {_trained(options)} towards {_teacher(report)}, in "
        f"{recovery['steps']} steps ({recovery['tokens']:,} tokens of {text['source']}; {text['protocol']}; "
        f"fingerprint `{text['fingerprint'][:16]}`).{earlier}{stayed}",
        f"What was minimised is the mean KL divergence of {_predictions(options, report.beside.whose)}, with AdamW at "
        f"a learning rate of {options['learning_rate']:g}. On {recovery['held_out_windows']} windows of that text that "
        f"were never trained on it went from {first:.4f} to {best:.4f} nats per token, at step "
        f"{recovery['best_step']}, whose state was kept.",
    ]
    if recovery["before"] is not None and report.evaluation is not None:
        said.append(_before(recovery["before"], report.evaluation))
    return " ".join(said)


def _teacher(report: Report) -> str:
    teacher = report.recovered_towards
    if teacher is None:
        return f"{report.made_of.whose} predictions"
    return (
        f"the predictions of `{teacher['name']}` ({teacher['parameters']:,} parameters), which all that was measured "
        f"is beside; the model that was pruned here has {report.model['parameters']:,}"
    )


def _trained(options: dict[str, Any]) -> str:
    if options["lora_r"] is None:
        return "all weights that were not pruned were trained"
    return f"LoRA adapters of rank {options['lora_r']}, inside the mask, were trained and folded into the kept weights"


def _predictions(options: dict[str, Any], whose: str) -> str:
    k = options["teacher_top_k"]
    whole = f"its next-token predictions from {whose}"
    return whole if k is None else f"{whole}, of the {k} tokens most likely there and all others as one"


def _before(before: dict[str, Any], after: dict[str, Any]) -> str:
    """What the evaluation says of the model as pruning had left it."""
    values = [f"perplexity {one['pruned']['perplexity']:,.2f}" for one in (before, after)]
    if before["divergence"] is not None:
        values = [
            f"{value}, KL {one['divergence']['kl']:.4f}" for value, one in zip(values, (before, after), strict=True)
        ]
    return (
        f"On the evaluation text, which is another one, the pruned model had {values[0]} before, and {values[1]} after."
    )
