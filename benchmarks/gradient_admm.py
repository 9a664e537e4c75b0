"""ADMM over gradients (ELSA) at high sparsities, beside one probe with ADMM and recovery on the same text.

    make bench-gradient-admm        # the model of 15M, TinyStories; benchmarks/results/gradient_admm.json

Everything that is trained reads the same windows, which the dense model writes, in as many steps. Each row is a whole
run; rows that the file has are not made again.

usage: python -m benchmarks.gradient_admm --model DIR --calibration SPEC --evaluation SPEC [--rows NAME ...]
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import PreTrainedModel, get_linear_schedule_with_warmup

from benchmarks.quality_texts import TextSpec
from benchmarks.resumed_rows import made_rows, row_parser, windows_of
from gradprobe_hf import GradProbeConfig, RecoveryConfig, prune_pretrained, recover_pretrained
from gradprobe_hf.data.batches import Batches
from gradprobe_hf.data.text.text_options import SELF
from gradprobe_hf.data.windows import WindowSpec, load_batches
from gradprobe_hf.evaluation.divergence import PairedMeasurement, measure_pair
from gradprobe_hf.model.loading.load import load_model
from gradprobe_hf.model.loading.processing import load_processing_class
from gradprobe_hf.model.passes.loss import summed_loss
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.probe.engine import Workload
from gradprobe_hf.training import StepCallback, attached

RESULTS = Path(__file__).parent / "results"
PRUNED, RECOVERED, UNIFORM, BUDGETS = "one probe + admm", "one probe + admm, recovered", "elsa", "elsa, our budgets"
SPARSITIES = (0.7, 0.8, 0.9)
RATES = (2e-4, 1e-3)  # highest learning rates; the first is both methods' own


@dataclass(frozen=True)
class Way:
    """How a row is made. Attributes: `rate`: the highest learning rate, of rows that are trained."""

    method: str
    sparsity: float
    rate: float | None = None

    @property
    def label(self) -> str:
        return self.method if self.rate is None else f"{self.method}, rate {self.rate:g}"

    @property
    def name(self) -> str:
        return f"{self.label}, {self.sparsity:.0%}"


WAYS = [
    Way(method, sparsity, rate)
    for sparsity in SPARSITIES
    for method in (PRUNED, RECOVERED, UNIFORM, BUDGETS)
    for rate in (RATES if method != PRUNED else [None])
]
ROWS = {way.name: way for way in WAYS}
BETAS = (0.9, 0.95)


class GradientAdmm(StepCallback):
    """ADMM between the loss and a number of zeros in each matrix (ELSA, ICLR 2026).

    Gradients get `penalty * (w - z + u)`. Every `distance` steps z becomes the entries of w + u that have the largest
    `v (w + u)^2`, v being Adam's second moment, and u becomes `u + w - z`. At the end w is z.

    Args:
        kept: how many weights stay of each parameter, by name.
    """

    decides_zeros = True

    def __init__(self, kept: Mapping[str, int], penalty: float, distance: int = 32) -> None:
        super().__init__()
        self.kept, self.penalty, self.distance = kept, penalty, distance

    def begin(self) -> None:
        self.parameters = {name: self.model.get_parameter(name) for name in self.kept}
        # Until there are second moments nothing is drawn anywhere: z is w.
        self.z = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self.u = {name: torch.zeros_like(z) for name, z in self.z.items()}

    @torch.no_grad()
    def before_step(self) -> None:
        for name, w in self.parameters.items():
            assert w.grad is not None, "the loss depends on it"
            # Before the first projection w - z is what training has done so far, which nothing is to hold back.
            if self.step > self.distance:
                w.grad.add_(w - self.z[name] + self.u[name], alpha=self.penalty)

    @torch.no_grad()
    def after_step(self) -> None:
        if self.step % self.distance == 0:
            for name, w in self.parameters.items():
                moved = w + self.u[name]
                self.z[name] = largest(moved, self.optimizer.state[w]["exp_avg_sq"] * moved.square(), self.kept[name])
                self.u[name] = moved - self.z[name]

    @torch.no_grad()
    def end(self) -> None:
        for name, w in self.parameters.items():
            w.copy_(self.z[name])


def largest(values: Tensor, scores: Tensor, count: int) -> Tensor:
    """The values of the `count` highest scores; the others zero."""
    chosen = scores.flatten().topk(count).indices
    return torch.zeros_like(values).flatten().index_put_((chosen,), values.flatten()[chosen]).view_as(values)


class Bench:
    """What all rows have in common."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.dense = load_model(args.model, dtype=torch.float32).eval()
        self.tokenizer = load_processing_class(self.dense)
        source = TextSpec.parse(args.evaluation).read()
        self.evaluation = self._batches(source, "evaluation", args.evaluation_samples, args.sequence_length)
        self.text = self._batches(SELF, "calibration", args.text_windows, args.text_length)

    def _batches(self, source: Any, part: Literal["calibration", "evaluation"], samples: int, length: int) -> Batches:
        spec = WindowSpec(samples, length, self.args.batch_size, self.args.seed)
        return load_batches(source, spec, part=part, model=self.dense, processing_class=self.tokenizer)

    def pruned(self, sparsity: float) -> PreTrainedModel:
        """By one probe and ADMM."""
        config = GradProbeConfig(sparsity=sparsity, probes=1, update="admm", **windows_of(self.args))
        calibration = TextSpec.parse(self.args.calibration).read()
        made = prune_pretrained(
            copy.deepcopy(self.dense),
            config,
            calibration=calibration,
            evaluation=False,
            processing_class=self.tokenizer,
            progress=False,
        )
        return made.model.eval()

    def recovered(self, sparsity: float, rate: float) -> PreTrainedModel:
        """The same, trained towards the dense model."""
        args = self.args
        config = RecoveryConfig(
            steps=args.steps,
            learning_rate=rate,
            batch_size=args.batch_size,
            sequence_length=args.text_length,
            bf16=False,
            early_stopping_patience=args.steps,
            seed=args.seed,
        )
        made = recover_pretrained(
            self.pruned(sparsity),
            self.dense,
            config,
            text=self.text,
            evaluation=False,
            processing_class=self.tokenizer,
            progress=False,
        )
        return made.model.eval()

    def elsa(self, kept: Mapping[str, int], rate: float) -> PreTrainedModel:
        """The dense model, trained until no more than these weights are left."""
        args, model = self.args, copy.deepcopy(self.dense).train()
        optimizer = torch.optim.Adam(model.parameters(), rate, BETAS)
        schedule = get_linear_schedule_with_warmup(optimizer, 0, args.steps)
        order = torch.Generator().manual_seed(args.seed)
        batches, numbers = list(self.text), list[int]()
        with attached(GradientAdmm(kept, args.penalty), model, optimizer):
            for _ in range(args.steps):
                numbers = numbers or torch.randperm(len(batches), generator=order).tolist()
                loss, tokens = summed_loss(model, batches[numbers.pop()])
                (loss / tokens).backward()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        return model.eval()

    def measured(self, model: nn.Module) -> PairedMeasurement:
        dense = Workload(self.dense, self.evaluation, progress=False)
        return measure_pair(dense, Workload(model, self.evaluation, progress=False), label="evaluation")


def kept_weights(model: PreTrainedModel, sparsity: float | None = None) -> dict[str, int]:
    """How many weights of each matrix are not zero, or as many as an equal share of each leaves."""
    matrices = {one.parameter: model.get_parameter(one.parameter).detach() for one in find_targets(model)}
    if sparsity is None:
        return {name: int(weight.count_nonzero()) for name, weight in matrices.items()}
    return {name: weight.numel() - round(sparsity * weight.numel()) for name, weight in matrices.items()}


def row(bench: Bench, name: str) -> dict[str, Any]:
    """One way to prune to one sparsity, and what is left of the predictions."""
    way, start = ROWS[name], time.perf_counter()
    if way.rate is None:
        model = bench.pruned(way.sparsity)
    elif way.method == RECOVERED:
        model = bench.recovered(way.sparsity, way.rate)
    else:
        ours = kept_weights(bench.pruned(way.sparsity)) if way.method == BUDGETS else None
        model = bench.elsa(ours or kept_weights(bench.dense, way.sparsity), way.rate)
    found, kept = bench.measured(model), kept_weights(model)
    assert found.divergence is not None, "next tokens are predicted"
    return {
        "row": name,
        "perplexity": found.pruned.perplexity,
        "dense": found.dense.perplexity,
        "kl": found.divergence.kl,
        "top1_agreement": found.divergence.top1_agreement,
        "kept": sum(kept.values()),
        "seconds": round(time.perf_counter() - start, 1),
    }


def gradient_admm_table(results: Mapping[str, Any]) -> str:
    """A row for each method and rate, a column for each sparsity that any of them was made at."""
    made, settings = {one["row"]: one for one in results["rows"]}, results["settings"]
    columns = [sparsity for sparsity in SPARSITIES if any(ROWS[name].sparsity == sparsity for name in made)]
    lines = [f"| | {' | '.join(f'{one:.0%}' for one in columns)} |", f"|---|{'---:|' * len(columns)}"]
    dense = f"{results['rows'][0]['dense']:.2f}"
    lines.append(f"| dense | {' | '.join(dense for _ in columns)} |")
    for label in dict.fromkeys(way.label for way in WAYS):
        found = [made.get(f"{label}, {one:.0%}") for one in columns]
        if any(found):
            cells = ["" if one is None else f"{one['perplexity']:.2f}, {one['kl']:.2f}" for one in found]
            lines.append(f"| {label} | {' | '.join(cells)} |")
    note = (
        f"Perplexity, KL from dense. {settings['model']} in float32; pruned on {settings['num_samples']} x "
        f"{settings['sequence_length']} of {settings['calibration']}, trained for {settings['steps']:,} steps of "
        f"{settings['batch_size']} windows of {settings['text_length']} tokens that the dense model writes, "
        f"{settings['text_windows']:,} in all; evaluation {settings['evaluation_samples']} x "
        f"{settings['sequence_length']} of {settings['evaluation']}, 1 draw. Made by `make bench-gradient-admm`."
    )
    return "\n".join([*lines, "", note])


def main() -> None:
    parser = row_parser(__doc__, list(ROWS), RESULTS / "gradient_admm.json")
    parser.add_argument("--text-windows", type=int, default=2048, help="that the dense model writes to train on")
    parser.add_argument("--text-length", type=int, default=128, help="tokens in each")
    parser.add_argument("--steps", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--penalty", type=float, default=0.01, help="of elsa")
    args = parser.parse_args()
    bench = Bench(args)
    table = Table("row", "perplexity", "KL from dense (nats)", "seconds")
    for made in made_rows(args, lambda _, name: row(bench, name))["rows"]:
        table.add_row(made["row"], f"{made['perplexity']:.2f}", f"{made['kl']:.3f}", f"{made['seconds']:.0f}")
    Console(soft_wrap=True, markup=False).print(table)


if __name__ == "__main__":
    main()
