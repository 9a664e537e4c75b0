"""What profiling costs, and what each finding is worth in the examples: one change at a time.

usage: python -m benchmarks.profiling [--rounds 3] [--only cost slow_training fix-slow_training ...]

Every figure is a ratio of runs side by side, in several rounds, and seconds are those that the processor worked for
this process: what else the machine does is in none of them. What is not made anew stays in the file.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from gradprobe_hf.profiling import ProfileReport, Schedule, profiled
from gradprobe_hf.profiling.fixing.changes import MENDED

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "profiling.json"
SCHEDULE = Schedule(warmup=3, timed=8, traced=6, located=6)
BEHIND = 8  # steps, of which nothing is observed any more


def _script(name: str) -> SimpleNamespace:
    """An example's names; scripts are no package."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / f"{name}.py")))


masked_training, slow_probing, slow_training = map(_script, ("masked_training", "slow_probing", "slow_training"))
Loop = Callable[[Collection[str]], tuple[nn.Module | None, Iterator[int]]]  # the model, where no optimizer tells it


@dataclass(frozen=True)
class Changed:
    """A loop with one change more than another.

    Attributes:
        kind: of the finding that names what is changed; "": none does.
        before: changes that both have.
    """

    name: str
    kind: str = ""
    before: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"{self.name} after {', '.join(self.before)}" if self.before else self.name


@dataclass(frozen=True)
class Example:
    """A loop, and what is counted of it: tokens, or windows times layers.

    Attributes:
        begin, counted: how many are left out at the beginning, and how many are timed.
        schedule: of the report on the loop without any change.
    """

    loop: Loop
    begin: int
    counted: int
    changes: tuple[Changed, ...]
    schedule: Schedule = SCHEDULE


def _probing(changes: Collection[str]) -> tuple[nn.Module | None, Iterator[int]]:
    model = slow_probing.new_model()
    return model, slow_probing.probe(model, changes)


WALK = slow_probing.WINDOWS * slow_probing.LAYERS
EXAMPLES = {
    "slow_training": Example(
        lambda changes: (None, slow_training.train(changes)),
        800,
        3200,
        (
            Changed("loader", "data loading"),
            Changed("padding", "padding"),
            Changed("mask", "constant tensor"),
            Changed("item", "synchronization"),
            Changed("norms", "norms one by one"),
            Changed("print", "print"),
        ),
    ),
    "slow_probing": Example(
        _probing,
        WALK,
        WALK,
        (
            Changed("windows"),
            Changed("checkpointing", "checkpointing"),
            Changed("sums", "synchronization"),
            Changed("pass"),
            Changed("unfrozen"),
            Changed("unfrozen", before=("checkpointing",)),
        ),
    ),
    "masked_training": Example(
        lambda changes: (None, masked_training.train(changes)),
        1,
        masked_training.ROWS * sum(masked_training.LENGTHS),
        (
            Changed("lengths", "recompilation"),
            Changed("reading", "graph break", ("lengths",)),
            Changed("eager", before=("lengths", "reading")),
        ),
        Schedule(warmup=1, timed=6, traced=1, located=1),
    ),
}

# What `--fix` is asked for in each example, with the options of the profile before it.
_FEW = ("--warmup", "3", "--timed", "9", "--traced", "1", "--located", "1")  # the compiler is at work in most steps
FIXES: dict[str, tuple[str, ...]] = {
    "slow_training": ("--fix", "workers", "batch-size"),
    "slow_probing": ("--fix", "largest-batch", "checkpointing", "precision", "fused"),
    "masked_training": (*_FEW, "--fix", "no-compile"),
}


def fixes(name: str, rounds: int) -> dict[str, Any]:
    """What `--fix` says of an example, by the command that a user types."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [sys.executable, "-m", "gradprobe_hf", "profile", "script", f"examples/{name}.py"]
        subprocess.run(
            [*command, "--json", str(path), *FIXES[name], "--rounds", str(rounds)],
            check=True,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
        )
        return told(ProfileReport.read(path))


def told(report: ProfileReport) -> dict[str, Any]:
    """Of a report: the changes that were tried, and the kinds of findings that none of them may mend."""
    kept = ("change", "gains", "loss", "memory", "verdict", "untried")
    inside = sorted({one.kind for one in report.findings} - MENDED)
    changes = [{name: one.to_dict()[name] for name in kept} for one in report.fixes]
    return {"changes": changes, "inside": inside}


def cost(rounds: int) -> dict[str, Any]:
    """Seconds of a step of each kind / those of a loop that nobody watches, before and behind it."""
    parts = {
        "timed": (SCHEDULE.warmup, SCHEDULE.timed),
        "traced": (SCHEDULE.warmup + SCHEDULE.timed, SCHEDULE.traced),
        "located": (SCHEDULE.steps - SCHEDULE.located, SCHEDULE.located),
        "behind": (SCHEDULE.steps, BEHIND),
    }
    ratios: dict[str, list[float]] = {part: [] for part in parts}
    before = _plain()
    for _ in range(rounds):
        with profiled(schedule=SCHEDULE):
            seconds = _seconds(slow_training.train(slow_training.FAULTS), SCHEDULE.steps + BEHIND)
        after = _plain()
        for part, (begin, count) in parts.items():
            ratios[part].append(statistics.median(seconds[begin : begin + count]) * 2 / (before + after))
        before = after
    return {"step_milliseconds": before * 1e3, "ratios": ratios}


def _plain() -> float:
    return statistics.median(_seconds(slow_training.train(slow_training.FAULTS), SCHEDULE.timed + BEHIND)[3:])


def _seconds(loop: Iterator[int], steps: int) -> list[float]:
    seconds = []
    for _ in range(steps):
        start = time.process_time()
        next(loop)
        seconds.append(time.process_time() - start)
    return seconds


def worth(example: Example, rounds: int) -> dict[str, Any]:
    """The report of the loop as it is, and of each change the gain in every round."""
    shares = _shares(example)
    gains: dict[str, list[float]] = {one.title: [] for one in example.changes}
    for number in range(rounds):
        for one in example.changes if number % 2 == 0 else example.changes[::-1]:
            before = _rate(example, one.before)
            changed = _rate(example, {*one.before, one.name})
            gains[one.title].append(changed * 2 / (before + _rate(example, one.before)))
            print(f"{one.title}: {gains[one.title][-1]:.2f}", flush=True)
    return {
        one.title: {"kind": one.kind, "share": shares.get(one.kind), "gains": gains[one.title]}
        for one in example.changes
    }


def _shares(example: Example) -> dict[str, float | None]:
    """Kind of finding -> its share of a step, of all its lines together; None: it has no seconds of its own."""
    torch._dynamo.reset()
    model, loop = example.loop(())
    with profiled(model, schedule=example.schedule) as profiler, _silence():
        for _ in loop:
            if model is not None:
                profiler.step()
            if profiler.done:
                break
    shares: dict[str, float | None] = {}
    for one in profiler.report().findings:
        known = shares.get(one.kind)
        shares[one.kind] = one.share if known is None else known + (one.share or 0.0)
    return shares


def _rate(example: Example, changes: Collection[str]) -> float:
    """What is counted, a second."""
    torch._dynamo.reset()
    _, loop = example.loop(changes)
    with _silence():
        begun = 0
        while begun < example.begin:
            begun += next(loop)
        start, counted = time.process_time(), 0
        while counted < example.counted:
            counted += next(loop)
        return counted / (time.process_time() - start)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def profiling_cost_table(results: dict[str, Any]) -> str:
    """For the page."""
    words = {"timed": "timed", "traced": "traced", "located": "located", "behind": "behind the schedule"}
    lines = ["| steps | times as long (rounds) |", "|---|---:|"]
    for part, ratios in results["cost"]["ratios"].items():
        lines.append(f"| {words[part]} | {_median_of(ratios)} |")
    note = (
        f"Against a loop that nobody watches, in turns: `examples/slow_training.py --mended`, "
        f"{results['cost']['step_milliseconds']:.0f} ms a step; seconds of the processor, medians. {_made(results)}"
    )
    return "\n".join([*lines, "", note])


def worth_table(results: dict[str, Any]) -> str:
    """For the page."""
    lines = ["| example | change | the finding, its share | gain (rounds) |", "|---|---|---|---:|"]
    for example, changes in results["examples"].items():
        for name, row in changes.items():
            share = "" if row["share"] is None else f", {row['share']:.1%}"
            gains, of = row["gains"], f"{row['kind']}{share}"
            told = "" if min(gains) > 1 or max(gains) < 1 else ", no difference that all rounds agree on"
            lines.append(f"| `{example}` | `{name}` | {of} | {_median_of(gains)}{told} |")
    note = (
        "Tokens a second of the processor (`slow_probing`: windows times layers) with this change alone / without, "
        "beside unchanged runs before and behind, or with and without it after others; the median, and each round. "
        f"C++ compilers that torch.compile starts are not in it. {_made(results)}"
    )
    return "\n".join([*lines, "", note])


def fixes_table(results: dict[str, Any]) -> str:
    """For the page."""
    lines = ["| example | change | gain (rounds) | memory | loss | verdict |", "|---|---|---:|---:|---|---|"]
    for example in (name for name in FIXES if name in results["fixes"]):
        found = results["fixes"][example]
        for one in found["changes"]:
            if one["untried"] is None:
                figures = f"{_median_of(one['gains'])} | {one['memory']:.2f} | {one['loss']} | {one['verdict']}"
            else:
                figures = f"- | - | - | not tried: {one['untried']}"
            lines.append(f"| `{example}` | `{one['change']}` | {figures} |")
    known = {example: found["inside"] for example, found in results["fixes"].items() if found["inside"]}
    inside = "; ".join(f"`{example}`: {', '.join(kinds)}" for example, kinds in known.items())
    note = (
        "`gradprobe profile script examples/NAME.py --fix ...`, in turns with the unchanged script, by the clock. What "
        f"only the script can change: {inside}. {_made(results)}"
    )
    return "\n".join([*lines, "", note])


def _median_of(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({', '.join(f'{one:.2f}' for one in values)})"


def _made(results: dict[str, Any]) -> str:
    settings = results["settings"]
    return f"{settings['threads']} CPU thread, torch {settings['torch']}. Made by `make bench-profiling`."


FIX = "fix-"  # before the name of an example
PARTS = ["cost", *EXAMPLES, *(FIX + name for name in EXAMPLES)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=PARTS, choices=PARTS)
    options = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    torch.set_num_threads(1)
    found: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {"examples": {}}
    found["settings"] = {"threads": 1, "torch": torch.__version__.partition("+")[0]}
    for name in options.only:
        print(f"{name} ...", flush=True)
        if name == "cost":
            found["cost"] = cost(options.rounds)
        elif name.startswith(FIX):
            example = name.removeprefix(FIX)
            found.setdefault("fixes", {})[example] = fixes(example, options.rounds)
        else:
            found["examples"][name] = worth(EXAMPLES[name], options.rounds)
        RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
