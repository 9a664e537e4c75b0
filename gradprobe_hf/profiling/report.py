"""The report: an observation, read. The same numbers go into JSON, Markdown and the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any, Self

from gradprobe_hf.profiling.findings.finding import Finding
from gradprobe_hf.profiling.findings.table import findings_of
from gradprobe_hf.profiling.fixing.changes import MENDED
from gradprobe_hf.profiling.fixing.fix import Fix
from gradprobe_hf.profiling.observing.observation import MemorySample, Observation
from gradprobe_hf.profiling.page import page
from gradprobe_hf.report.against_estimate import rows_of
from gradprobe_hf.report.report import finite

_RECENT = 3  # steps
_LONGEST = 90  # letters of an operator's name in a table; JSON has all of them


@dataclass(frozen=True)
class ProfileReport:
    """Where a step goes, and what could be had.

    Example:
        >>> report = ProfileReport(observation)  # doctest: +SKIP
        >>> report.save("report.json")  # doctest: +SKIP
        >>> print(report.markdown())  # doctest: +SKIP
    """

    observation: Observation
    fixes: tuple[Fix, ...] = ()

    @cached_property
    def _found(self) -> tuple[list[Finding], dict[str, str]]:
        return findings_of(self.observation)

    @property
    def findings(self) -> list[Finding]:
        """The dearest first."""
        return self._found[0]

    @property
    def not_evaluable(self) -> dict[str, str]:
        """Kinds of findings that this run cannot tell -> why."""
        return self._found[1]

    @property
    def shares(self) -> dict[str, float]:
        """Stage -> its share of a step; empty if the run ended in its warm-up."""
        total = sum(self.observation.stages.values())
        return {stage: seconds / total for stage, seconds in self.observation.stages.items()} if total else {}

    @property
    def step_seconds(self) -> dict[str, float] | None:
        """Of the steps that were only timed."""
        timed = self.observation.timed
        if not timed:
            return None
        return {"mean": fmean(timed), "median": median(timed), "min": min(timed), "max": max(timed)}

    @property
    def throughput(self) -> dict[str, float]:
        """Samples and tokens a second, of this process, where batches tell. Known padding does not count."""
        # Batches that are sorted by their length, say, are not alike: those of the timed steps count.
        contents, seconds = self.observation.timed_contents or self.observation.contents, self.step_seconds
        if contents is None or seconds is None:
            return {}
        counts = {"samples": contents.samples, "tokens": contents.tokens}
        if contents.tokens is not None and contents.padding:
            counts["tokens"] = contents.tokens - contents.padding
        per_step = {name: count / contents.steps for name, count in counts.items() if count is not None}
        return {f"{name}_per_second": count / seconds["mean"] for name, count in per_step.items()}

    @property
    def recent_throughput(self) -> dict[str, float]:
        """The same of the last three timed steps alone."""
        if not self.throughput or self.step_seconds is None:
            return {}
        ratio = self.step_seconds["mean"] / fmean(self.observation.timed[-_RECENT:])
        return {name: rate * ratio for name, rate in self.throughput.items()}

    @property
    def slowdown(self) -> float | None:
        """A step under torch.profiler / a timed one, by their medians. None: one of them was not seen."""
        timed, traced = self.observation.timed, self.observation.traced
        known = timed and traced and "slowdown" not in self.observation.missing
        return median(traced) / median(timed) if known else None

    def to_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON; `observed` is what `read` makes the same report from."""
        return {
            "complete": self.observation.complete,
            "device": self.observation.device,
            "step_seconds": self.step_seconds,
            "stages": self.shares,
            "throughput": self.throughput,
            "recent_throughput": self.recent_throughput,
            "run": [asdict(one) for one in self.observation.run],
            "against_estimate": [asdict(one) for one in self.observation.expected],
            "profiled_step_slowdown": self.slowdown,
            "findings": [{**asdict(one), "severity": one.severity} for one in self.findings],
            "not_evaluable": self.not_evaluable,
            "operators": [asdict(one) for one in self.observation.operators],
            "modules": [asdict(one) for one in self.observation.modules],
            "device_busy": self.observation.busy,
            "batches": [asdict(one) for one in self.observation.batches],
            "options": [asdict(one) for one in self.observation.options],
            "batch_limit": self.observation.batch_limit,
            "fixes": [one.to_dict() for one in self.fixes],
            "observed": self.observation.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        fixes = tuple(Fix.from_dict(one) for one in values["fixes"])
        return cls(Observation.from_dict(values["observed"]), fixes)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """A report that `save` wrote.

        Raises:
            ValueError: it is none.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is no report of `gradprobe profile`: {error!r}.") from error

    def save(self, path: str | Path) -> None:
        """As Markdown if the name ends in .md, as a page if it ends in .html, as JSON otherwise."""
        forms = {".md": self.markdown, ".html": self.html}
        Path(path).write_text(forms.get(Path(path).suffix, self.json)(), encoding="utf-8")

    def json(self) -> str:
        """All of it, with what was observed."""
        return json.dumps(finite(self.to_dict()), indent=2, allow_nan=False)

    def html(self) -> str:
        """One page with pictures; it needs no script and nothing from elsewhere."""
        return page(self.observation, self.shares, self.summary(), self.tables())

    def markdown(self) -> str:
        """A page with the same tables as the terminal."""
        lines = ["# Where the time goes", "", *(f"{line}  " for line in self.summary())]
        for title, header, rows in self.tables():
            lines += ["", f"## {title}", "", _row(header), _row(["---"] * len(header)), *map(_row, rows)]
        return "\n".join(lines) + "\n"

    def summary(self) -> list[str]:
        """A few lines in front of the tables."""
        seen, seconds = self.observation, self.step_seconds
        lines = [] if seen.complete else ["The run ended before all steps of the schedule were seen."]
        if seconds is None:
            why = (
                f"the run ended after {seen.warmup} steps, all of its warm-up"
                if seen.warmup
                else "no step of a torch.optim optimizer was seen. In a loop without one, use "
                "gradprobe_hf.profiling.profiled(model) and call .step() at the end of each step"
            )
            if seen.run:
                why = "this way to prune takes no gradient, and the steps that are looked into are batches of a probe"
            return [f"No step was measured: {why}." if seen.run else f"Nothing was measured: {why}."]
        of = "batch of a probe" if seen.run else "step"
        lines.append(
            f"A {of} takes {_ms(seconds['mean'])} on {seen.device} ({_ms(seconds['min'])} to {_ms(seconds['max'])}, "
            f"{len(seen.timed)} {'in a trace' if 'slowdown' in seen.missing else 'after the warm-up'})."
        )
        if rates := self.throughput:
            recent = self.recent_throughput
            told = (
                f"{rate:,.4g} {name.removesuffix('_per_second')} ({recent[name]:,.4g} in the last {_RECENT} steps)"
                for name, rate in rates.items()
            )
            lines.append(f"{' and '.join(told)} a second.")
        if not seen.run:  # of pruning some passes are forward alone
            unseen = ((stage, seen.missing[stage]) for stage in ("forward", "backward") if stage in seen.missing)
            lines += [f"The {stage} pass was not told apart: {why}." for stage, why in unseen]
        if seen.busy is not None:
            lines.append(f"The device is busy in {seen.busy:.1%} of a traced step.")
        if seen.setup and seen.setup.attention:
            told = (f"{name} in {count} modules" for name, count in seen.setup.attention.items())
            lines.append(f"Attention: {', '.join(told)}.")
        if seen.memory:
            lines.append(_memory(seen.memory))
        if seen.training_phase > 1:
            lines.append(
                f"Of phases with optimizers of their own this is number {seen.training_phase}: the optimizers before "
                "it took no step any more."
            )
        if seen.evaluations:
            lines.append(f"Evaluations between these steps, {seen.evaluations}, are in no figure.")
        if self.slowdown is not None and self.slowdown >= 1:  # less where timed steps had to compile, say
            lines.append(
                f"A step under torch.profiler took {self.slowdown:.2f} times as long; it is in no figure but that."
            )
        if not any(one.severity in ("high", "medium") for one in self.findings):
            left = ", of the kinds that this run could tell" if self.not_evaluable else ""
            lines.append(f"No finding takes 1% of a step{left}.")
        return lines

    def tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """(title, header, rows) of every table that has rows."""
        seen = self.observation
        traced = sum(seen.traced)
        forward = sum(one.seconds for one in seen.modules)
        ran = sum(one.end - one.begin for one in seen.run)
        tables = [
            (
                "The run",
                ["stage", "seconds", "share", "process at its end"],
                [
                    [one.name, f"{one.end - one.begin:.3g}", f"{(one.end - one.begin) / ran:.1%}", _gib(one.process)]
                    for one in seen.run
                ],
            ),
            ("Estimated and measured", ["", "estimated", "measured"], rows_of(seen.expected)),
            ("Stages", ["stage", "share of the step"], [[name, f"{share:.1%}"] for name, share in self.shares.items()]),
            (
                "Findings",
                ["share", "kind", "line", "evidence", "remedy"],
                [
                    [
                        "-" if one.share is None else f"{one.share:.2%}",
                        one.kind,
                        f"{one.file}:{one.line}" if one.file else "-",
                        one.evidence,
                        one.remedy,
                    ]
                    for one in self.findings
                ],
            ),
            (
                "Changes that were tried",
                ["change", "gain", "rounds", "loss", "memory", "verdict", "how"],
                [_tried(one) for one in self.fixes],
            ),
            (
                "Only the script can change",
                ["kind", "line", "remedy"],
                _only_inside(self.findings) if self.fixes else [],
            ),
            (
                "Options by these measurements",
                ["option", "value", "why"],
                [[one.option, one.value, one.why] for one in seen.options],
            ),
            ("Batch sizes", ["batch", "samples a step", "gain", "memory at its peak", "of"], _batches(seen)),
            ("Not evaluable", ["kind", "why"], _by_reason(self.not_evaluable)),
            (
                "Operators",
                ["operator", "calls a step", "share of a traced step"],
                [
                    [_short(one.name), f"{one.count / len(seen.traced):.3g}", f"{one.seconds / traced:.1%}"]
                    for one in seen.operators[:10]
                    if seen.traced
                ],
            ),
            (
                "Modules",
                ["module", "class", "calls a step", "share of forward"],
                [
                    [one.name, one.kind, f"{one.count / seen.located:.3g}", f"{one.seconds / forward:.1%}"]
                    for one in seen.modules[:10]
                ],
            ),
        ]
        return [table for table in tables if table[2]]


def _short(name: str) -> str:
    """The names of kernels go on with all that their templates are filled with."""
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 3]}..."


def _by_reason(kinds: Mapping[str, str]) -> list[list[str]]:
    """A row for each reason, with all kinds that it holds for."""
    reasons: dict[str, list[str]] = {}
    for kind, why in kinds.items():
        reasons.setdefault(why, []).append(kind)
    return [[", ".join(named), why] for why, named in reasons.items()]


def _tried(fix: Fix) -> list[str]:
    """A row; rates with the change / without it."""
    if fix.gain is None:
        return [fix.change, "-", "-", "-", "-", f"not tried: {fix.untried}", fix.remedy]
    rounds = " ".join(f"{gain:.2f}" for gain in fix.gains)
    memory = "-" if fix.memory is None else f"{fix.memory:.2f}"
    return [fix.change, f"{fix.gain:.2f}", rounds, fix.loss, memory, fix.verdict, f"{fix.done}: {fix.remedy}"]


def _only_inside(findings: Sequence[Finding]) -> list[list[str]]:
    """A row for each finding that no change from outside may mend."""
    inside = [one for one in findings if one.kind not in MENDED]
    return [[one.kind, f"{one.file}:{one.line}" if one.file else "-", one.remedy] for one in inside]


def _batches(seen: Observation) -> list[list[str]]:
    """A row for each batch that was tried, and for the run's own with checkpointing the other way."""
    rows = [(f"{one.times}x", one) for one in seen.batches]
    if seen.other_checkpointing is not None:
        rows.append((f"1x, checkpointing {'off' if seen.checkpointing else 'on'}", seen.other_checkpointing))
    return [
        [
            name,
            "-" if one.samples is None else f"{one.samples:.4g}",
            "-" if one.gain is None else f"{one.gain:.2f}",
            "-" if one.memory is None else _gib(one.memory),
            f"not had: {one.failed}" if one.failed else "-" if one.room is None else _gib(one.room),
        ]
        for name, one in rows
    ]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _memory(samples: tuple[MemorySample, ...]) -> str:
    """The fullest step's end."""
    process = max(one.process for one in samples)  # 0 in a trace, which does not tell
    held = f"the process has {_gib(process)} of memory, and " if process else ""
    words = f"At the end of the fullest step {held}{_gib(min(one.free for one in samples))} are free"
    if samples[-1].allocated is None:
        return f"{words}."
    allocated = max(one.allocated or 0 for one in samples)
    peak, reserved = max(one.peak or 0 for one in samples), max(one.reserved or 0 for one in samples)
    return f"{words} on the device; allocated {_gib(allocated)}, at its peak {_gib(peak)}, reserved {_gib(reserved)}."


def _gib(count: int) -> str:
    return f"{count / 2**30:.3g} GiB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g} ms" if seconds < 1 else f"{seconds:,.3g} s"
