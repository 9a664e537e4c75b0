"""Entries of a card's model-index: what was measured, under the names that the Hub shows."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from huggingface_hub import EvalResult

from gradprobe_hf.evaluation.harness import TaskScore
from gradprobe_hf.report.original import DENSE


def text_results(
    described: Mapping[str, Any],
    task: str,
    measured: Mapping[str, Any],
    beside: str = DENSE.name,
    dtype: str | None = None,
) -> list[EvalResult]:
    """Those of batches; what is not finite is no entry.

    Protocol and fingerprint are arguments of each metric, for the Hub's clients hold those of a data set for the same
    whatever its arguments are.

    Args:
        described: the batches, as `Batches.describe` has them; `known_text`: about which share of them the model was
            calibrated, its sparsity chosen, or it trained on.
        task: the Hub's name of what the model is for.
        measured: `perplexity`, `divergence` (`Divergence.to_dict`) and `metric` of the pruned model, each or None.
        beside: the model that the divergence is from.
        dtype: in which it was measured, if that is another one than the weights are stored in.
    """
    found = [("perplexity", "Perplexity", measured["perplexity"])]
    if divergence := measured.get("divergence"):
        found.append(("kl_divergence", f"KL divergence from {beside} (nats per token)", divergence["kl"]))
        found.append(("top1_agreement", f"Top-1 agreement with {beside}", divergence["top1_agreement"]))
    if metric := measured.get("metric"):
        found.append((metric["name"], capitalised(metric["title"]), metric["pruned"]))
    read = {"protocol": described["protocol"], "fingerprint": described["fingerprint"][:16]}
    read |= {} if dtype is None else {"dtype": dtype}
    # A reader takes it for held-out text otherwise.
    read |= {f"{what}_on": f"about {share:.0%} of it" for what, share in (described.get("known_text") or {}).items()}
    return [
        EvalResult(
            task_type=task,
            task_name=task.replace("-", " ").title(),
            **_data_set(described["dataset_id"], described["source"]),
            metric_type=kind,
            metric_name=name,
            metric_args=dict(read),
            metric_value=round(value, 4),
        )
        for kind, name, value in found
        if value is not None and math.isfinite(value)
    ]


def _data_set(dataset_id: str | None, source: str) -> dict[str, Any]:
    """The data set as the Hub knows it: its id, configuration and split, and a name to read; of a file its own.

    >>> _data_set("Salesforce/wikitext", "Salesforce/wikitext:wikitext-2-raw-v1:test")["dataset_name"]
    'wikitext (wikitext-2-raw-v1), test'
    >>> _data_set(None, "a Dataset (sst2)")["dataset_type"], _data_set(None, "pydoc (held out): topics")["dataset_type"]
    ('Dataset', 'pydoc')
    >>> _data_set(None, "2 texts")["dataset_type"], _data_set(None, "my news.txt")["dataset_type"]
    ('texts', 'my news.txt')
    """
    rest = source.removeprefix(f"{dataset_id}:").split(":") if dataset_id else []
    if dataset_id is None or not 1 <= len(rest) <= 2 or not source.startswith(f"{dataset_id}:"):
        # Of one in memory, "a Dataset (sst2)" or "2 texts", of which the number is no type. A file's name is whole: the
        # Hub's clients hold results of one type for those of one data set.
        kind = re.fullmatch(r"(?:a |\d+ )?([^\s.:]+)(?: \([^)]*\))?(?:: .*)?", source)
        return {"dataset_type": dataset_id or (kind[1] if kind else source), "dataset_name": source}
    *config, split = rest
    return {
        "dataset_type": dataset_id,
        "dataset_name": dataset_id.split("/")[-1] + "".join(f" ({name})" for name in config) + f", {split}",
        "dataset_config": config[0] if config else None,
        "dataset_split": split,
    }


def capitalised(text: str) -> str:
    """With a capital in front, and the others as they are: "BLEU" stays that."""
    return text[:1].upper() + text[1:]


def task_results(scores: Iterable[TaskScore], limit: int | None = None) -> list[EvalResult]:
    """Those of tasks of lm-evaluation-harness. Args: limit: the first so many questions alone; None: all."""
    some = "" if limit is None else f", the first {limit} questions"
    return [
        EvalResult(
            task_type="text-generation",
            task_name="Text Generation",
            dataset_type=score.task,
            dataset_name=f"{score.task} (lm-evaluation-harness)",
            metric_type=score.metric.split(" ")[0],
            metric_name=score.metric + ("" if score.shots is None else f", {score.shots}-shot") + some,
            metric_value=round(score.value, 4),
        )
        for score in scores
        if math.isfinite(score.value)
    ]
