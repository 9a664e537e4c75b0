"""Prune a chat model with a LoRA adapter, without losing the task that the adapter was trained for.

    make bench-chat        # SmolLM2-135M-Instruct tells good reviews from bad ones; benchmarks/results/chat.json

Trains an adapter on SST-2 as chats, folds it, prunes on its own chats and on plain text, and trains the former with its
zeros kept. Prints the accuracy on sentences that nothing was trained, calibrated or chosen on.

usage: python examples/chat_adapter.py --model MODEL --output DIR [--data DIR] [--train 600] [--sparsity 0.5]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from gradprobe_hf import GradProbeConfig, prune_pretrained
from gradprobe_hf.report.build import versions
from gradprobe_hf.training import SparsityCallback

ANSWERS = ("negative", "positive")
HUB = "stanfordnlp/sst2"  # its test split has no labels: its validation split is reported on
Sentence = tuple[str, int]


def read(data: Path | None, part: str) -> list[Sentence]:
    """Sentences of the Stanford Sentiment Treebank with labels: from `part.tsv` in a folder, or from the Hub."""
    if data is not None:
        lines = (data / f"{part}.tsv").read_text(encoding="utf-8").splitlines()
        return [(sentence, int(label)) for sentence, label in (line.rsplit("\t", 1) for line in lines)]
    from datasets import load_dataset

    rows = load_dataset(HUB, split={"train": "train", "test": "validation"}[part])
    return [(row["sentence"], row["label"]) for row in rows]


def chat(sentence: str, label: int | None = None) -> list[dict[str, str]]:
    asked = {"role": "user", "content": f"Is this review positive or negative?\n{sentence}"}
    return [asked] if label is None else [asked, {"role": "assistant", "content": ANSWERS[label]}]


def question(tokenizer: Any, sentence: str) -> list[int]:
    """Token ids up to where the answer begins."""
    return list(tokenizer.apply_chat_template(chat(sentence), add_generation_prompt=True)["input_ids"])


def rows_of(tokenizer: Any, sentences: Sequence[Sentence]) -> list[dict[str, list[int]]]:
    """What a Trainer takes, with a loss over the answers alone."""
    rows = []
    for sentence, label in sentences:
        whole = tokenizer.apply_chat_template(chat(sentence, label))["input_ids"]
        asked = len(question(tokenizer, sentence))
        rows.append({"input_ids": whole, "labels": [-100] * asked + whole[asked:]})
    return rows


def answers_of(tokenizer: Any) -> list[int]:
    """The first token of each answer, where its template has the model write it."""
    asked = question(tokenizer, "fine")
    chats = [tokenizer.apply_chat_template(chat("fine", label))["input_ids"] for label in range(len(ANSWERS))]
    found = [whole[len(asked)] for whole in chats]
    if any(whole[: len(asked)] != asked for whole in chats) or len(set(found)) < len(found):
        sys.exit(
            "the chat template of this model does not put the answer right behind the question (it may think first): "
            "give a model whose template does."
        )
    return found


@torch.no_grad()
def accuracy(model: Any, tokenizer: Any, sentences: Sequence[Sentence], batch_size: int = 16) -> float:
    """The share of sentences for which the first token of the right answer is likelier than that of the wrong one."""
    answers = torch.tensor(answers_of(tokenizer))
    model.eval()
    right = 0
    for start in range(0, len(sentences), batch_size):
        part = sentences[start : start + batch_size]
        questions = [torch.tensor(question(tokenizer, sentence)) for sentence, _ in part]
        ids = torch.nn.utils.rnn.pad_sequence(questions, batch_first=True)
        ends = torch.tensor([len(asked) for asked in questions])
        mask = torch.arange(ids.shape[1]) < ends[:, None]
        logits = model(input_ids=ids.to(model.device), attention_mask=mask.long().to(model.device)).logits
        chosen = logits.cpu()[torch.arange(len(part)), ends - 1][:, answers].argmax(-1)
        right += int((chosen == torch.tensor([label for _, label in part])).sum())
    return right / len(sentences)


def trained(model: Any, tokenizer: Any, rows: list[Any], rate: float, steps: int, callbacks: Any = ()) -> None:
    def padded(part: list[Any]) -> dict[str, torch.Tensor]:
        fill = {"input_ids": tokenizer.pad_token_id or 0, "labels": -100}
        columns = {name: [torch.tensor(row[name]) for row in part] for name in fill}
        stacked = {
            name: torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill[name])
            for name, values in columns.items()
        }
        lengths = torch.tensor([[len(ids)] for ids in columns["input_ids"]])
        return {**stacked, "attention_mask": (torch.arange(stacked["input_ids"].shape[1]) < lengths).long()}

    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=8,
            learning_rate=rate,
            lr_scheduler_type="cosine",
            warmup_steps=max(1, steps // 20),
            use_cpu=not torch.accelerator.is_available(),
            save_strategy="no",
            logging_steps=max(1, steps // 10),
            report_to="none",
            seed=0,
        )
        Trainer(model, options, train_dataset=rows, data_collator=padded, callbacks=list(callbacks)).train()


def adapted(args: argparse.Namespace, tokenizer: Any, rows: list[Any]) -> Path:
    """The folder of an adapter; one that is there already, of the same training, is kept."""
    drawn = hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:12]
    settings = {"model": args.model, "steps": args.steps, "train": args.train, "rows": drawn}
    folder = args.output / "adapter"
    made = folder / "settings.json"
    if folder.exists() and (not made.exists() or (kept := json.loads(made.read_text())) != settings):
        of = kept if made.exists() else "another training"
        sys.exit(f"{folder} holds an adapter of {of}: give another --output, or remove it.")
    if not folder.exists():
        base = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(base, config)
        trained(model, tokenizer, rows, rate=5e-4, steps=args.steps)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        made.write_text(json.dumps(settings), encoding="utf-8")
    return folder


def written(path: Path, sentences: Sequence[Sentence]) -> Path:
    """Chats as a file that `gradprobe prune --calibration` takes."""
    lines = [json.dumps({"messages": chat(*sentence)}) for sentence in sentences]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def run(args: argparse.Namespace) -> None:
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    answers_of(tokenizer)  # before anything is trained
    sentences, test = read(args.data, "train"), read(args.data, "test")
    for drawn in (sentences, test):
        random.Random(0).shuffle(drawn)
    sentences, test = sentences[: args.train], test[: args.test]
    rows = rows_of(tokenizer, sentences)
    args.output.mkdir(parents=True, exist_ok=True)
    adapter = adapted(args, tokenizer, rows)
    chats = written(args.output / "chats.jsonl", sentences)

    base = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    found = {"base": accuracy(base, tokenizer, test)}
    dense = PeftModel.from_pretrained(base, adapter).merge_and_unload()
    found["dense"] = accuracy(dense, tokenizer, test)
    config = GradProbeConfig(
        sparsity=args.sparsity, preset="best", num_samples=args.num_samples, sequence_length=args.sequence_length
    )
    texts = {"its own chats": str(chats), "plain text": args.text}
    common = {"processing_class": tokenizer, "evaluation": False, "merge_adapters": True, "dtype": "float32"}
    results = {name: prune_pretrained(adapter, config, calibration=text, **common) for name, text in texts.items()}
    for name, result in results.items():
        found[f"pruned on {name}"] = accuracy(result.model, tokenizer, test)
    result = results["its own chats"]
    trained(result.model, tokenizer, rows, rate=1e-4, steps=args.recovery_steps, callbacks=[SparsityCallback(result)])
    found["... and trained on them, zeros kept"] = accuracy(result.model, tokenizer, test)
    show(found, args, len(test))
    if args.json:
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
        del settings["json"], settings["data"], settings["output"]
        settings["model"] = Path(args.model).name
        figures = {"accuracy": found, "sparsity": result.report.sparsity, **settings, "versions": versions()}
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def show(found: dict[str, float], args: argparse.Namespace, sentences: int) -> None:
    table = Table("", "accuracy", title=f"{Path(args.model).name}, {args.sparsity:.0%} pruned")
    for name, value in found.items():
        table.add_row(name, f"{value:.1%}")
    console = Console(soft_wrap=True, markup=False)
    console.print(table)
    console.print(f"on {sentences} sentences that nothing was trained, calibrated or chosen on", style="dim")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", type=Path, required=True, help="where adapter and chats are kept")
    parser.add_argument("--data", type=Path, help="a folder with SST-2's train.tsv and test.tsv; default: the Hub's")
    parser.add_argument("--text", default="self", help="what `plain text` is")
    parser.add_argument("--sparsity", type=float, default=0.5)
    parser.add_argument("--train", type=int, default=600, help="sentences to train and to calibrate on")
    parser.add_argument("--test", type=int, default=400, help="sentences to report on")
    parser.add_argument("--steps", type=int, default=75, help="training steps of the adapter, of 8 sentences each")
    parser.add_argument("--recovery-steps", type=int, default=75)
    parser.add_argument("--num-samples", type=int, default=32)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--json", type=Path, help="where the figures are written")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
