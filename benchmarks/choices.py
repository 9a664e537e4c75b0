"""The constants and presets, each beside its neighbours, on a text without another table.

    make bench-choices        # the model of 15M, TinyStories; benchmarks/results/choices.json

Each row is a whole run in each of its columns: three sparsities, or two patterns. Rows that the file has are
not made again.

usage: python -m benchmarks.choices --model DIR --calibration SPEC --evaluation SPEC [--rows NAME ...]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.quality_tables import column_title, geometric_mean
from benchmarks.resumed_rows import made_rows, row_parser, texts_of, windows_of
from gradprobe_hf import GradProbeConfig, prune_pretrained
from gradprobe_hf.probe.statistics import Statistics
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.updates import admm

RESULTS = Path(__file__).parent / "results"
SPARSITIES = ("0.5", "0.6", "0.7")
PATTERNS = ("2:4", "4:8")
TWO_PROBES, BEST, OBS = {"probes": 2}, {"preset": "best"}, {"probes": 1, "update": "obs"}


@dataclass(frozen=True)
class Choice:
    """A row.

    Attributes:
        options: of the configuration.
        constants: of `updates/admm.py`, that are others meanwhile.
        first_probe: what the first probe of two counts beside the second.
        columns: sparsities, and patterns.
    """

    options: dict[str, Any]
    constants: dict[str, float] = field(default_factory=dict)
    first_probe: float = 1.0
    columns: tuple[str, ...] = SPARSITIES


CHOICES: dict[str, dict[str, Choice]] = {  # what is chosen -> its values; the package's own is the first
    "preset": {name: Choice({"preset": name}) for name in ("best", "balanced", "fast")},
    "preset, with a pattern": {
        name: Choice({"preset": name}, columns=PATTERNS) for name in ("best", "balanced", "fast")
    },
    "ADMM: penalty": {
        "0.7": Choice(BEST),
        "0.35": Choice(BEST, {"PENALTY": 0.35}),
        "1.4": Choice(BEST, {"PENALTY": 1.4}),
    },
    "ADMM: power of a row's importance": {
        "1/4": Choice(BEST),
        "0": Choice(BEST, {"IMPORTANCE_POWER": 0.0}),
        "1/2": Choice(BEST, {"IMPORTANCE_POWER": 0.5}),
    },
    "ADMM: rounds": {
        "20": Choice(BEST),
        "10": Choice(BEST, {"ROUNDS": 10}),
        "40": Choice(BEST, {"ROUNDS": 40}),
    },
    "ADMM: dense_target": {"0.25": Choice(BEST)}
    | {str(share): Choice(BEST | {"dense_target": share}) for share in (0.0, 0.5, 1.0)},
    "ADMM: damping": {"0.01": Choice(BEST)}
    | {str(damping): Choice(BEST | {"damping": damping}) for damping in (0.003, 0.1)},
    "obs: dense_target": {"0.25": Choice(OBS)}
    | {str(share): Choice(OBS | {"dense_target": share}) for share in (0.0, 0.5, 1.0)},
    "two probes: spike_limit": {"2": Choice(TWO_PROBES), "none": Choice(TWO_PROBES | {"spike_limit": 0.0})}
    | {str(limit): Choice(TWO_PROBES | {"spike_limit": float(limit)}) for limit in (1, 4)},
    "two probes: reduction_factor": {"0.1": Choice(TWO_PROBES)}
    | {str(factor): Choice(TWO_PROBES | {"reduction_factor": factor}) for factor in (0.0, 0.3)},
    "two probes: fisher": {"blend": Choice(TWO_PROBES)}
    | {name: Choice(TWO_PROBES | {"fisher": name}) for name in ("sequence", "token", "factored")},
    "two probes: weight of the first": {"1": Choice(TWO_PROBES)}
    | {
        name: Choice(TWO_PROBES, first_probe=weight)
        for name, weight in {"2": 2, "1/2": 0.5, "1/4": 0.25, "0": 0}.items()
    },
}
ALL = {f"{what} = {value}": choice for what, values in CHOICES.items() for value, choice in values.items()}


def run_of(choice: Choice) -> str:
    """The row that is run for a choice: several are the preset `best` as it is."""
    return next(name for name, other in ALL.items() if other == choice)


ROWS = list(dict.fromkeys(run_of(choice) for choice in ALL.values()))


@contextmanager
def first_probe_counts(weight: float) -> Iterator[None]:
    """The sums of the first probe of two are multiplied before the second adds to them."""
    begin = Statistics.begin_second_probe

    def weighted(self: Statistics, processes: Processes) -> None:
        for matrix in self._of.values():
            for name, values in matrix.state().items():  # the sums themselves; of an outer product one side is enough
                if name.startswith("sequence.") or name.endswith(".rows"):
                    values.mul_(weight)
        begin(self, processes)

    with patch.object(Statistics, "begin_second_probe", weighted):
        yield


def row(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Perplexity of one choice in each of its columns."""
    choice = ALL[name]
    found, dense = {}, None
    for column in choice.columns:
        asked = {"pattern": column} if ":" in column else {"sparsity": float(column)}
        config = GradProbeConfig(**asked, **windows_of(args), **choice.options)
        with ExitStack() as changed:
            changed.enter_context(first_probe_counts(choice.first_probe))
            for constant, value in choice.constants.items():
                changed.enter_context(patch.object(admm, constant, value))
            result = prune_pretrained(
                args.model, config, **texts_of(args), apply=False, dtype="float32", progress=False
            )
        measured = result.report.evaluation
        assert measured is not None, "there is a text"
        found[column], dense = measured["pruned"]["perplexity"], measured["dense"]["perplexity"]
    return {"row": name, "perplexity": found, "dense": dense}


def choices_table(results: dict[str, Any]) -> str:
    """Each choice, and its perplexities over those of the package's own."""
    made, settings = {one["row"]: one["perplexity"] for one in results["rows"]}, results["settings"]
    columns = (*SPARSITIES, *PATTERNS)
    lines = [f"| | {' | '.join(map(column_title, columns))} | mean ratio |", "|---|" + "---:|" * (len(columns) + 1)]
    for what, values in CHOICES.items():
        if run_of(next(iter(values.values()))) not in made:
            continue
        own = made[run_of(next(iter(values.values())))]
        for number, (value, choice) in enumerate(values.items()):
            found, name = made[run_of(choice)], f"{what} = {value}"
            ratio = geometric_mean([found[s] / own[s] for s in own])
            label = f"**{name}**" if number == 0 else name
            shown = [f"{found[column]:.2f}" if column in found else "" for column in columns]
            lines.append(f"| {label} | {' | '.join(shown)} | {ratio:.3f} |")
    note = (
        f"{settings['model']} in float32; calibration {settings['num_samples']} x {settings['sequence_length']} of "
        f"{settings['calibration']}, evaluation {settings['evaluation_samples']} x {settings['sequence_length']} of "
        f"{settings['evaluation']}, 1 draw; dense {results['rows'][0]['dense']:.2f}. In bold what the package has. "
        "Made by `make bench-choices`."
    )
    return "\n".join([*lines, "", note])


def main() -> None:
    parser = row_parser(__doc__, ROWS, RESULTS / "choices.json")
    print(choices_table(made_rows(parser.parse_args(), row)))


if __name__ == "__main__":
    main()
