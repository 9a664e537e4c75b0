"""What the verbs print to standard output: tables, or JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement as Width
from rich.table import Table

from gradprobe_hf.checkpoint.inspect import Inspection
from gradprobe_hf.cli.flags import in_flags
from gradprobe_hf.comparison.rows import ComparedRow
from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.evaluation.divergence import Divergence
from gradprobe_hf.evaluation.perplexity import Measurement
from gradprobe_hf.report.card.files import in_another_type
from gradprobe_hf.report.next_choice import next_choices
from gradprobe_hf.report.original import DENSE, Original
from gradprobe_hf.report.report import Group, Report, finite
from gradprobe_hf.report.speed import measurements, protocol, times_as_fast
from gradprobe_hf.structures.table import shape_words

SHOWN = 300  # characters of an example
LABEL = 10  # characters that a label has on a line at least


def print_json(values: dict[str, Any]) -> None:
    print(json.dumps(finite(values), indent=2, allow_nan=False))


def print_pruning(report: Report, output: str) -> None:
    table = table_of("", report.beside.column, "recovered" if report.recovery else "pruned")
    before = sum(row.zeros_before for row in report.matrices) / report.weights
    if report.structure is None:
        table.add_row("zeros", f"{before:.4%}", f"{report.sparsity:.4%}")
    else:
        _add_shapes(table, report.structure)
    _add_files(table, report)
    for row in measurements(report.speed) if report.speed else ():
        table.add_row(*row)
    if report.evaluation:
        key = "loss" if report.evaluation["dense"]["perplexity"] is None else "perplexity"
        table.add_row(key, *(f"{report.evaluation[name][key]:,.4f}" for name in ("dense", "pruned")))
        _add_divergence(table, report.evaluation["divergence"], report.beside.column)
        if metric := report.evaluation["metric"]:
            table.add_row(metric["title"], *(f"{metric[name]:.4f}" for name in ("dense", "pruned")))
    out, writes = console(), report.model["task"] == "text-generation"
    out.print(f"{report.model['class']}: {report.weights:,} weights in {len(report.matrices)} matrices")
    out.print(table)
    _print_candidates(out, report)
    if report.recovery:
        out.print(_recovered(report.recovery))
    if report.unreached:
        out.print(f"left as they are, not reached by the calibration data: {len(report.unreached)} matrices")
    if report.evaluation:
        _print_ratio(out, report.evaluation["divergence"])
        out.print(f"measured on {report.evaluation['source']}: {report.evaluation['protocol']}", style="dim")
    else:
        takes = "a text" if writes else "data"
        out.print(f"what it lost was not measured: --evaluation takes {takes} to measure it on", style="dim")
    if report.selection:
        out.print(_choice(report.selection), style="dim")
    if report.calibration:
        advice = f": --calibration takes your own {'text' if writes else 'data'}" * report.is_calibrated_by_default
        out.print(
            f"calibrated on {report.calibration['source']}; what is unlike it loses more{advice}",
            style="dim",
        )
        if example := report.calibration.get("example"):
            out.print(f"its first row, as the model reads it: {example[:SHOWN]!r}", style="dim")
    out.print(_cost(report))
    out.print("; ".join(f"{what.replace('_', ' ')}: {how}" for what, how in report.execution.items()), style="dim")
    if report.speed is not None:
        out.print(f"speed: {protocol(report.speed, report.made_of.whose)}", style="dim")
    elif report.structure is not None:
        out.print(f"how fast it is here: gradprobe bench DENSE {output}")
    config = GradProbeConfig.from_dict(report.config)
    for choice in next_choices(config, writes):
        out.print(in_flags(choice, config.defaults()))
    out.print(f"checkpoint {output}, model card {output}/README.md, figures {output}/assets")


def print_recovery(report: Report, output: str) -> None:
    """The dense model, the pruned one, and what the recovery left."""
    recovery = report.recovery
    assert recovery is not None, "it was made"
    original = report.beside.column
    table = table_of("", original, "pruned", "recovered")
    before, after = recovery["before"], report.evaluation
    if before is not None and after is not None:
        shown = (before["dense"], before["pruned"], after["pruned"])
        key = "loss" if before["dense"]["perplexity"] is None else "perplexity"
        table.add_row(key, *(f"{one[key]:,.4f}" for one in shown))
        if after["divergence"] is not None:
            both = (before["divergence"], after["divergence"])
            table.add_row(f"KL from {original} (nats)", "0", *(f"{one['kl']:.4f}" for one in both))
            table.add_row("top-1 agreement", "100%", *(f"{one['top1_agreement']:.1%}" for one in both))
        if metric := after["metric"]:
            scores = (metric["dense"], before["metric"]["pruned"], metric["pruned"])
            table.add_row(metric["title"], *(f"{one:.4f}" for one in scores))
    # Of weights that are as they were both are of before, and neither is of rounding.
    begun = recovery["held_out"]["0"]
    held_out = begun, recovery["held_out_as_left"] if report.is_recovered else begun
    kept_back = "text" if recovery["rows"] == "windows" else "rows"
    table.add_row(f"KL on held-out {kept_back}", "0", *(f"{value:.4f}" for value in held_out))
    _add_files(table, report, between=[""])
    out = console()
    out.print(table)
    out.print(
        f"{recovery['steps']} steps, {recovery['tokens']:,} {recovery['unit']} of {recovery['text']['source']}, in "
        f"{recovery['seconds']:.0f} s; the state of step {recovery['best_step']} is kept"
    )
    if after is not None:
        out.print(f"measured on {after['source']}: {after['protocol']}", style="dim")
    if report.structure is None:
        out.print(f"{report.zeros:,} of {report.weights:,} weights are zero, {report.sparsity:.4%}")
    else:  # what its rows count as zero was cut out
        left, (dense, _) = report.structure["parameters"]["after"], report.sizes_beside
        out.print(f"{left:,} of {dense:,} parameters are left")
    out.print(f"checkpoint {output}, model card {output}/README.md, figures {output}/assets")


def _add_shapes(table: Table, structure: dict[str, Any]) -> None:
    """Parameters, and what the configuration says of the shapes."""
    table.add_row("parameters", *(f"{structure['parameters'][when]:,}" for when in ("before", "after")))
    for name, after in structure["after"].items():
        both = structure["before"][name], after
        table.add_row(name, *(f"{len(one)} values" if isinstance(one, list) else str(one) for one in both))


def _add_files(table: Table, report: Report, between: Sequence[str] = ()) -> None:
    """Megabytes on the disk, and compressed as far as that was measured.

    Args:
        between: cells of columns between that of the dense model and the last one.
    """
    if (files := report.files) is not None:
        dense, stored = (f"{(files[name] or 0) / 1e6:,.1f}" for name in ("dense", "bytes"))
        table.add_row("file, MB", dense + in_another_type(report), *between, stored)
        for name, title in (("zstd", "file under zstd, MB"), ("hub", "file as the Hub transfers it, MB")):
            both = [files.get(key) for key in (f"dense_{name}", name)]  # not in reports of before
            if both[-1] is not None:
                dense, stored = ("" if size is None else f"{size / 1e6:,.1f}" for size in both)
                table.add_row(title, dense, *between, stored)


def _print_candidates(out: Console, report: Report) -> None:
    """The shapes that were tried, where one was chosen for a budget."""
    found = report.structure["candidates"] if report.structure else []
    if not found:
        return
    latency = report.structure["latency"] if report.structure else None
    tried = [one for one in found if one["loss"] is not None]
    # A latency is known where that was asked for, an estimate where there were too many shapes to try them all.
    columns: dict[str, Callable[[dict[str, Any]], str]] = {"parameters": lambda one: f"{one['parameters']:,}"}
    if latency:
        columns["latency"] = lambda one: f"{one['latency']:.2f}"
    if any(one["estimated"] is not None for one in tried):
        columns["estimated loss"] = lambda one: "-" if one["estimated"] is None else f"{one['estimated']:.4f}"
    columns[_loss(report.in_nats)] = lambda one: f"{one['loss']:.4f}"
    if speed := report.speed:
        faster = {row["model"]: f"{times_as_fast(speed, row):.2f} x" for row in speed["rows"]}
        columns["speed"] = lambda one: faster[shape_words(one["removed"])]
    table = table_of("shapes tried, without", *columns)
    for one in tried:
        table.add_row(shape_words(one["removed"]), *(shown(one) for shown in columns.values()))
    out.print(table)
    if latency:
        read = "one input"
        if latency["prompt_length"] is not None:  # the model reads text
            read = f"{latency['prompt_length']} tokens read, {latency['new_tokens']} written"
        out.print(
            f"latency: {latency['ratio']:.2f} of {report.made_of.whose} measured, {latency['smaller']:.3g} of "
            f"{latency['dense']:.3g} seconds; the table said {latency['table']:.2f} "
            f"({read}, {latency['device']}, {latency['threads']} threads)",
            style="dim",
        )
    out.print(
        f"{len(found)} shapes meet {GradProbeConfig.from_dict(report.config).shape_budget}; {len(tried)} were pruned "
        "and measured on calibration data that was held out, and the first was taken",
        style="dim",
    )


def _add_divergence(table: Table, divergence: dict[str, Any] | None, original: str) -> None:
    if divergence is not None:
        table.add_row(f"KL from {original} (nats)", "0", f"{divergence['kl']:.4f}")
        table.add_row("top-1 agreement", "100%", f"{divergence['top1_agreement']:.1%}")


def _print_ratio(out: Console, divergence: dict[str, Any] | None) -> None:
    if divergence is not None and divergence["perplexity_ratio_interval"] is not None:
        low, high = divergence["perplexity_ratio_interval"]
        out.print(
            f"perplexity x {divergence['perplexity_ratio']:.3f} (95% interval over windows: {low:.3f} to {high:.3f})"
        )


def print_comparison(
    rows: Sequence[ComparedRow],
    dense: Measurement,
    evaluation: dict[str, Any],
    speed: dict[str, Any] | None = None,
    original: Original = DENSE,
) -> None:
    """One line a configuration, and how its perplexity (or loss) compares with the best."""
    key = "loss" if dense.perplexity is None else "perplexity"
    metric = evaluation["metric"]
    scored = [metric["title"]] if metric else []
    smaller = any(row.removed for row in rows)
    share = ("gone" if all(row.removed for row in rows) else "gone or zero") if smaller else "zeros"
    table = table_of("method", share, key, "/ best", *scored, "KL", "top-1", "seconds", "passes")
    values = [getattr(row, key) for row in rows]
    best = min(values, default=math.nan)
    for row, value in zip(rows, values, strict=True):
        table.add_row(
            row.method,
            f"{row.sparsity:.2%}",
            f"{value:,.4f}",
            f"{value / best:.3f}" if best else "-",  # embeddings that have not moved have a loss of 0
            *([f"{row.metric:.4f}"] if metric else []),
            *_shown(row.divergence),
            f"{row.seconds:,.0f}",
            f"{row.passes['forward']:.3g} + {row.passes['backward']:.3g}",
        )
    out = console()
    before = f"{key} of {original.name}: {getattr(dense, key):,.4f}"
    out.print(before + (f", {scored[0]}: {metric['dense']:.4f}" if metric else ""))
    out.print(table)
    out.print(
        f"measured on {evaluation['source']}: {evaluation['protocol']}; KL: divergence from {original.name}, nats "
        "per token; top-1: share of tokens whose most likely next one stays; passes over the calibration data: "
        "forward + backward",
        style="dim",
    )
    if smaller:
        out.print("gone: share of the weights in the matrices that are pruned; of all parameters below", style="dim")
        _print_shapes(out, rows, speed, original.whose)


SPEEDS = ("memory, MB", "first token, ms", "tokens/s", "speed")


def _print_shapes(out: Console, rows: Sequence[ComparedRow], speed: dict[str, Any] | None, whose: str) -> None:
    """What is left by each row, and how fast that is where it was measured. Args: whose: speed it is beside."""
    table = table_of("method", "parameters", "MB", *(SPEEDS if speed else ()))
    for row in rows:
        speeds = _speeds(speed, row) if speed else ()
        table.add_row(row.method, f"{row.parameters:,}", f"{row.bytes / 1e6:,.1f}", *speeds)
    out.print(table)
    out.print(f"speed: {protocol(speed, whose)}" if speed else "how fast that is here: --measure-speed", style="dim")


def _speeds(speed: dict[str, Any], row: ComparedRow) -> list[str]:
    """Of a row's shape: what a reader compares. Zeros have the dense model's."""
    found = next(one for one in speed["rows"] if one["model"] == (shape_words(row.removed) or "dense"))
    first, rate = found["first_token_seconds"] or found["prefill_seconds"], found["tokens_per_second"]
    return [
        f"{found['peak_memory_bytes'] / 1e6:,.0f}",
        f"{1000 * first['median']:,.0f}",
        f"{rate['median']:,.1f}" if rate else "-",
        f"{times_as_fast(speed, found):.2f} x",
    ]


def _shown(divergence: Divergence | None) -> tuple[str, str]:
    return ("-", "-") if divergence is None else (f"{divergence.kl:.4f}", f"{divergence.top1_agreement:.1%}")


def print_evaluation(values: dict[str, Any], original: Original = DENSE) -> None:
    """What was measured on a text, on tasks, or on both; of the model alone, or beside its original."""
    out = console()
    if "loss" in values:
        out.print(_beside(values, original.column) if "dense" in values else _alone(values))
        _print_ratio(out, values.get("divergence"))
        out.print(f"{values['source']}: {values['protocol']}", style="dim")
    if "tasks" in values:
        out.print(_tasks(values["tasks"], original.column))
        out.print("scored by lm-evaluation-harness; ± one standard error over the questions", style="dim")


def _alone(values: dict[str, Any]) -> Table:
    found = {_loss(values["loss_in_nats"]): f"{values['loss']:.4f}", "terms": f"{values['terms']:,}"}
    if values["perplexity"] is not None:
        found = {"perplexity": f"{values['perplexity']:,.4f}", **found}
    if metric := values["metric"]:
        found[metric["title"]] = f"{metric['pruned']:.4f}"
    table = table_of(*found)
    table.add_row(*found.values())
    return table


def _beside(values: dict[str, Any], original: str) -> Table:
    table = table_of("", original, "pruned")
    if values["perplexity"] is not None:
        table.add_row("perplexity", *(f"{one['perplexity']:,.4f}" for one in (values["dense"], values)))
    table.add_row(_loss(values["loss_in_nats"]), f"{values['dense']['loss']:.4f}", f"{values['loss']:.4f}")
    if metric := values["metric"]:
        table.add_row(metric["title"], *(f"{metric[name]:.4f}" for name in ("dense", "pruned")))
    _add_divergence(table, values["divergence"], original)
    return table


def _loss(in_nats: bool) -> str:
    return "loss (nats)" if in_nats else "loss"


def _tasks(scores: dict[str, list[dict[str, Any]]], original: str) -> Table:
    """One line a metric; the original's before the pruned one's, where there is one."""
    names = [name for name in ("dense", "pruned") if name in scores]
    table = table_of("task", "metric", "shots", "questions", *((original, "pruned") if len(names) > 1 else ["value"]))
    for rows in zip(*(scores[name] for name in names), strict=True):
        first = rows[0]
        shots = "-" if first["shots"] is None else str(first["shots"])
        stderr = [f" ± {row['stderr']:.4f}" if row["stderr"] is not None else "" for row in rows]
        shown = [f"{row['value']:.4f}{error}" for row, error in zip(rows, stderr, strict=True)]
        table.add_row(first["task"], first["metric"], shots, f"{first['samples']:,}", *shown)
    return table


def print_inspection(found: Inspection, directory: str) -> None:
    out = console()
    out.print(_groups("block", found.by("block")))
    out.print(_groups("kind", found.by("role")))
    matrices = ((row.name, row.weights, row.zeros, row.sparsity) for row in found.rows)
    out.print(_sparsities("matrix", matrices))
    patterns = ", ".join(found.patterns) or "none"
    out.print(f"{directory}: {found.zeros:,} of {found.weights:,} weights are zero, {found.sparsity:.4%}")
    out.print(f"n:m patterns that hold in every matrix of these: {patterns}")
    for uncounted, why in (
        (found.left_out, "the calibration data of its run did not reach"),
        (found.excluded, "include and exclude of its run left dense"),
    ):
        if uncounted:
            out.print(f"not counted: {len(uncounted)} matrices that {why}")


def _groups(label: str, groups: Iterable[Group]) -> Table:
    return _sparsities(label, ((g.label, g.weights, g.zeros, g.sparsity) for g in groups))


def _sparsities(label: str, rows: Iterable[tuple[str, int, int, float]]) -> Table:
    table = table_of(label, "weights", "zeros", "sparsity")
    for name, weights, zeros, sparsity in rows:
        table.add_row(name, f"{weights:,}", f"{zeros:,}", f"{sparsity:.2%}")
    return table


def _choice(selection: dict[str, Any]) -> str:
    value = "none that was tried" if selection["value"] is None else f"{selection['value']:,.4g}"
    where = selection["protocol"] if selection["source"] else "the same measurement that is reported"
    return f"sparsity chosen by {selection['metric']} ({value} within {selection['limit']:,.4g}) on {where}"


def _recovered(recovery: dict[str, Any]) -> str:
    """The training behind the pruning, and what was measured in front of it."""
    said, before = f"recovered in {recovery['steps']} steps, that of {recovery['best_step']} kept", recovery["before"]
    if before is None:
        return said
    key = "loss" if before["dense"]["perplexity"] is None else "perplexity"
    return f"{said}; {key} as pruned: {before['pruned'][key]:,.4f}"


def _cost(report: Report) -> str:
    passes = f"passes over the calibration data: {report.passes['forward']:.3g} forward"
    if report.passes["backward"]:
        passes += f", {report.passes['backward']:.3g} backward"
    slowest = ", ".join(f"{stage}: {seconds:.0f} s" for stage, seconds in report.timings.items() if seconds >= 1)
    return f"{slowest or 'under a second'}; {passes}; peak memory {report.peak}"


class _Numbers(Table):
    """A table of which no number is cut: where it is wider than the terminal, or than rich takes a file to be, labels
    are folded, and if that is not enough it is wider all the same."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unbounded = options.update_width(10_000)
        labels = [self.columns[0].header, *self.columns[0].cells]
        longest = max(Width.get(console, unbounded, one).maximum for one in labels)
        least = Width.get(console, unbounded, self).maximum - max(0, longest - LABEL)
        yield from super().__rich_console__(console, options.update_width(max(options.max_width, least)))


def table_of(first: str, *columns: str) -> Table:
    """An empty table: a column of labels, and columns of numbers."""
    table = _Numbers(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, overflow="fold", min_width=LABEL)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def console() -> Console:
    return Console(soft_wrap=True, markup=False)  # names and texts may hold brackets
