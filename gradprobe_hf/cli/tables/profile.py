"""The tables of `gradprobe profile`."""

from __future__ import annotations

from collections.abc import Callable

from rich import box
from rich.table import Table

from gradprobe_hf.cli.output import console
from gradprobe_hf.profiling.report import ProfileReport


def _finding(share: str, kind: str, line: str, evidence: str, remedy: str) -> list[str]:
    return [f"{share} {kind}  {line}", evidence, f"-> {remedy}"]


def _change(change: str, gain: str, rounds: str, loss: str, memory: str, verdict: str, how: str) -> list[str]:
    if gain == "-":
        return [f"{change}: {verdict}"]
    return [f"{gain} times as fast: {change} {verdict}", f"rounds {rounds}; memory {memory}; loss: {loss}", f"-> {how}"]


# What has sentences in its cells is no table on a terminal.
_BLOCKS: dict[str, Callable[..., list[str]]] = {"Findings": _finding, "Changes that were tried": _change}


def print_profile(report: ProfileReport) -> None:
    out = console()
    for line in report.summary():
        out.print(line)
    for title, header, rows in report.tables():
        if title in _BLOCKS:
            for row in rows:
                head, *more = _BLOCKS[title](*row)
                out.print(f"\n{head}", style="bold")
                for line in more:
                    out.print(f"  {line}")
            out.print()
            continue
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for name in header:
            table.add_column(name, overflow="fold")  # half of a module's name tells nothing
        for row in rows:
            table.add_row(*row)
        out.print(table)
