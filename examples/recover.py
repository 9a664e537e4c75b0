"""Prune a model and recover it, towards the dense model's predictions and towards the text, and measure on other text.

    make bench-recovery        # a model of 15M, into benchmarks/results/recovery.json; goes on where it stopped

The learning rate is the one with the least divergence on the held-out part of the training text; nothing is chosen on
an evaluation text. Labels are what is compared with: cross-entropy of the pruned model, and of the dense one.

usage: python examples/recover.py --model MODEL --text SPEC|--split FILE --evaluation NAME=SPEC ... --json FILE
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from gradprobe_hf import GradProbeConfig, RecoveryConfig, prune_pretrained, recover_pretrained
from gradprobe_hf.checkpoint.inspect import inspect_checkpoint
from gradprobe_hf.data.windows import WindowSpec, load_batches
from gradprobe_hf.evaluation.divergence import measure_pair
from gradprobe_hf.evaluation.divergence_loss import TopPredictions
from gradprobe_hf.model.loading.load import load_model
from gradprobe_hf.model.loading.placement import accelerator
from gradprobe_hf.model.loading.processing import load_processing_class
from gradprobe_hf.probe.engine import Workload
from gradprobe_hf.recovery.text import Reading, read_text
from gradprobe_hf.recovery.trainer import BestState, RecoveryTrainer, training_arguments
from gradprobe_hf.report.build import versions
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.training import SparsityCallback

DENSE, PRUNED = "dense", "pruned"
KL, OWN, LABELS, DENSE_LABELS = "recovered", "recovered, own text", "cross-entropy", "dense, cross-entropy"
ROWS = DENSE, PRUNED, KL, LABELS, DENSE_LABELS, OWN


def loaded(name: str | Path) -> PreTrainedModel:
    """In float32, where models compute: on the accelerator if there is one."""
    return load_model(name, dtype=torch.float32).eval().to(accelerator())


class Labels:
    """A teacher that is certain of the text: the divergence from it is cross-entropy."""

    identity = "labels"

    def predictions(self, batch: Mapping[str, Tensor]) -> TopPredictions:
        ids = batch["shift_labels"].flatten().clamp(min=0)[:, None]
        nothing_else = torch.full(ids.shape[:1], -torch.inf, device=ids.device)
        return TopPredictions(torch.zeros(ids.shape, device=ids.device), ids, nothing_else)


@dataclass
class Bench:
    """What all rows have in common, and the figures so far."""

    args: argparse.Namespace
    found: dict[str, Any]

    def __post_init__(self) -> None:
        self.dense = loaded(self.args.model)
        self.tokenizer = load_processing_class(self.dense)
        spec = WindowSpec(self.args.evaluation_samples, self.args.sequence_length, self.args.batch_size)
        self.texts = {
            name: load_batches(
                source, spec, part="evaluation", model=self.dense, processing_class=self.tokenizer, progress=False
            )
            for name, source in self.args.evaluation
        }
        self.config = RecoveryConfig(
            steps=self.args.steps,
            batch_size=self.args.batch_size,
            sequence_length=self.args.sequence_length,
            eval_steps=max(1, self.args.steps // 4),
            save_steps=max(1, self.args.steps // 4),
        )

    def row(self, name: str, model: Any, **more: Any) -> None:
        """Measure a model on every text, and keep the row."""
        measured = {}
        for text, batches in self.texts.items():
            pair = measure_pair(
                Workload(self.dense, batches, progress=False), Workload(model, batches, progress=False), label=text
            )
            assert pair.divergence is not None, "next tokens are predicted"
            measured[text] = {
                "perplexity": pair.pruned.perplexity,
                "kl": pair.divergence.kl,
                "top1_agreement": pair.divergence.top1_agreement,
                "protocol": batches.describe()["protocol"],
            }
        self.found["rows"][name] = {**more, "texts": measured}
        self.save()

    @property
    def trained_on(self) -> str | dict[str, float]:
        """One text, or several in equal parts."""
        names = self.args.recovery_text or [self.args.text]
        return names[0] if len(names) == 1 else dict.fromkeys(names, 1.0)

    def save(self) -> None:
        self.args.json.write_text(json.dumps(self.found, indent=2) + "\n")

    def pruned(self) -> Path:
        """The pruned checkpoint, made if it is not there."""
        if not self.args.pruned.exists():
            options = {"num_samples": self.args.num_samples, "sequence_length": self.args.sequence_length}
            prune_pretrained(
                loaded(self.args.model),
                GradProbeConfig(sparsity=self.args.sparsity, **options),
                calibration=self.args.text,
                evaluation=False,
                processing_class=self.tokenizer,
                output_dir=self.args.pruned,
                progress=False,
            )
        return Path(self.args.pruned)

    def towards_dense(self, name: str, rate: float, text: str | dict[str, float]) -> Any:
        """What a recovery at a learning rate leaves; made if it is not there."""
        folder = self.args.pruned.with_name(f"{self.args.pruned.name}-{name.split()[-1]}-{rate:g}")
        known = self.found["rates"].setdefault(name, {})
        if f"{rate:g}" not in known:
            config = replace(self.config, learning_rate=rate)
            result = recover_pretrained(
                self.pruned(),
                self.dense,
                config,
                text=text,
                evaluation=False,
                output_dir=folder,
                overwrite=folder.exists(),
                resume_dir=folder.with_name(f"{folder.name}-run"),
                progress=False,
                dtype="float32",
            )
            recovery = result.report.recovery
            assert recovery is not None, "it was made"
            known[f"{rate:g}"] = {
                "held_out": recovery["held_out"][str(recovery["best_step"])],
                "best_step": recovery["best_step"],
                "seconds": round(recovery["seconds"], 1),
                "tokens": recovery["tokens"],
            }
            self.save()
        return loaded(folder)

    def towards_labels(self, model: Any, keeps_zeros: bool) -> Any:
        """The same steps of cross-entropy at the rate that was chosen; its best held-out state."""
        reading = Reading(self.dense, self.tokenizer, Processes(), False)
        config = replace(self.config, learning_rate=float(self.found["learning_rate"]))
        text = read_text(self.trained_on, config, reading)
        with tempfile.TemporaryDirectory() as folder:
            best = BestState(Path(folder), config.early_stopping_patience)
            on_cpu = not torch.accelerator.is_available()
            arguments = training_arguments(config, Path(folder), processes=Processes(), saves=False, on_cpu=on_cpu)
            arguments.eval_on_start = True
            masks = [SparsityCallback("from-zeros")] if keeps_zeros else []
            RecoveryTrainer(
                model,
                arguments,
                Labels(),
                Processes(),
                train_dataset=text.trained,
                eval_dataset=text.kept_back,
                callbacks=[*masks, best],
            ).train()
            best.load(model)
        return model.eval()


def check_goes_on(args: argparse.Namespace, found: dict[str, Any], asked: dict[str, Any]) -> None:
    """Exit where figures or checkpoint that are there already are of another run: they would be shown as of this."""
    others = [f"{name} {found[name]}" for name, value in asked.items() if found.get(name, value) != value]
    if others:
        sys.exit(f"{args.json} has rows of {', '.join(others)}: give another --json, or remove it.")
    if args.pruned.exists():
        made_of = json.loads((args.pruned / "gradprobe_report.json").read_text())["model"]["name"]
        sparsity = inspect_checkpoint(args.pruned).sparsity
        if Path(made_of).name != Path(args.model).name or abs(sparsity - args.sparsity) > 1e-3:
            sys.exit(
                f"{args.pruned} is {made_of} at a sparsity of {sparsity:.2%}: give another --pruned, or remove it."
            )
    recovered = [one for one in args.pruned.parent.glob(f"{args.pruned.name}-*") if (one / "config.json").exists()]
    if recovered and not found["rates"]:
        sys.exit(f"{recovered[0]} is of a run whose figures are not in {args.json}: give another --pruned.")


def run(args: argparse.Namespace) -> None:
    args.json.parent.mkdir(parents=True, exist_ok=True)
    found = json.loads(args.json.read_text()) if args.json.exists() else {"rows": {}, "rates": {}}
    names = ("steps", "batch_size", "sequence_length", "num_samples", "evaluation_samples")
    asked = {"model": Path(args.model).name} | {name: getattr(args, name) for name in names}
    asked["text"] = args.split.name if args.split else args.text  # a part of a split one has another name each time
    asked["asked_sparsity"], asked["evaluation"] = args.sparsity, [name for name, _ in args.evaluation]
    asked |= {"recovery_text": args.recovery_text, "learning_rates": args.learning_rates}
    check_goes_on(args, found, asked)
    if {LABELS, DENSE_LABELS, OWN} & set(args.rows) and KL not in args.rows and "learning_rate" not in found:
        sys.exit(f"--rows: the learning rate is chosen by {KL!r}, which has to be among them.")
    bench = Bench(args, found)
    made = {
        DENSE: lambda: bench.row(DENSE, bench.dense),
        PRUNED: lambda: bench.row(PRUNED, loaded(bench.pruned())),
        KL: lambda: chosen(bench),
        LABELS: lambda: bench.row(LABELS, bench.towards_labels(loaded(bench.pruned()), True)),
        DENSE_LABELS: lambda: bench.row(DENSE_LABELS, bench.towards_labels(copy.deepcopy(bench.dense), False)),
        OWN: lambda: bench.row(OWN, bench.towards_dense(OWN, float(found["learning_rate"]), "self")),
    }
    found |= asked | {"versions": versions()}
    for name in args.rows:
        if name not in found["rows"]:
            made[name]()
    if args.pruned.exists():
        found["sparsity"] = inspect_checkpoint(args.pruned).sparsity
    bench.save()
    show(found)


def chosen(bench: Bench) -> None:
    """A recovery for each learning rate; the row is that of the least divergence on held-out text."""
    for rate in bench.args.learning_rates:
        bench.towards_dense(KL, rate, bench.trained_on)
    rates = bench.found["rates"][KL]
    bench.found["learning_rate"] = float(min(rates, key=lambda rate: rates[rate]["held_out"]))
    bench.row(KL, bench.towards_dense(KL, bench.found["learning_rate"], bench.trained_on))


def show(found: dict[str, Any]) -> None:
    texts = list(next(iter(found["rows"].values()))["texts"])
    table = Table("", *(f"{text}: {what}" for text in texts for what in ("perplexity", "KL")))
    for name, row in found["rows"].items():
        values = [f"{row['texts'][text][what]:.4g}" for text in texts for what in ("perplexity", "kl")]
        table.add_row(name, *values)
    Console(soft_wrap=True).print(table)
    known = [f"{found['sparsity']:.4%} of the weights are zero"] if "sparsity" in found else []
    known += [f"learning rate {found['learning_rate']:g}"] if "learning_rate" in found else []
    print("; ".join(known))


def split(path: Path, folder: Path) -> tuple[str, str]:
    """Two files of a text: its first seven tenths, to train on, and the rest. Paragraphs stay whole, if any."""
    text = path.read_text(encoding="utf-8")
    wanted = int(0.7 * len(text))
    middle = next((at for end in ("\n\n", "\n", " ") if (at := text.rfind(end, 0, wanted)) > 0), wanted)
    parts = folder / f"{path.stem}-first.txt", folder / f"{path.stem}-rest.txt"
    for part, content in zip(parts, (text[:middle], text[middle:]), strict=True):
        part.write_text(content, encoding="utf-8")
    return str(parts[0]), str(parts[1])


def named(text: str) -> tuple[str, str]:
    name, _, source = text.partition("=")
    return name, source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--text", help="text to prune and to train on")
    text.add_argument("--split", type=Path, help="a file of text: seven tenths of it for that, the rest to measure on")
    parser.add_argument("--evaluation", type=named, nargs="+", default=[], metavar="NAME=SPEC")
    parser.add_argument("--json", type=Path, required=True, help="where the figures are written")
    parser.add_argument("--pruned", type=Path, default=Path("runs/recovery"), help="the pruned checkpoint, kept")
    parser.add_argument("--recovery-text", nargs="+", metavar="SPEC", help="text to train on (default: --text)")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, metavar="ROW", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--sparsity", type=float, default=0.6)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--num-samples", type=int, default=32, help="windows to probe on")
    parser.add_argument("--evaluation-samples", type=int, default=20)
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[2e-4, 5e-4])
    args = parser.parse_args()
    if not (args.evaluation or args.split):
        parser.error("--evaluation: there is nothing to measure on. Give NAME=SPEC, or a file to --split.")
    with tempfile.TemporaryDirectory() as folder:
        if args.split:
            args.text, rest = split(args.split, Path(folder))
            args.evaluation.insert(0, (args.split.stem, rest))
        run(args)


if __name__ == "__main__":
    main()
