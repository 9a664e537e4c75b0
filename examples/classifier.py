"""Fine-tune a classifier on SST-2, prune it on its own labelled sentences and on other text, and compare accuracies.

    python examples/classifier.py --model HuggingFaceTB/SmolLM2-135M --json benchmarks/results/classifier.json

The sentences come from the Hub (`stanfordnlp/sst2`: its test has no labels, so its validation split is the test, and
the end of its training split chooses), or from a folder with train.tsv, dev.tsv and test.tsv, a sentence, a tab and a
label in each line.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, DatasetDict, load_dataset
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from gradprobe_hf import GradProbeConfig, prune_pretrained
from gradprobe_hf.data.batches import Batches
from gradprobe_hf.data.labelled import TaskOptions
from gradprobe_hf.data.windows import WindowSpec, load_batches
from gradprobe_hf.evaluation.task_metric import measure_metric, metric_of
from gradprobe_hf.probe.engine import Workload
from gradprobe_hf.report.build import versions
from gradprobe_hf.tasks.table import TASKS

LABELS = ("negative", "positive")
(TASK,) = TASKS["text-classification"]
CHOSEN_BY = 872  # sentences, of the Hub's training split
LENGTH = 64  # tokens of a sentence at most, and of a window of other text
SORTED = 16  # batches of sentences that are sorted by length together, so that little of a batch is padding


def sentences(source: str) -> DatasetDict:
    """The splits train, dev and test, of columns `sentence` and `label`."""
    folder = Path(source)
    if folder.is_dir():
        files = {name: str(folder / f"{name}.tsv") for name in ("train", "dev", "test")}
        # 3: no quotes. A quotation mark in a sentence is one.
        columns: dict[str, Any] = {"sep": "\t", "names": ["sentence", "label"], "quoting": 3}
        return load_dataset("csv", data_files=files, **columns)
    stored = load_dataset(source)
    rows = len(stored["train"])
    return DatasetDict(
        train=stored["train"].select(range(rows - CHOSEN_BY)),
        dev=stored["train"].select(range(rows - CHOSEN_BY, rows)),
        test=stored["validation"],
    )


def untrained(args: argparse.Namespace) -> tuple[Any, Any]:
    """The first blocks of a language model with a new head, and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForSequenceClassification.from_pretrained(
        args.model,
        dtype=torch.float32,
        id2label=dict(enumerate(LABELS)),
        label2id={name: number for number, name in enumerate(LABELS)},
        pad_token_id=tokenizer.pad_token_id,
        **({} if args.blocks is None else {"num_hidden_layers": args.blocks}),
    )
    return model, tokenizer


def fine_tune(model: Any, tokenizer: Any, rows: Dataset, args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    model.get_input_embeddings().requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.learning_rate, weight_decay=0.01)
    steps = args.epochs * -(-len(rows) // args.batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.learning_rate, total_steps=steps, pct_start=0.1)
    model.train()
    for epoch in range(args.epochs):
        for part in batches_by_length(rows.shuffle(seed=epoch), args.batch_size):
            inputs = tokenizer([row["sentence"] for row in part], padding=True, return_tensors="pt").to(model.device)
            with torch.autocast(model.device.type, torch.bfloat16):
                labels = torch.tensor([row["label"] for row in part], device=model.device)
                loss = model(**inputs, labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    model.requires_grad_(True).eval().to(torch.bfloat16)


def batches_by_length(rows: Dataset, size: int) -> list[list[dict[str, Any]]]:
    """Batches of sentences of about one length, in a drawn order."""
    found = []
    listed = rows.to_list()
    for start in range(0, len(listed), SORTED * size):
        part = sorted(listed[start : start + SORTED * size], key=lambda row: len(row["sentence"]))
        found += [part[first : first + size] for first in range(0, len(part), size)]
    return [found[index] for index in torch.randperm(len(found)).tolist()]


def accuracy(model: Any, tokenizer: Any, rows: Dataset) -> float:
    batches = load_batches(
        rows.select(sorted(range(len(rows)), key=lambda index: len(rows[index]["sentence"]))),
        WindowSpec(len(rows), LENGTH, batch_size=8),
        part="evaluation",
        model=model,
        processing_class=tokenizer,
        task=TaskOptions(TASK),
    )
    metric = metric_of(TASK, "accuracy", batches, tokenizer, model.config)
    assert metric is not None, "it was asked for"
    return measure_metric(Workload(model, batches), metric)


def plain_text(model: Any, tokenizer: Any, args: argparse.Namespace) -> Batches:
    """As many tokens of other text as the sentences have, about: these have 25 each."""
    windows = WindowSpec(max(2, args.num_samples * 25 // LENGTH), LENGTH, batch_size=8)
    return load_batches(args.text, windows, part="calibration", model=model, processing_class=tokenizer)


def run(args: argparse.Namespace) -> None:
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
    rows = sentences(args.data)
    model, tokenizer = untrained(args)
    drawn = rows["train"].shuffle(seed=0).select(range(min(args.sentences, len(rows["train"]))))
    start = time.perf_counter()
    fine_tune(model, tokenizer, drawn, args)
    figures: dict[str, Any] = {
        "model": Path(args.model).name,
        "blocks": model.config.num_hidden_layers,
        "sentences": len(drawn),
        "tested": len(rows["test"]),
        "num_samples": args.num_samples,
        "seconds_of_training": round(time.perf_counter() - start),
        "versions": versions(),
        "rows": [],
    }

    def add(method: str, calibration: str, pruned: Any, sparsity: float) -> None:
        share = accuracy(pruned, tokenizer, rows["test"])
        row = {"method": method, "calibration": calibration, "sparsity": sparsity, "accuracy": share}
        figures["rows"].append(row)
        if args.json:  # as far as it has got
            args.json.write_text(json.dumps(figures, indent=2) + "\n")

    def prune(method: str, calibration: str, data: Any, evaluation: Any = False, **options: Any) -> None:
        pruned = copy.deepcopy(model)
        config = GradProbeConfig(num_samples=args.num_samples, sequence_length=LENGTH, batch_size=8, **options)
        result = prune_pretrained(pruned, config, calibration=data, evaluation=evaluation, processing_class=tokenizer)
        add(method, calibration, pruned, result.report.sparsity)

    add("dense", "", model, 0.0)
    own, text = rows["train"], plain_text(model, tokenizer, args)
    for sparsity in args.sparsity:
        prune("one probe + ADMM", "its labelled sentences", own, sparsity=sparsity)
        # Without a probe there is no loss, and so no need of labels: these two differ in their text alone.
        free = {"sparsity": sparsity, "update": "sparsegpt+admm"}
        prune("SparseGPT + ADMM", "its sentences", own, **free)
        prune("SparseGPT + ADMM", f"other text ({args.text})", text, **free)
    # Without a weight update an attempt is one measurement on the sentences that choose.
    searched = {"preset": "fast", "sparsity": 0.9, "initial_sparsity": 0.3, "sparsity_step": 0.2}
    drop = args.max_metric_drop
    name = f"one probe, --max-metric-drop {drop}"
    prune(name, "its labelled sentences", own, rows["dev"], max_metric_drop=drop, **searched)
    show(figures)


def show(figures: dict[str, Any]) -> None:
    table = Table("method", "calibrated on", title=f"{figures['model']}, {figures['blocks']} blocks, on SST-2")
    for column in ("sparsity", "accuracy"):
        table.add_column(column, justify="right")
    for row in figures["rows"]:
        table.add_row(row["method"], row["calibration"], f"{row['sparsity']:.1%}", f"{row['accuracy']:.1%}")
    Console(soft_wrap=True).print(table)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", default="stanfordnlp/sst2", help="a folder, or a data set of the Hub")
    parser.add_argument("--blocks", type=int, help="of the model, from the first on (default: all)")
    parser.add_argument("--sentences", type=int, default=6920, help="to train on")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=4e-4)
    parser.add_argument("--text", default="pydoc", help="other text to calibrate on")
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.5, 0.7])
    parser.add_argument("--num-samples", type=int, default=128, help="sentences to calibrate on")
    parser.add_argument("--max-metric-drop", default="1%")
    parser.add_argument("--json", type=Path, help="where the figures are written")
    run(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
