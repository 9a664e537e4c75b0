"""How near the weight updates come to the least-squares weights, and to what the revision of a mask promises.

One probe and ADMM on a model; of 32 rows of every matrix the error of their outputs on the calibration inputs, with the
damping:

- above that of the normal equations under the same mask, solved row by row in float64: after 20 steps of conjugate
  gradients from the dense weights (`update="least_squares"`), and after 10 from where ADMM ends (`update="admm"`);
- under the revised mask, as a fraction of that under the mask it began with. Above 1 the revision would have lost.

With fewer calibration tokens than inputs (`--num-samples 2` of 256, of 768 inputs) the damping alone makes it solvable.

Where the CPU has units for bfloat16, ADMM rounds to it; `--exact` shows what it would be without. `--wide` has
no model: it times ADMM on random matrices of that shape, rounded and exact by turns; or, with `--tokens`, so few that
their Gram matrix has a factor that is used in its place (`updates/gram.py`), by that and by the whole.

usage: python -m benchmarks.exactness --model DIR --text FILE [--num-samples 32] [--columns 0.6 2:4] [--exact]
       python -m benchmarks.exactness --wide 4096 4096 [--tokens 512] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from gradprobe_hf import GradProbeConfig, prune_pretrained
from gradprobe_hf.runtime import half_products
from gradprobe_hf.scores.budget import Budget
from gradprobe_hf.updates.least_squares import LeastSquares
from gradprobe_hf.updates.problem import MatrixProblem, Solution
from gradprobe_hf.updates.sweep import DAMPING
from gradprobe_hf.updates.table import UPDATES

ROWS = 32  # of each matrix, spread over it, that are solved in float64


@dataclass(frozen=True)
class Exactness:
    """One matrix. Attributes: excess errors, as fractions; `revised`: error over that of the mask it began with."""

    shape: tuple[int, ...]
    least_squares: float
    admm: float
    revised: float


class InDouble:
    """The problem of some rows of a matrix in float64, in the units of `LeastSquares`."""

    def __init__(self, problem: MatrixProblem) -> None:
        drift = None if problem.drift is None else problem.drift.double()
        self.rows = torch.arange(0, len(problem.weight), max(1, len(problem.weight) // ROWS))
        weight = problem.weight[self.rows].double()
        self.system = LeastSquares(weight, problem.hessian.double(), drift, problem.dense_target, problem.damping)
        self._gram = self.system.gram.among(torch.arange(len(self.system.unit)))
        factor = torch.linalg.cholesky(self._gram)
        self._wanted = torch.cholesky_solve(self.system.wanted.t(), factor).t()  # S

    def error(self, values: Tensor) -> float:
        """`tr((V - S) H (V - S)^T)` over the rows, of weights `[rows, in]`."""
        apart = values.double() * self.system.unit - self._wanted
        return float(((apart @ self._gram) * apart).sum())

    def best(self, mask: Tensor) -> float:
        """The least error under a mask: every row's normal equations."""
        found = torch.zeros_like(self._wanted)
        for row, goes in enumerate(mask[self.rows]):
            kept = (~goes).nonzero().flatten()
            found[row, kept] = torch.linalg.solve(self._gram[kept][:, kept], self.system.wanted[row, kept])
        return self.error(found / self.system.unit)


def exactness(problem: MatrixProblem, mask: Tensor, solution: Solution) -> Exactness:
    double = InDouble(problem)
    best = double.best(solution.mask)
    plain = LeastSquares.of(problem)
    from_dense = double.error(plain.solved(solution.mask)[double.rows])
    found = double.error(solution.values[double.rows])
    return Exactness(tuple(problem.weight.shape), from_dense / best - 1, found / best - 1, found / double.best(mask))


@contextmanager
def recorded() -> Iterator[list[Exactness]]:
    """ADMM, and what is known of each matrix that it has solved."""
    kept, row = [], UPDATES["admm"]
    solve = row.function
    assert solve is not None, "an update"

    def solving(problem: MatrixProblem, mask: Tensor | None) -> Solution:
        solution = solve(problem, mask)
        assert mask is not None, "ADMM revises one"
        kept.append(exactness(problem, mask, solution))
        return solution

    UPDATES["admm"] = replace(row, function=solving)
    try:
        yield kept
    finally:
        UPDATES["admm"] = row


def measured(args: argparse.Namespace, column: str) -> list[Exactness]:
    budget: dict[str, Any] = {"pattern": column} if ":" in column else {"sparsity": float(column)}
    config = GradProbeConfig(
        probes=1, update="admm", num_samples=args.num_samples, sequence_length=args.sequence_length, **budget
    )
    with recorded() as kept:
        prune_pretrained(
            AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype).eval(),
            config,
            calibration=str(args.text),
            processing_class=AutoTokenizer.from_pretrained(args.model),
            evaluation=False,
            apply=False,
            progress=False,
        )
    return kept


def line(column: str, found: list[Exactness]) -> str:
    excess = " | ".join(
        f"{median(values):.1e} | {max(values):.1e}"
        for values in ([one.least_squares for one in found], [one.admm for one in found])
    )
    worse = sum(one.revised > 1 for one in found)
    return f"| {column} | {excess} | {median(one.revised for one in found):.2f} | {worse} of {len(found)} |"


def exact_products() -> AbstractContextManager[Any]:
    """As on a device without units for bfloat16."""
    return patch.object(half_products, "has_units", return_value=False)


def wide_problem(outputs: int, inputs: int, tokens: int) -> tuple[MatrixProblem, Tensor]:
    """A random matrix, and a mask of half of its weights."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(tokens, inputs, generator=generator), torch.randn(outputs, inputs, generator=generator)
    mask = weight.abs() < weight.abs().flatten()[::97].median()
    return MatrixProblem(weight, x.t() @ x, None, 0.0, DAMPING, Budget(0.5, "tensor")), mask


def time_wide(outputs: int, inputs: int, rounds: int) -> None:
    """Seconds of ADMM on one matrix, and what rounding leaves of them."""
    problem, mask = wide_problem(outputs, inputs, 4 * inputs)
    seconds: dict[str, list[float]] = {"rounded": [], "exact": []}
    for _ in range(rounds):
        for name, products in (("rounded", nullcontext), ("exact", exact_products)):
            with products():
                seconds[name].append(seconds_of_admm(problem, mask))
    rounded, exact = (median(seconds[name]) for name in ("rounded", "exact"))
    units = "rounded" if half_products.has_units(problem.weight.device) else _NOT_ROUNDED
    print(f"{outputs} x {inputs}: {rounded:.1f} s {units}, {exact:.1f} s exact, {rounded / exact:.2f} of it")


def time_few(outputs: int, inputs: int, tokens: int, rounds: int) -> None:
    """Seconds of ADMM on one matrix with few tokens, by the factor of its Gram matrix and by the whole of it."""
    whole, mask = wide_problem(outputs, inputs, tokens)
    ways = {"factor": replace(whole, tokens=tokens), "whole": whole}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, problem in ways.items():
            seconds[name].append(seconds_of_admm(problem, mask))
    factor, all_of_it = (median(seconds[name]) for name in ("factor", "whole"))
    units = "rounded" if half_products.has_units(whole.weight.device) else _NOT_ROUNDED
    shape, share = f"{outputs} x {inputs}, {tokens} tokens", factor / all_of_it
    print(f"{shape}: {factor:.1f} s by the factor, {all_of_it:.1f} s by the whole ({units}), {share:.2f} of it")


_NOT_ROUNDED = "not rounded: this CPU has no units for bfloat16"


def seconds_of_admm(problem: MatrixProblem, mask: Tensor) -> float:
    solve = UPDATES["admm"].function
    assert solve is not None, "an update"
    begin = time.perf_counter()
    solve(problem, mask)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--wide", type=int, nargs=2, metavar=("OUT", "IN"))
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--num-samples", type=int, default=32)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--columns", nargs="+", default=["0.5", "0.6", "0.7", "2:4"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.wide:
        outputs, inputs = args.wide
        if args.tokens:
            time_few(outputs, inputs, args.tokens, args.rounds)
        else:
            time_wide(outputs, inputs, args.rounds)
        return
    if not (args.model and args.text):
        parser.error("give --model and --text, or --wide")
    print("| | 20 steps, median | most | ADMM's 10, median | most | revised / begun, median | worse |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    kept = {}
    for column in args.columns:
        with exact_products() if args.exact else nullcontext():
            kept[column] = measured(args, column)
        print(line(column, kept[column]), flush=True)
    if args.json:
        rows = {column: [asdict(one) for one in found] for column, found in kept.items()}
        args.json.write_text(json.dumps({"settings": vars(args) | {"rows": rows}}, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
