"""Perplexity of a model pruned on one text, or on two in equal shares, measured on three kinds of text.

A row is a calibration text: the model's own, WikiText-2 (who the text of a user is), C4 (the web), the Python manual
("pydoc"), or a mixture of them. C4 is one file: windows are drawn from its first 70%, and measured on the rest. Cells
that the result file has are not made again, so that a run may be stopped, or make a few cells at a time.

    make bench-mixtures

usage: python -m benchmarks.mixtures --model DIR --wikitext SPEC SPEC --c4 FILE [--texts "own + pydoc"] [--presets fast]
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any, get_args

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.mixtures_table import mixtures_table
from benchmarks.quality_cells import code_commit, write_whole
from gradprobe_hf import GradProbeConfig
from gradprobe_hf.comparison.rows import Comparison
from gradprobe_hf.config.presets import Preset
from gradprobe_hf.data.batches import Batches
from gradprobe_hf.data.text.mixture import shares
from gradprobe_hf.data.text.self_generated import KeptText
from gradprobe_hf.data.windows import WindowSpec, Writing, load_batches
from gradprobe_hf.model.fingerprint import weights_fingerprint
from gradprobe_hf.model.passes.upcast import upcast_products
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.report.build import versions
from gradprobe_hf.run.context import RunContext
from gradprobe_hf.run.decision import PruningDecision
from gradprobe_hf.runtime.processes import Processes

RESULTS = Path(__file__).parent / "results" / "mixtures.json"
AND = " + "
TEXTS = ("own", "C4", "WikiText-2", "pydoc", "own + WikiText-2", "own + pydoc", "C4 + pydoc")
MEASURED = ("WikiText-2", "C4", "pydoc")
CALIBRATION_SHARE = 0.7  # of C4's documents


class MixturesFile:
    """All cells of one model and protocol, written whenever there is one more.

    Args:
        settings: the model and the protocol.
        fresh: forget the cells of earlier runs.

    Raises:
        SystemExit: the file has cells of other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any], fresh: bool) -> None:
        saved = json.loads(path.read_text()) if path.exists() and not fresh else {}
        if saved.get("settings", settings) != settings:
            raise SystemExit(
                f"{path} has cells of other settings: --fresh forgets them, and another --output keeps them."
            )
        self.path, self.settings = path, settings
        self.dense: dict[str, float] = saved.get("dense", {})
        self.rows: list[dict[str, Any]] = saved.get("rows", [])

    def has(self, text: str, preset: str, sparsity: float) -> bool:
        return any((row["text"], row["preset"], row["sparsity"]) == (text, preset, sparsity) for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        write_whole(self.path, json.dumps(self.to_dict(), indent=2) + "\n")

    def to_dict(self) -> dict[str, Any]:
        return {"settings": self.settings, "dense": self.dense, "rows": self.rows, "versions": versions()}


class Bench:
    """One model, its texts, and the cells that are made of them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(args.model)
        self.targets = find_targets(self.model)
        calibrated, measured = self._split(args.c4)
        self.sources = {"own": "self", "WikiText-2": args.wikitext[0], "C4": str(calibrated), "pydoc": "pydoc"}
        tests = {"WikiText-2": args.wikitext[1], "C4": str(measured), "pydoc": "pydoc"}
        self.measured = {name: self._batches(tests[name], "evaluation", args.evaluation_samples) for name in MEASURED}
        settings = {
            "model": Path(args.model).name,
            "dtype": args.dtype,
            "calibration": f"{args.num_samples} x {args.sequence_length}",
            "evaluation": {
                name: {"text": f"{text.samples} x {args.sequence_length}", "fingerprint": text.fingerprint}
                for name, text in self.measured.items()
            },
        }
        self.file = MixturesFile(args.output, settings, args.fresh)

    def run(self) -> None:
        for sparsity in self.args.sparsities:
            for text in self.args.texts:
                todo = [preset for preset in self.args.presets if not self.file.has(text, preset, sparsity)]
                if todo:
                    self._make(text, sparsity, todo)

    def _make(self, text: str, sparsity: float, presets: list[Preset]) -> None:
        """The cells of one calibration text and sparsity: its presets share the first probe."""
        configs = {preset: self._config(preset, sparsity) for preset in presets}
        calibration = self._batches(self._source(text), "calibration", self.args.num_samples)
        first = next(iter(self.measured.values()))
        context = RunContext(self.model, self.tokenizer, self.targets, next(iter(configs.values())), calibration, first)
        comparison = Comparison(context, list(configs.values()))
        if not self.file.dense:
            self.file.dense = self._perplexities(comparison, None, "dense")
        for preset, config in configs.items():
            decision, seconds = comparison.decision(config)
            self.file.add(
                {
                    "text": text,
                    "preset": preset,
                    "sparsity": sparsity,
                    "perplexity": self._perplexities(comparison, decision, f"{text}, {preset}"),
                    "seconds": round(seconds, 1),
                    "commit": code_commit(),
                }
            )

    def _config(self, preset: Preset, sparsity: float) -> GradProbeConfig:
        return GradProbeConfig(
            preset=preset,
            sparsity=sparsity,
            num_samples=self.args.num_samples,
            sequence_length=self.args.sequence_length,
            batch_size=self.args.batch_size,
        )

    def _source(self, text: str) -> str | dict[str, int]:
        """What `calibration` would be: a name, or names of equal weight."""
        parts = [self.sources[part] for part in text.split(AND)]
        return parts[0] if len(parts) == 1 else dict.fromkeys(parts, 1)

    def _batches(self, source: Any, part: Any, samples: int) -> Batches:
        return load_batches(
            source,
            WindowSpec(samples, self.args.sequence_length, self.args.batch_size, seed=0),
            part=part,
            model=self.model,
            processing_class=self.tokenizer,
            writing=Writing(kept=self._kept(source, samples)),
        )

    def _kept(self, source: Any, samples: int) -> KeptText:
        """Own text is written once for all rows that have as many windows of it."""
        weights = source if isinstance(source, dict) else {source: 1}
        own = shares(weights, samples).get("self", 0)
        model = weights_fingerprint(self.model)
        return KeptText(self.args.work / f"own-{own}.safetensors", model, Processes())

    def _perplexities(self, comparison: Comparison, decision: PruningDecision | None, label: str) -> dict[str, float]:
        found = {name: comparison.measured(decision, f"{label}: {name}", text) for name, text in self.measured.items()}
        return {name: one.perplexity or math.nan for name, one in found.items()}

    def _split(self, path: Path) -> tuple[Path, Path]:
        """The documents of a file, which blank lines part, in two files."""
        documents = path.read_text(encoding="utf-8").split("\n\n")
        cut = int(len(documents) * CALIBRATION_SHARE)
        self.args.work.mkdir(parents=True, exist_ok=True)
        files = []
        for name, part in {"calibration": documents[:cut], "evaluation": documents[cut:]}.items():
            files.append(self.args.work / f"c4-{name}.txt")
            files[-1].write_text("\n\n".join(part), encoding="utf-8")
        return files[0], files[1]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--wikitext",
        nargs=2,
        default=["Salesforce/wikitext:wikitext-2-raw-v1:validation", "Salesforce/wikitext:wikitext-2-raw-v1:test"],
        metavar="SPEC",
        help="what is calibrated on, and what is measured",
    )
    parser.add_argument("--c4", type=Path, required=True, metavar="FILE", help="web documents, a blank line between")
    parser.add_argument("--texts", nargs="+", default=list(TEXTS), help="names, or several joined by ' + '")
    parser.add_argument("--presets", nargs="+", default=["fast", "best"], choices=get_args(Preset))
    parser.add_argument("--sparsities", nargs="+", type=float, default=[0.5])
    parser.add_argument("--num-samples", type=int, default=64)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--evaluation-samples", type=int, default=24)
    parser.add_argument("--work", type=Path, default=Path("runs/mixtures"), help="keeps the model's own text")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--fresh", action="store_true", help="forget the cells of earlier runs")
    args = parser.parse_args()
    known = {"own", *MEASURED}
    for text in args.texts:
        if unknown := set(text.split(AND)) - known:
            parser.error(f"--texts {text!r}: {', '.join(unknown)} is none of {', '.join(sorted(known))}")
    return args


def main() -> None:
    bench = Bench(parsed())
    with upcast_products(bench.model):
        bench.run()
    print(mixtures_table(bench.file.to_dict()))


if __name__ == "__main__":
    main()
